"""Dataset: the rows of all sources of a data set by their names, each read when it is asked for.

    DatasetConfig ──find, open──► sources ──look──► DatasetSpec: facts for the plan ──► workers open the same again

The name of a row is its id, or its number in the source; with several sources, behind the name of its own: gsm8k/17.
What is looked at before a trial: the names of all rows; and whole rows, all of them or `MOST_LOOKED_AT` evenly from
everywhere. A wrong row that was not looked at is reported when its turn comes, and dropped.
"""

import math
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import cast

from corral.experiments.config.condition import Condition
from corral.experiments.config.data import DatasetConfig, RowKind, SourceConfig, column
from corral.experiments.datasets.formats import find_files, name_of, open_rows, unreadable
from corral.experiments.datasets.row_files import RowFiles, fingerprint, plain
from corral.experiments.datasets.row_parser import DatasetRow, RowError, RowParser, row_id_of
from corral.experiments.errors import ChangedInputError, ConfigError, ConfigProblem, did_you_mean, show_value
from corral.experiments.worker_specs import DatasetSpec, SourceSpec
from corral.scheduling.worker_information import fold_numbers, unfold_numbers

MOST_LOOKED_AT = 20_000
_MAX_PROBLEMS = 3  # more of the same kind would only scroll the first ones away
_NONE_TAKEN = "let it take some of them, or remove it"


# Which rows of a source are taken, and how they are called: a look at a few fields of every row, at none as a whole.
#
# rows ──id, fields of where, field of order──► those that are asked for ──► number by name, and value in the order

ONE_A_LINE = "write one JSON object a line, without line breaks inside"


class PlacedError(RowError):
    """An error in a row, with the row's location."""


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
    wanted, key, where = range(len(rows))[config.first_and_last], column(config.columns, "id"), _Where(rows, config)
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
        raise PlacedError(f"{rows.place(number)}: {error.message}", error.hint) from error
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


@dataclass(frozen=True)
class Source:
    """One of the sources of a data set."""

    name: str
    """Of the source; empty where there is only one."""
    config: SourceConfig
    kind: RowKind
    files: tuple[Path, ...]
    rows: RowFiles
    sha256: str
    left_out: frozenset[int] = frozenset()
    """Numbers, from 0, of rows that are passed over."""

    @cached_property
    def _parser(self) -> RowParser:
        return RowParser(self.config.columns, self.kind)

    def read(self, number: int, row_id: str) -> DatasetRow | None:
        """One row; None for a line without anything.

        Raises:
            ValueError: naming the row and what is wrong with it.
        """
        try:
            fields = plain(self.rows[number])
        except (ValueError, RecursionError) as error:
            raise RowError(f"row is not JSON: {error}", ONE_A_LINE) from error
        if fields is None:
            return None
        return self._parser.parse(fields, row_id=row_id, place=self.rows.place(number), source=self.name)

    @cached_property
    def index(self) -> RowIndex:
        """The rows that are taken.

        Raises:
            PlacedError: as `index_rows`.
        """
        before = f"{self.name}/" if self.name else ""
        return index_rows(self.rows, self.config, before=before, left_out=self.left_out)


