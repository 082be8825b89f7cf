"""One generation server in its layout -> bytes on each of its GPUs.

    parameters   the weights, each matrix cut over the server's GPUs; what is small is whole on each
    KV cache     keys and values of every token that the server may hold, cut by heads
    head         logits of one token of each running request, in float32, and their softmax; in the pool of the embedded
                 engine's CUDA graphs once more, in the type of the weights and in float32
    buffers      the embedded engine reads new weights beside those it answers with, and rounds to int8 beside them
                 (workers/engine/engine.py, int8_linear.py); SGLang overwrites its own

SGLang's graphs and its workspaces are of the reserve, and what `sglang.flags` change is not known here.
"""

import math

from corral.scheduling.memory.activations import FLOAT32_BYTES
from corral.scheduling.memory.decoder_sizes import DecoderSizes, Shape, tensor_shapes
from corral.scheduling.memory.fsdp import key_value_bytes_per_token
from corral.scheduling.memory.gpu import ModelOnGpu

ANSWER = "answer"
"""What a server does, as the one call on its model."""


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
    has_graphs: bool = False,
) -> ModelOnGpu:
    """What each GPU of a server has to hold.

    Args:
        number_bytes: of a weight, and of a number in the KV cache.
        num_gpus: of the server (tensor parallel).
        is_embedded: whether it is the embedded engine.
        is_rounded: whether that computes with weights rounded to int8.
        has_graphs: whether it replays its steps as CUDA graphs.
    """
    shapes = tensor_shapes(sizes).items()
    weights = number_bytes * sum(_numbers(name, shape, num_gpus) for name, shape in shapes)
    matrices = number_bytes * sum(math.prod(shape) for name, shape in shapes if "_proj" in name)
    of_token = key_value_bytes_per_token(sizes, number_bytes=number_bytes, tensor_parallel=num_gpus)
    rounded = matrices if is_rounded else 0
    logits = sizes.vocab_size * max_running_requests
    return ModelOnGpu(
        name=name,
        held={
            "parameters": weights + rounded,
            "KV cache": of_token * max_total_tokens,
            "head": logits * (2 * FLOAT32_BYTES + (number_bytes + FLOAT32_BYTES if has_graphs else 0)),
            "buffers": weights + rounded if is_embedded else 0,
        },
        working={},
    )


def _numbers(name: str, shape: Shape, num_gpus: int) -> int:
    """Of one tensor on one GPU: products, embeddings and experts are cut, norms and routers are not."""
    is_cut = "_proj" in name or name.endswith(("embed_tokens.weight", "lm_head.weight"))
    return -(-math.prod(shape) // num_gpus) if is_cut else math.prod(shape)
