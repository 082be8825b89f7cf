"""The training state of a rank of the megatron backend: master weights and moments, as parts of the model.

Of a model that follows another one by a moving average it is float32 weights, which are not in its files.

    optimizer's shard of a parameter, flat ──stretches──► boxes of q_proj, k_proj, ... ──► a file    (train_state.py)
    optimizer's shard of a parameter       ◄── filled, box by box ◄── files of any layout and backend

Megatron's distributed optimizer cuts what a tensor-parallel rank has of a parameter, flattened, over the ranks that
have the same. An output that is tied to the embedding is a copy on the last stage, which is read there and not written.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from corral.workers.backends.files.tensors import Part
from corral.workers.backends.megatron.bridge import Bridge, cut_dimension, is_cut
from corral.workers.backends.megatron.experts import place_in_module, stack_experts
from corral.workers.backends.megatron.optimizer import StageOptimizer
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


# Where a rank's shard of a parameter lies in the tensors of the model: what is fused, cut and flattened, as boxes.
#
#     q_proj 0 1 2 3 4 5   k_proj 0 1   v_proj 0 1      tensors of the model, rows of heads
#            └─────┬───────────┴───────────┘
#     linear_qkv   q0 q1 q2 k0 v0 | q3 q4 q5 k1 v1      rows of groups of heads, cut over the ranks of a layer
#                     └─ shard ─┘                       flattened, cut over the ranks that have the same
#
# Which row of a fused parameter is which row of which tensor is asked of the bridge, by giving it numbers of rows in
# place of weights: mbridge alone knows. A shard may begin and end within a row, so that each stretch of rows makes
# three boxes at most. Values keep their order: a box is a view of the shard.


class Stretch(NamedTuple):
    """Rows of this rank's part of a parameter that follow each other in one tensor of the model, too."""

    first: int
    """Row of the part; of a vector each value is one."""
    rows: int
    name: str
    """Of the tensor of the model."""
    start: tuple[int, ...]
    """Where the first of these rows begins in it."""


