"""Models that share a GPU ──► the bytes that they take at the worst moment of a train step, part by part.

    call        actor_inf        ref_inf          actor_train ─► offload
    actor       held + working   held             held + working           held: what a model keeps between calls
    ref         held             held + working   held                     working: what one call needs besides
                                                  ▲ the peak, if the sum is largest here

A rank runs one call at a time, in the order of the graph. A model that leaves for host memory after a call of its own
is there again from its next one on. Everything is there at first: a trial that goes on from a commit loads all of it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from corral.scheduling.memory.decoder_sizes import DecoderSizes, tensor_shapes
from corral.scheduling.memory.layers import FLOAT32_BYTES

MIB, GIB = 1 << 20, 1 << 30
CONTEXT_BYTES = 2 * GIB
"""What a process takes of a GPU before it holds a tensor: CUDA's context, kernels, NCCL's buffers, workspaces."""
FRAGMENTATION = 0.05
"""Fraction of a GPU that the allocator holds and cannot give out, since the holes are too small."""

Part = Literal["parameters", "gradients", "optimizer", "activations", "head", "KV cache", "buffers"]
"""What bytes are for. `head` is all that is as wide as the vocabulary; `buffers` are copies that come and go: of layers
that are gathered, and of weights that are about to be taken over."""
PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer", "activations", "head", "KV cache", "buffers")

Parts = Mapping[Part, int]
"""Bytes by what they are for; a part that is not there is 0."""

NOTHING: Parts = MappingProxyType({})


def usable_bytes(gpu_bytes: int) -> int:
    """What is left of a GPU for what is estimated here; a stated reserve stands for all that is not."""
    return max(0, gpu_bytes - CONTEXT_BYTES - round(FRAGMENTATION * gpu_bytes))


def gpu_bytes_for(needed: int) -> int:
    """The smallest GPU of which so many bytes are usable."""
    size = round((needed + CONTEXT_BYTES) / (1.0 - FRAGMENTATION))
    return size if usable_bytes(size) >= needed else size + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnGpu:
    """One model on one GPU."""

    name: str
    held: Parts
    """The bytes that it keeps from call to call."""
    working: Mapping[str, Parts]
    """The further bytes of each of its calls, by the call's name."""

    def during(self, call: str) -> Parts:
        """All that it has in its own call."""
        return dict(Counter(self.held) + Counter(self.working.get(call, NOTHING)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOnGpu:
    """One call of the step on a model that this GPU holds."""

    name: str
    model: str
    offloads: bool = False
    """Whether the model leaves for host memory afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The worst moment of a GPU."""

    call: str
    parts_by_model: Mapping[str, Parts]
    """Of the models that are there at that moment."""

    @property
    def total(self) -> int:
        return sum(sum(parts.values()) for parts in self.parts_by_model.values())

    @property
    def certain(self) -> int:
        """What is known to the byte: how many numbers are held, in which type."""
        known: tuple[Part, ...] = ("parameters", "gradients", "optimizer", "KV cache")
        return sum(parts.get(part, 0) for parts in self.parts_by_model.values() for part in known)

    @property
    def largest(self) -> tuple[str, Part]:
        """The model and the part of it that take most."""
        sizes = {(name, part): size for name, parts in self.parts_by_model.items() for part, size in parts.items()}
        return max(sizes, key=lambda key: sizes[key])


def peak_of(models: Sequence[ModelOnGpu], calls: Sequence[CallOnGpu]) -> Peak:
    """The worst moment of two steps, after which nothing new happens.

    Raises:
        ValueError: if there is no call on any of the models.
    """
    by_name = {model.name: model for model in models}
    own = [call for call in calls if call.model in by_name]
    if not own:
        raise ValueError(f"no call runs on {', '.join(by_name) or 'no model'}; a GPU without calls has no peak")
    there = set(by_name)
    moments = []
    for call in [*own, *own]:
        there.add(call.model)
        parts = {
            name: model.during(call.name) if name == call.model else model.held
            for name, model in by_name.items()
            if name in there
        }
        moments.append(Peak(call=call.name, parts_by_model=parts))
        if call.offloads:
            there.remove(call.model)
    return max(moments, key=lambda moment: moment.total)


# What generates -> bytes on each of its GPUs: a server's engine, or the embedded one in a rank that trains.
#
#  weights        cut over the server's GPUs, what is small whole; the embedded engine reads new ones beside those that
#                 it answers with, and rounds to int8 beside them
#  KV cache       keys and values of every token that it may hold
#  activations    of the embedded engine while it reads prompts, of one layer: of as many tokens as it reads at a time
#  head           logits of one token of each running request, in float32, and what sampling makes of them
#
# SGLang's activations, graphs and workspaces are of the reserve, and what `sglang.flags` change is not known here.

ANSWER = "answer"
"""What a server does, as the one call on its model."""
PROMPT_TOKENS = 8192
"""Of the contexts that the embedded engine reads at a time: bounds its activations, far above where batching pays."""
_INPUT_BYTES = 16  # of a token: its id and its position
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
    """The memory of each GPU of a server.

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
    of_token = number_bytes * _reads_in(sizes) + _INPUT_BYTES
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
