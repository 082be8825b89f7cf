"""Where a rank's share of a parameter lies in the tensors of the model: what is fused, cut and flattened, as boxes.

    q_proj 0 1 2 3 4 5   k_proj 0 1   v_proj 0 1      tensors of the model, rows of heads
           └─────┬───────────┴───────────┘
    linear_qkv   q0 q1 q2 k0 v0 | q3 q4 q5 k1 v1      rows of groups of heads, cut over the ranks of a layer
                    └─ share ─┘                       flattened, cut over the ranks that have the same

Which row of a fused parameter is which row of which tensor is asked of the bridge, by giving it numbers of rows in
place of weights: mbridge alone knows. A share may begin and end within a row, so that each stretch of rows makes three
boxes at most. Values keep their order: a box is a view of the share.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from corral.workers.backends.megatron.bridge import Bridge, cut_dimension, is_cut
from corral.workers.backends.megatron.experts import place_in_module


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
    """Values of a flat share that are together in a tensor of the model."""

    offset: int
    """Of the first value, within the share."""
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Places:
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
    """Where a flat share lies that is cut out of rows.

    Args:
        stretches: all of the rows, in their order.
        width: values of a row; None of a vector, whose values are rows.
        start: first value of the share.
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