class Dataset(Mapping[str, DatasetRow]):
    """Rows by their names, in the order of sources and files."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self.sources = tuple(sources)

    @classmethod
    def open(cls, config: DatasetConfig, *, kind: RowKind, content: bytes | None = None) -> "Dataset":
        """As a configuration names it.

        Args:
            content: what its file is going to hold, where it does not yet.

        Raises:
            ConfigError: if it cannot be read.
        """
        opened, problems = [], []
        for name, one in config.all_sources.items():
            try:
                files = (one.path or Path(),) if content is not None else find_files(one)
                rows = open_rows(files, content)
                digest = fingerprint(files if content is None else [content])
                opened.append(Source(name, one, kind, files, rows, digest))
            except (OSError, ValueError) as error:
                problems.append(unreadable(one, error))
        if problems:
            raise ConfigError(problems)
        return cls(opened)

    @classmethod
    def planned(cls, spec: DatasetSpec) -> "Dataset":
        """As it was when the trial was submitted.

        Raises:
            OSError: if it cannot be read at the moment.
            ChangedInputError: if it is not there any more, or has changed since.
        """
        opened = []
        for name, one in spec.sources.items():
            config = spec.config.all_sources[name]
            try:
                digest = fingerprint(one.files)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
                raise ChangedInputError(
                    f"dataset {name_of(config)} cannot be read any more ({error.strerror}: {error.filename})",
                    "put the old file back, or submit a new trial",
                ) from error
            if digest != one.sha256:
                raise ChangedInputError(
                    f"dataset {name_of(config)} has changed since the trial was submitted (sha256 {digest[:12]}, "
                    f"plan {one.sha256[:12]})",
                    "put the old file back, or submit a new trial",
                )
            left_out = frozenset(number - 1 for number in unfold_numbers(one.too_long))
            opened.append(Source(name, config, spec.row_kind, one.files, open_rows(one.files), digest, left_out))
        return cls(opened)

    @cached_property
    def _position_by_id(self) -> dict[str, tuple[int, int] | int]:
        """Source and number of each row; of the only source, the number alone, which takes less memory."""
        if len(self.sources) == 1:
            return cast(dict[str, tuple[int, int] | int], self.sources[0].index.numbers)
        numbers = [one.index.numbers for one in self.sources]
        return {row_id: (at, number) for at, of_source in enumerate(numbers) for row_id, number in of_source.items()}

    def __getitem__(self, row_id: str) -> DatasetRow:
        """
        Raises:
            ValueError: if there is something wrong with the row.
        """
        position = self._position_by_id[row_id]
        at, number = (0, position) if isinstance(position, int) else position
        row = self.sources[at].read(number, row_id)
        assert row is not None, row_id  # lines that are no rows have no names
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(self._position_by_id)

    def __len__(self) -> int:
        return len(self._position_by_id)

    def __contains__(self, row_id: object) -> bool:
        return row_id in self._position_by_id


@dataclass
class Look:
    """Rows of a data set, looked at one by one; `problems` is complete afterwards.

    look = Look(dataset)
    for number, row in look: ...
    """

    dataset: Dataset
    most: int = MOST_LOOKED_AT

    def __post_init__(self) -> None:
        self.problems: list[ConfigProblem] = []
        self.num_rows = 0
        """In all."""
        self.is_whole = True
        """Whether all of them are looked at."""

    def check(self) -> None:
        """Looks at all that are to be looked at.

        Raises:
            ConfigError: if something is wrong with one.
        """
        deque(self, maxlen=0)
        if self.problems:
            raise ConfigError(self.problems)

    def __iter__(self) -> Iterator[tuple[Source, int, DatasetRow]]:
        for source in self.dataset.sources:
            yield from self._rows_of(source)

    def _rows_of(self, source: Source) -> Iterator[tuple[Source, int, DatasetRow]]:
        try:
            names = source.index.numbers
        except PlacedError as error:
            self.problems.append(ConfigProblem(error.message, error.hint))
            return
        self.num_rows += len(names)
        if not names:
            one, num_rows, hint = source.config, len(source.rows), ONE_A_LINE
            # What takes the rows is to blame, and not the file; `rows` is asked first.
            takes = {"rows": one.rows if one.rows != ":" else None, "where": one.where, "transform": one.transform}
            key = next((key for key, value in takes.items() if value is not None), "") if num_rows else ""
            if key == "rows" and one.where is not None and range(num_rows)[one.first_and_last]:
                key = "where"
            message = f"dataset {name_of(one)} has no rows"
            if key:
                message, hint = f"{key} takes 0 of the {num_rows:,} rows of {name_of(one)}", _NONE_TAKEN
            above = ("sources", source.name) if source.name and key else ()
            self.problems.append(ConfigProblem(message, hint, path=(*above, key) if key else ()))
            return
        step = -(-len(names) // max(1, self.most // len(self.dataset.sources)))
        self.is_whole &= step == 1
        known = set[str]()
        for row_id, number in islice(names.items(), 0, None, step):
            try:
                row = source.read(number, row_id)
            except RowError as error:
                if error.message not in known:  # of rows with the same mistake the first one is enough
                    self.problems.append(ConfigProblem(f"{source.rows.place(number)}: {error.message}", error.hint))
                known.add(error.message)
                if len(self.problems) >= _MAX_PROBLEMS:
                    return
                continue
            if row is not None:
                yield source, number, row


def dataset_spec(
    config: DatasetConfig,
    *,
    kind: RowKind,
    too_long: Mapping[str, Iterable[int]] = MappingProxyType({}),
    content: bytes | None = None,
) -> DatasetSpec:
    """Facts of a dataset as it is now.

    Args:
        too_long: numbers of rows, from 0, that are left out, by source.
        content: what its file is going to hold, where it does not yet.

    Raises:
        ConfigError: if it cannot be used.
    """
    dataset = Dataset.open(config, kind=kind, content=content)
    sources: dict[str, SourceSpec] = {}
    for one in dataset.sources:
        left_out = list(too_long.get(one.name, ()))
        try:
            num_rows = len(one.index.numbers) - len(left_out)
        except PlacedError as error:
            raise ConfigError.of(error.message, hint=error.hint) from error
        lines = fold_numbers(number + 1 for number in left_out)
        sources[one.name] = SourceSpec(files=one.files, num_rows=num_rows, too_long=lines, sha256=one.sha256)
    return DatasetSpec(config=config, row_kind=kind, sources=sources)