class Box(NamedTuple):
    """Values of a flat shard that are together in a tensor of the model."""

    offset: int
    """Of the first value, within the shard."""
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class ParameterLayout:
    """Of all parameters of a rank."""

    def __init__(
        self, bridge: Bridge, parameters: Mapping[str, nn.Parameter], whole: Mapping[str, tuple[int, ...]]
    ) -> None:
        """
        Args:
            parameters: by their names within the whole model.
            whole: the shape that each has there.
        """
        self._bridge = bridge
        self._rows: dict[tuple[str, tuple[int, ...]], tuple[Tensor, list[tuple[int, ...]]]] = {}
        self._width = {name: own.shape[1] if own.ndim > 1 else None for name, own in parameters.items()}
        self._stretches = {
            name: list(self._stretches_of(name, whole[name], parameter)) for name, parameter in parameters.items()
        }

    def boxes(self, name: str, start: int, length: int) -> Iterator[Box]:
        """Where the values [start, start + length) of this rank's flattened part of a parameter lie."""
        return boxes(self._stretches[name], self._width[name], start, length)

    def names(self, name: str) -> set[str]:
        """The tensors of the model that this rank's part of a parameter is made of."""
        return {stretch.name for stretch in self._stretches[name]}

    def _stretches_of(self, name: str, whole: tuple[int, ...], parameter: nn.Parameter) -> Iterator[Stretch]:
        stored_rows, shapes = self._rows_of(name, whole)
        own_rows, column = self._own_rows(name, whole, parameter)
        rows = stored_rows[own_rows]
        bounds = [0, *((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
        stored_names = self._bridge.stored_names(name)
        for first, end in pairwise(bounds):
            number, row = divmod(int(rows[first]), whole[0] + 1)
            home, start = place_in_module(stored_names[number], shapes[number], self._bridge.expert_names)
            yield Stretch(first, end - first, home, moved(start, row, column, ndim=len(whole)))

    def _own_rows(self, name: str, whole: tuple[int, ...], parameter: nn.Parameter) -> tuple[Tensor, int]:
        """Which rows of the whole parameter this rank has, and which of their columns is its first."""
        rows = torch.arange(whole[0])
        if is_cut(parameter) and cut_dimension(parameter) == 1:
            return rows, self._bridge.tensor_rank * parameter.shape[1]
        return self._bridge.own_part(name, rows.view(-1, *(1 for _ in whole[1:])), parameter).flatten(), 0

    def _rows_of(self, name: str, whole: tuple[int, ...]) -> tuple[Tensor, list[tuple[int, ...]]]:
        """Of each row of a whole parameter, n * (rows + 1) + its row in stored tensor n; and these tensors' shapes."""
        kind = (re.sub(r"\d+", "", name), whole)  # the same in all layers, and not made for each of them
        if kind not in self._rows:
            numbers = torch.arange(whole[0], dtype=torch.int32).view(-1, *(1 for _ in whole[1:])).expand(whole)
            rows = torch.empty(whole[0], dtype=torch.int64)
            shapes = []
            for number, (_, stored) in enumerate(self._bridge.to_stored(name, numbers)):
                held = (stored if stored.ndim == 1 else stored[:, 0]).long()
                rows[held] = number * (whole[0] + 1) + torch.arange(len(held))
                shapes.append(tuple(stored.shape))
            self._rows[kind] = rows, shapes
        return self._rows[kind]


def boxes(stretches: Iterable[Stretch], width: int | None, start: int, length: int) -> Iterator[Box]:
    """Where a flat shard lies that is cut out of rows.

    Args:
        stretches: all of the rows, in their order.
        width: values of a row; None of a vector, whose values are rows.
        start: first value of the shard.
        length: number of its values.
    """
    for stretch in stretches:
        at = max(start, stretch.first * (width or 1))
        end = min(start + length, (stretch.first + stretch.rows) * (width or 1))
        while at < end:
            row, column = divmod(at, width or 1)
            shape: tuple[int, ...] = (end - at,)
            if width is not None:
                is_whole = column == 0 and end - at >= width
                shape = ((end - at) // width, width) if is_whole else (1, min(width - column, end - at))
            lead = len(stretch.start) - len(shape)
            yield Box(
                at - start,
                stretch.name,
                moved(stretch.start, row - stretch.first, column, ndim=len(shape)),
                (1,) * lead + shape,
            )
            at += math.prod(shape)


def moved(start: tuple[int, ...], rows: int, columns: int, *, ndim: int) -> tuple[int, ...]:
    """An index so many rows further down, and columns to the right.

    Args:
        ndim: 2 if the last two numbers are row and column, 1 if the last one is a vector's.
    """
    return tuple(a + b for a, b in zip(start, (0,) * (len(start) - ndim) + (rows, columns)[:ndim], strict=True))


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """This rank's shard of one parameter, and of its moments."""

    start: int
    """Its first value within the rank's part of the parameter, flattened."""
    tensors: Mapping[str, Tensor]
    """Flat: `parameter`, and of one that is trained `exp_avg`, `exp_avg_sq`."""
    step: Tensor | None = None
    """How many steps it has made: a scalar; None where there is no optimizer."""


class StageState:
    """The shards that one rank's optimizer has of master weights and moments.

    Without an optimizer: the moving averages of a model that follows another one. Ranks that hold the same average
    write a shard each, and read all of it.
    """

    def __init__(self, weights: StageWeights, bridge: Bridge, optimizer: StageOptimizer | None) -> None:
        self._weights, self._bridge, self._optimizer = weights, bridge, optimizer
        self._moments = _MOMENTS if optimizer is not None else []
        self._layout = ParameterLayout(bridge, weights.parameters, {part.name: part.shape for part in weights.parts})

    def shard(self, header: TrainStateHeader, *, rank: int) -> StateShard:
        """This rank's parts of every parameter and its moments; no rank waits for another one."""
        if rank == 0:
            sizes, kinds = self._sizes(), (PARAMETER, *self._moments)
            step = next((shard.step for _, shard in self._written() if shard.step is not None), None)
            steps = float(header.step if step is None else step)  # all step together
            header = replace(
                header,
                sizes={f"{kind}.{name}": list(size) for name, size in sizes.items() for kind in kinds},
                scalars={f"{_STEP}.{name}": steps for name in sizes} if self._moments else {},
            )
        own = (
            part for name, shard in self._written() if self._weights.counts(name) for part in self._parts(name, shard)
        )
        return state_shard(own, header, rank=rank)

    @torch.no_grad()
    def read(self, stored: StoredState) -> None:
        """Fill this rank's shards from a state of any layout; moments of no step yet are zero.

        Raises:
            ValueError: if the state is of another model or optimizer, or a part of it is missing.
        """
        stored.check(self._sizes(), (lambda _: ADAMW) if self._moments else None)
        wanted = []
        for name, shard in self._held():
            if shard.step is not None:
                shard.step.fill_(self._stored_step(stored.header, name))
            for part in self._parts(name, shard):
                if part.name in stored.header.sizes:
                    wanted.append(part)
                else:
                    part.values.zero_()
        stored.fill(wanted)

    def _held(self) -> Iterator[tuple[str, ParameterShard]]:
        """What is read, by name; a parameter that other data-parallel ranks' optimizers keep has none."""
        if self._optimizer is None:
            yield from (
                (name, ParameterShard(0, {PARAMETER: own.flatten()})) for name, own in self._weights.averages.items()
            )
            return
        for name, parameter in self._weights.parameters.items():
            for optimizer in self._optimizer.chained_optimizers:
                if parameter in optimizer.model_param_gbuf_map:
                    yield name, _parameter_shard(parameter, optimizer)

    def _written(self) -> Iterator[tuple[str, ParameterShard]]:
        """The shards to write, by name. Ranks that hold the same average write a shard of it each."""
        for name, shard in self._held():
            if self._optimizer is None:
                flat, group = shard.tensors[PARAMETER], self._weights.replicas(name)
                first, end = (flat.numel() * place // group.size() for place in (group.rank(), group.rank() + 1))
                shard = ParameterShard(first, {PARAMETER: flat[first:end]})
            yield name, shard

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole model's tensors, as modules of transformers have them."""
        shapes = self._weights.stored_shapes().items()
        stored = ((name, torch.empty(shape, device="meta")) for name, shape in shapes)
        whole = stack_experts(stored, self._bridge.expert_names, num_experts=self._bridge.num_experts)
        return {name: tuple(tensor.shape) for name, tensor in whole}

    def _parts(self, name: str, shard: ParameterShard) -> Iterator[Part]:
        length = shard.tensors[PARAMETER].numel()
        for box in self._layout.boxes(name, shard.start, length):
            for kind, tensor in shard.tensors.items():
                values = tensor[box.offset : box.offset + math.prod(box.shape)].view(box.shape)
                yield Part(f"{kind}.{box.name}", box.start, values)

    def _stored_step(self, header: TrainStateHeader, name: str) -> float:
        """Of the tensors that a parameter is made of, which have all made the same."""
        steps = {tensor: header.scalars.get(f"{_STEP}.{tensor}", 0.0) for tensor in sorted(self._layout.names(name))}
        if len(set(steps.values())) > 1:
            raise ValueError(
                f"the stored optimizer has made unequal numbers of steps of tensors that are one to Megatron: {steps}; "
                "continue on the fsdp backend"
            )
        return next(iter(steps.values()))


def _parameter_shard(parameter: nn.Parameter, optimizer: Any) -> ParameterShard:
    """Moments that no step has made yet are zero."""
    index, kind, bucket = optimizer.model_param_gbuf_map[parameter]
    kept = optimizer.gbuf_ranges[index][kind][bucket]["param_map"][parameter]
    group, place = optimizer.model_param_group_index_map[parameter]
    main = optimizer.optimizer.param_groups[group]["params"][place]
    state: dict[str, Tensor] = optimizer.optimizer.state[main]
    for moment in _MOMENTS:
        state.setdefault(moment, torch.zeros_like(main.detach()))
    step = state.setdefault(_STEP, torch.zeros((), dtype=torch.float32, device=main.device))
    return ParameterShard(
        kept["param"].start, {PARAMETER: main.detach(), **{name: state[name] for name in _MOMENTS}}, step
    )
