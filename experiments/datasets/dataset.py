"""Dataset: the rows of all sources of a data set by their names, each read when it is asked for.

    DatasetConfig ──find, open──► sources ──look──► DatasetSpec: facts for the plan ──► workers open the same again

The name of a row is its id, or its number in the source; with several sources, behind the name of its own: gsm8k/17.
What is looked at before a trial: the names of all rows; and whole rows, all of them or `MOST_LOOKED_AT` evenly from
everywhere. What is wrong with one that was not looked at is told when its turn comes, and the row is dropped.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import cast

from corral.experiments.config.data import DatasetConfig, RowKind, SourceConfig
from corral.experiments.datasets.formats import find_files, name_of, open_rows, unreadable
from corral.experiments.datasets.row_files import RowFiles, fingerprint, plain
from corral.experiments.datasets.row_index import ONE_A_LINE, PlacedError, RowIndex, index_rows
from corral.experiments.datasets.row_parser import DatasetRow, RowError, RowParser
from corral.experiments.errors import ChangedInputError, ConfigError, ConfigProblem
from corral.experiments.worker_specs import DatasetSpec, SourceSpec
from corral.scheduling.worker_information import fold_numbers, unfold_numbers

MOST_LOOKED_AT = 20_000
_MAX_PROBLEMS = 3  # more of the same kind would only scroll the first ones away
_NONE_TAKEN = "let it take some of them, or remove it"


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
                    f"dataset {name_of(config)} cannot be read any more ({error.strerror}: {error.filename}); put the "
                    "old file back, or submit a new trial"
                ) from error
            if digest != one.sha256:
                raise ChangedInputError(
                    f"dataset {name_of(config)} has changed since the trial was submitted (sha256 {digest[:12]}, "
                    f"plan {one.sha256[:12]}); put the old file back, or submit a new trial"
                )
            left_out = frozenset(number - 1 for number in unfold_numbers(one.too_long))
            opened.append(Source(name, config, spec.row_kind, one.files, open_rows(one.files), digest, left_out))
        return cls(opened)

    @cached_property
    def _place_by_id(self) -> dict[str, tuple[int, int] | int]:
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
        place = self._place_by_id[row_id]
        at, number = (0, place) if isinstance(place, int) else place
        row = self.sources[at].read(number, row_id)
        assert row is not None, row_id  # lines that are no rows have no names
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(self._place_by_id)

    def __len__(self) -> int:
        return len(self._place_by_id)

    def __contains__(self, row_id: object) -> bool:
        return row_id in self._place_by_id


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
            self.problems.append(ConfigProblem(error.rule, error.hint))
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
                if error.rule not in known:  # of rows with the same mistake the first one is enough
                    self.problems.append(ConfigProblem(f"{source.rows.place(number)}: {error.rule}", error.hint))
                known.add(error.rule)
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
            raise ConfigError.of(error.rule, hint=error.hint) from error
        lines = fold_numbers(number + 1 for number in left_out)
        sources[one.name] = SourceSpec(files=one.files, num_rows=num_rows, too_long=lines, sha256=one.sha256)
    return DatasetSpec(config=config, row_kind=kind, sources=sources)
