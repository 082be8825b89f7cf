"""What a rank of the megatron backend keeps of a training state: master weights and moments, as parts of the model.

Of a model that follows another one by a moving average it is float32 weights, which are not in its files.

    optimizer's share of a parameter, flat ──places.py──► boxes of q_proj, k_proj, ... ──► a file    (train_state.py)
    optimizer's share of a parameter       ◄── filled, box by box ◄── files of any layout and backend

Megatron's distributed optimizer cuts what a tensor-parallel rank has of a parameter, flattened, over the ranks that
have the same. An output that is tied to the embedding is a copy on the last stage, which is read there and not written.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from corral.workers.backends.files.parts import Part
from corral.workers.backends.megatron.bridge import Bridge
from corral.workers.backends.megatron.experts import stack_experts
from corral.workers.backends.megatron.optimizer import StageOptimizer
from corral.workers.backends.megatron.places import Places
from corral.workers.backends.megatron.weights import StageWeights
from corral.workers.backends.train_state import (
    ADAMW,
    PARAMETER,
    StateShard,
    StoredState,
    TrainStateHeader,
    state_shard,
)

_STEP: Final = "step"
_MOMENTS: Final = sorted(ADAMW - {_STEP})


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank keeps of one parameter."""

    start: int
    """Its first value within the rank's part of the parameter, flattened."""
    tensors: Mapping[str, Tensor]
    """Flat: `parameter`, and of one that is trained `exp_avg`, `exp_avg_sq`."""
    step: Tensor | None = None
    """How many steps it has made: a scalar; None where there is no optimizer."""


class StageState:
    """The shares that one rank's optimizer has of master weights and moments.

    Without an optimizer: the averages of a model that follows another one, of which ranks that have the same write a
    share each, and read all.
    """

    def __init__(self, weights: StageWeights, bridge: Bridge, optimizer: StageOptimizer | None) -> None:
        self._weights, self._bridge, self._optimizer = weights, bridge, optimizer
        self._moments = _MOMENTS if optimizer is not None else []
        self._places = Places(bridge, weights.parameters, {part.name: part.shape for part in weights.parts})

    def shard(self, header: TrainStateHeader, *, rank: int) -> StateShard:
        """This rank's parts of every parameter and its moments; no rank waits for another one."""
        if rank == 0:
            sizes, kinds = self._sizes(), (PARAMETER, *self._moments)
            step = next((share.step for _, share in self._written() if share.step is not None), None)
            steps = float(header.step if step is None else step)  # all step together
            header = replace(
                header,
                sizes={f"{kind}.{name}": list(size) for name, size in sizes.items() for kind in kinds},
                scalars={f"{_STEP}.{name}": steps for name in sizes} if self._moments else {},
            )
        own = (
            part for name, share in self._written() if self._weights.counts(name) for part in self._parts(name, share)
        )
        return state_shard(own, header, rank=rank)

    @torch.no_grad()
    def read(self, stored: StoredState) -> None:
        """Fill what this rank holds, whoever has written it; moments that nobody has made yet are zero.

        Raises:
            ValueError: if the state is of another model or optimizer, or a part of it is missing.
        """
        stored.check(self._sizes(), (lambda _: ADAMW) if self._moments else None)
        wanted = []
        for name, share in self._held():
            if share.step is not None:
                share.step.fill_(self._stored_step(stored.header, name))
            for part in self._parts(name, share):
                if part.name in stored.header.sizes:
                    wanted.append(part)
                else:
                    part.values.zero_()
        stored.fill(wanted)

    def _held(self) -> Iterator[tuple[str, Share]]:
        """What is read, by name; a parameter that other data-parallel ranks' optimizers keep has none."""
        if self._optimizer is None:
            yield from ((name, Share(0, {PARAMETER: own.flatten()})) for name, own in self._weights.averages.items())
            return
        for name, parameter in self._weights.parameters.items():
            for optimizer in self._optimizer.chained_optimizers:
                if parameter in optimizer.model_param_gbuf_map:
                    yield name, _share(parameter, optimizer)

    def _written(self) -> Iterator[tuple[str, Share]]:
        """What is written, by name: of an average, which several ranks hold, each has a share."""
        for name, share in self._held():
            if self._optimizer is None:
                flat, group = share.tensors[PARAMETER], self._weights.replicas(name)
                first, end = (flat.numel() * place // group.size() for place in (group.rank(), group.rank() + 1))
                share = Share(first, {PARAMETER: flat[first:end]})
            yield name, share

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole model's tensors, as modules of transformers have them."""
        shapes = self._weights.stored_shapes().items()
        stored = ((name, torch.empty(shape, device="meta")) for name, shape in shapes)
        whole = stack_experts(stored, self._bridge.expert_names, num_experts=self._bridge.num_experts)
        return {name: tuple(tensor.shape) for name, tensor in whole}

    def _parts(self, name: str, share: Share) -> Iterator[Part]:
        length = share.tensors[PARAMETER].numel()
        for box in self._places.boxes(name, share.start, length):
            for kind, tensor in share.tensors.items():
                values = tensor[box.offset : box.offset + math.prod(box.shape)].view(box.shape)
                yield Part(f"{kind}.{box.name}", box.start, values)

    def _stored_step(self, header: TrainStateHeader, name: str) -> float:
        """Of the tensors that a parameter is made of, which have all made the same."""
        steps = {tensor: header.scalars.get(f"{_STEP}.{tensor}", 0.0) for tensor in sorted(self._places.names(name))}
        if len(set(steps.values())) > 1:
            raise ValueError(
                f"the stored optimizer has made unequal numbers of steps of tensors that are one to Megatron: {steps}; "
                "continue on the fsdp backend"
            )
        return next(iter(steps.values()))


def _share(parameter: nn.Parameter, optimizer: Any) -> Share:
    """Moments that no step has made yet are zero."""
    index, kind, bucket = optimizer.model_param_gbuf_map[parameter]
    kept = optimizer.gbuf_ranges[index][kind][bucket]["param_map"][parameter]
    group, place = optimizer.model_param_group_index_map[parameter]
    main = optimizer.optimizer.param_groups[group]["params"][place]
    state: dict[str, Tensor] = optimizer.optimizer.state[main]
    for moment in _MOMENTS:
        state.setdefault(moment, torch.zeros_like(main.detach()))
    step = state.setdefault(_STEP, torch.zeros((), dtype=torch.float32, device=main.device))
    return Share(kept["param"].start, {PARAMETER: main.detach(), **{name: state[name] for name in _MOMENTS}}, step)
