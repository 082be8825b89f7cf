"""Layered drawing of a graph: items in columns and wires between them -> an order and a height for each item. Pure.

column 0      1        2            a wire that spans several columns goes through a bend in each one between
┌───┐       ┌───┐    ┌───┐
│ a ├──┬───►│ b ├───►│ d │          order     barycentres of the neighbours, sweep by sweep (Sugiyama et al. 1981)
└───┘  ├───►└───┘ ┌─►└───┘          heights   as near to the neighbours as the distances allow: isotonic regression
       └────bend──┘
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

_ORDER_SWEEPS = 12  # the graphs of a train step settle after three or four
_HEIGHT_SWEEPS = 24
_LOOSE = 1e-3  # the weight of an item without wires: it gives way to those that have some


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something that has a place in a column."""

    name: str
    column: int
    height: float
    is_bend: bool = False
    stays_below: bool = False
    """Whether it goes below the others of its column: something comes up to it from beneath."""


@dataclass(slots=True, kw_only=True)
class Layers:
    """Items with their wires, being put in place.

    Example:
        layers = Layers(items=[...], wires=[("samples", "ref_inf"), ("ref_inf", "actor_train")], gap=0.3)
        layers.centres()        # {"samples": 0.0, "ref_inf": 0.4, ...}: y of each item, upwards
    """

    items: Sequence[Item]
    wires: Sequence[tuple[str, str]]
    """From an item to one in the next column."""
    gap: float
    """Least distance between two neighbours of a column."""
    _neighbours: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self._neighbours = {item.name: [] for item in self.items}
        for start, end in self.wires:
            self._neighbours[start].append(end)
            self._neighbours[end].append(start)

    def centres(self) -> dict[str, float]:
        """y of the middle of each item; the picture's middle is 0, and up is more."""
        columns = self._ordered()
        y_by_name = {name: y for column in columns for name, y in self._stacked(column).items()}
        for sweep in range(_HEIGHT_SWEEPS):
            for column in columns if sweep % 2 == 0 else reversed(columns):
                wanted = [self._mean(item.name, y_by_name, otherwise=y_by_name[item.name]) for item in column]
                y_by_name |= self._settled(column, wanted)
        return y_by_name

    def _ordered(self) -> list[list[Item]]:
        """The items of each column from top to bottom, with few crossings."""
        columns: dict[int, list[Item]] = {}
        for item in self.items:
            columns.setdefault(item.column, []).append(item)
        ordered = [columns[number] for number in sorted(columns)]
        place_by_name = _places(ordered)
        for sweep in range(_ORDER_SWEEPS):
            for column in ordered if sweep % 2 == 0 else reversed(ordered):
                column.sort(key=lambda item: (item.stays_below, self._mean(item.name, place_by_name, otherwise=1.0)))
                place_by_name |= _places([column])
        return ordered

    def _mean(self, name: str, value_by_name: Mapping[str, float], *, otherwise: float) -> float:
        """Of an item's neighbours."""
        neighbours = self._neighbours[name]
        return fmean(value_by_name[other] for other in neighbours) if neighbours else otherwise

    def _stacked(self, column: Sequence[Item]) -> dict[str, float]:
        """A column as tight as it may be, around 0."""
        total = sum(item.height for item in column) + self.gap * (len(column) - 1)
        return self._settled(column, [total / 2] * len(column))

    def _settled(self, column: Sequence[Item], wanted: Sequence[float]) -> dict[str, float]:
        """The heights nearest to those wanted, in the least-squares sense, that keep order and distance."""
        offsets, offset = [], 0.0
        for number, item in enumerate(column):
            if number:
                offset += (column[number - 1].height + item.height) / 2 + self.gap
            offsets.append(offset)
        # Downwards, and less the least distance, the heights have only to rise: pool adjacent violators.
        pools: list[tuple[float, float, int]] = []  # mean, weight, items
        for item, value, least in zip(column, wanted, offsets, strict=True):
            pools.append((-value - least, 1.0 if self._neighbours[item.name] else _LOOSE, 1))
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                (upper, heavy, many), (lower, light, few) = pools[-2:]
                mean = (upper * heavy + lower * light) / (heavy + light)
                pools[-2:] = [(mean, heavy + light, many + few)]
        levels = [mean for mean, _, count in pools for _ in range(count)]
        return {item.name: -(level + least) for item, level, least in zip(column, levels, offsets, strict=True)}


def _places(columns: Sequence[Sequence[Item]]) -> dict[str, float]:
    """Where each item stands in its column: 0 at the top, 1 at the bottom."""
    return {item.name: (number + 0.5) / len(column) for column in columns for number, item in enumerate(column)}
