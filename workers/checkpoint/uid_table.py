"""UidTable: a number for each of many samples, in four bytes each.

    uid "2:problem-17"  =  pass "2:"  +  row "problem-17" --number of the row--> place in the pass's array

The rows of a data set come again in every pass, so their names are kept once. A dict of uids takes two hundred bytes
per sample, for good, in every process that follows the ledger.
"""

from array import array
from collections.abc import Iterator, MutableMapping
from typing import Final

_ABSENT: Final = -1


class UidTable(MutableMapping[str, int]):
    """A mapping from uids to numbers that are not negative.

    >>> table = UidTable()
    >>> table["0:problem-17"] = 3
    >>> dict(table)
    {'0:problem-17': 3}
    """

    def __init__(self) -> None:
        self._number_by_row: dict[str, int] = {}
        self._rows: list[str] = []
        self._values_by_pass: dict[str, array[int]] = {}
        self._size = 0

    def __getitem__(self, uid: str) -> int:
        prefix, row = _split(uid)
        values, number = self._values_by_pass.get(prefix), self._number_by_row.get(row)
        if values is None or number is None or number >= len(values) or values[number] == _ABSENT:
            raise KeyError(uid)
        return values[number]

    def __setitem__(self, uid: str, value: int) -> None:
        if value < 0:
            raise ValueError(f"the value of {uid!r} must not be negative, got {value}")
        prefix, row = _split(uid)
        number = self._number_by_row.setdefault(row, len(self._rows))
        if number == len(self._rows):
            self._rows.append(row)
        values = self._values_by_pass.setdefault(prefix, array("i"))
        if number >= len(values):
            values.extend([_ABSENT] * (number + 1 - len(values)))
        self._size += values[number] == _ABSENT
        values[number] = value

    def __delitem__(self, uid: str) -> None:
        if uid not in self:
            raise KeyError(uid)
        prefix, row = _split(uid)
        self._values_by_pass[prefix][self._number_by_row[row]] = _ABSENT
        self._size -= 1

    def __iter__(self) -> Iterator[str]:
        for prefix, values in self._values_by_pass.items():
            for row, value in zip(self._rows, values, strict=False):  # a pass may not have come to the last rows yet
                if value != _ABSENT:
                    yield prefix + row

    def __len__(self) -> int:
        return self._size


def _split(uid: str) -> tuple[str, str]:
    head, separator, row = uid.partition(":")
    return (head + separator, row) if separator else ("", uid)
