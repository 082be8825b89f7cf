"""Models that share a GPU ──► the bytes that they take at the worst moment of a train step, part by part.

    call        actor_inf        ref_inf          actor_train ─► offload
    actor       held + working   held             held + working           held: what a model keeps between calls
    ref         held             held + working   held                     working: what one call needs besides
                                                  ▲ the peak, if the sum is largest here

A rank runs one call at a time, in the order of the graph. A model that leaves for host memory after a call of its own
is there again from its next one on. Everything is there at first: a trial that goes on from a commit loads all of it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

MIB, GIB = 1 << 20, 1 << 30
CONTEXT_BYTES = 2 * GIB
"""What a process takes of a GPU before it holds a tensor: CUDA's context, kernels, NCCL's buffers, workspaces."""
FRAGMENTATION = 0.05
"""Share of a GPU that the allocator holds and cannot give out, since the holes are too small."""

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
    """What it keeps from call to call."""
    working: Mapping[str, Parts]
    """What each of its calls needs besides, by the call's name."""

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
