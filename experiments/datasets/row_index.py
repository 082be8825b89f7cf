"""Which rows of a source are taken, and how they are called: a look at a few fields of every row, at none as a whole.

rows ──id, fields of where, field of order──► those that are asked for ──► number by name, and value in the order
"""

import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

from corral.experiments.config.condition import Condition
from corral.experiments.config.data import SourceConfig
from corral.experiments.datasets.row_files import RowFiles
from corral.experiments.datasets.row_parser import RowError, row_id_of
from corral.experiments.errors import did_you_mean, show_value

ONE_A_LINE = "write one JSON object a line, without line breaks inside"


class PlacedError(RowError):
    """What is wrong with a row, and where it stands."""


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Of the rows of one source that are taken, in the order of the files."""

    numbers: dict[str, int] = field(default_factory=dict)
    """Number of every row by its name."""
    values: "array[float]" = field(default_factory=lambda: array("d"))
    """[rows] float64: what each has in the field that passes go by; empty where they go by none."""


def index_rows(rows: RowFiles, config: SourceConfig, *, before: str, left_out: Collection[int]) -> RowIndex:
    """
    Args:
        before: what all names begin with.
        left_out: numbers of rows that are passed over.

    Raises:
        PlacedError: if a row can have no name, or has that of another one; if `where` or `order` cannot be asked of it.
    """
    wanted, key, where = range(len(rows))[config.first_and_last], config.columns.id, _Where(rows, config)
    index, order, number = RowIndex(), config.order, -1
    fields = (key, *where.fields) if order is None else (key, *where.fields, order)
    try:
        for number, values in enumerate(islice(rows.columns(fields), wanted.stop)):
            if not values or number < wanted.start or number in left_out or not where.takes(number, values[1:]):
                continue
            own_id = row_id_of(values[0], number, key)
            if (first := index.numbers.setdefault(before + own_id, number)) != number:
                hint = f"every {key!r} must be unique; a row without it is known by its number, from 0"
                raise RowError(f"{key!r} {own_id!r} is also that of {rows.place(first)}", hint)
            if order is not None:
                index.values.append(_number_in(order, values[-1]))
        where.check()
    except RowError as error:
        raise PlacedError(f"{rows.place(number)}: {error.rule}", error.hint) from error
    except (ValueError, RecursionError) as error:
        # It is the next one that could not be read.
        raise PlacedError(f"{rows.place(number + 1)}: row is not JSON: {error}", ONE_A_LINE) from error
    return index


def _number_in(order: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        hint = "name another field, take only rows that have a number there with `where`, or write one with `transform`"
        raise RowError(f"order {order!r} goes by numbers, got {show_value(value)}", hint)
    return float(value)


class _Where:
    """The condition of a source, asked of one row after the other."""

    def __init__(self, rows: RowFiles, config: SourceConfig) -> None:
        self._rows, self._text = rows, config.where
        self._condition = None if config.where is None else Condition.parse(config.where)
        self.fields = () if self._condition is None else self._condition.fields
        self._number, self._unseen = -1, set(self.fields)

    def takes(self, number: int, values: Sequence[object]) -> bool:
        """
        Raises:
            RowError: if it cannot be asked of this row.
        """
        if self._condition is None:
            return True
        self._number, values = number, values[: len(self.fields)]
        if self._unseen:
            self._unseen -= {field for field, value in zip(self.fields, values, strict=True) if value is not None}
        try:
            return bool(self._condition.holds(*values))
        except TypeError as error:
            lacking = [field for field, value in zip(self.fields, values, strict=True) if value is None]
            if not lacking:
                raise RowError(f"where {self._text!r} fails: {error}", "compare numbers with numbers") from error
            row = self._rows[number]
            names = list(row) if isinstance(row, dict) else []
            otherwise = f"if other rows have it, begin with: {lacking[0]} is not None and"
            if lacking[0] not in names:
                otherwise = f"name one of {', '.join(names[:8])}; or, {otherwise}"
            hint = did_you_mean(lacking[0], names, otherwise) if lacking[0] not in names else otherwise
            raise RowError(f"where {self._text!r} fails: this row has no {lacking[0]!r}", hint) from error

    def check(self) -> None:
        """After all rows.

        Raises:
            RowError: if none of them has a field that it reads.
        """
        for lacking in sorted(self._unseen if self._number >= 0 else ()):
            row = self._rows[self._number]
            names = list(row) if isinstance(row, dict) else []
            hint = did_you_mean(lacking, names, f"name one of {', '.join(names[:8])} in where {self._text!r}")
            raise RowError(f"no row up to here has a field {lacking!r}", hint)
