"""What generates -> bytes on each of its GPUs: a server's engine, or the embedded one in a rank that trains.

 weights        cut over the server's GPUs, what is small whole; the embedded engine reads new ones beside those that it
                answers with, and rounds to int8 beside them
 KV cache       keys and values of every token that it may hold
 activations    of the embedded engine while it reads prompts, of one layer: of as many tokens as it reads at a time
 head           logits of one token of each running request, in float32, and what sampling makes of them

SGLang's activations, graphs and workspaces are of the reserve, and what `sglang.flags` change is not known here.
"""

import math

from corral.scheduling.memory.decoder_sizes import DecoderSizes, tensor_shapes
from corral.scheduling.memory.gpu import ModelOnGpu, Part, Parts
from corral.scheduling.memory.layers import FLOAT32_BYTES

ANSWER = "answer"
"""What a server does, as the one call on its model."""
PROMPT_TOKENS = 8192
"""Of the contexts that the embedded engine reads at a time: bounds its activations, far above where batching pays."""
_TOLD_BYTES = 16  # of a token: its id and its position
_WHOLE_IF_CUT = ("model.embed_tokens.weight", "lm_head.weight")


def server_on_gpu(
    name: str,
    sizes: DecoderSizes,
    *,
    number_bytes: int,
    max_total_tokens: int,
    max_running_requests: int,
    num_gpus: int = 1,
    is_embedded: bool = False,
    is_rounded: bool = False,
    longest: int = 0,
) -> ModelOnGpu:
    """What each GPU of a server has to hold.

    Args:
        number_bytes: of a weight, and of a number in the KV cache.
        num_gpus: of the server (tensor parallel).
        is_embedded: whether it is the embedded engine.
        is_rounded: whether that computes with weights rounded to int8.
        longest: tokens of the longest answer with its prompt; 0 where nobody knows.
    """
    shapes = tensor_shapes(sizes)
    matrices = {name for name in shapes if "_proj" in name}
    cut = {*matrices, *_WHOLE_IF_CUT}
    numbers = {name: -(-math.prod(shape) // (num_gpus if name in cut else 1)) for name, shape in shapes.items()}
    rounded = sum(math.prod(shapes[name]) for name in matrices) if is_rounded else 0
    weights = number_bytes * (sum(numbers.values()) + rounded)
    of_token = key_value_bytes_per_token(sizes, number_bytes=number_bytes, tensor_parallel=num_gpus)
    held: dict[Part, int] = {"parameters": weights, "KV cache": of_token * max_total_tokens}
    if not is_embedded:
        held["head"] = 2 * FLOAT32_BYTES * sizes.vocab_size * max_running_requests
        return ModelOnGpu(name=name, held=held, working={})
    held["buffers"] = weights
    tokens = min(max_total_tokens, max(PROMPT_TOKENS, longest))
    working = answering(sizes, number_bytes=number_bytes, tokens=tokens, requests=max_running_requests)
    return ModelOnGpu(name=name, held=held, working={ANSWER: working})


def answering(sizes: DecoderSizes, *, number_bytes: int, tokens: int, requests: int) -> Parts:
    """What the embedded engine works in, beside weights and cache: for prompts, or for the next token of each request.

    Args:
        tokens: that it reads at a time.
        requests: that run at a time.
    """
    logits = FLOAT32_BYTES * sizes.vocab_size * requests
    of_token = number_bytes * _reads_in(sizes) + _TOLD_BYTES
    prompts: Parts = {"activations": tokens * of_token, "head": logits}
    next_tokens: Parts = {"head": 3 * logits}  # themselves, their logarithms and exponents
    return max(prompts, next_tokens, key=lambda parts: sum(parts.values()))


def _reads_in(sizes: DecoderSizes) -> int:
    """Numbers of one token in the layer that has most: the stream, and in turn what attention and MLP make of it."""
    hidden, queries, keys = sizes.hidden_size, sizes.query_size, sizes.key_value_size
    # Projected, side by side in a second copy; or that, normalized, rotated and half of it on the way.
    attention = 2 * (queries + 2 * keys) + (3 if sizes.has_head_norms else 1) * (queries + keys)
    dense = hidden + 2 * sizes.intermediate_size
    # One expert after the other, each with all tokens at the worst: inputs, inner numbers, results, and these weighed.
    sparse = 2 * hidden + 3 * sizes.num_experts + 3 * hidden + 2 * sizes.expert_size
    rotations = 4 * sizes.head_dim  # cosine and sine of each position, and of each token
    return (
        hidden
        + rotations
        + max(attention, *(sparse if layer in sizes.sparse_layers else dense for layer in sizes.layer_kinds))
    )


def key_value_bytes_per_token(sizes: DecoderSizes, *, number_bytes: int, tensor_parallel: int = 1) -> int:
    """Keys and values of one token in all layers; where there are more ranks than heads, each has a copy of one."""
    heads = -(-sizes.num_key_value_heads // tensor_parallel)
    return 2 * sizes.num_layers * heads * sizes.head_dim * number_bytes
