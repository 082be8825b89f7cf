"""Which of the answers that a trial has kept are wanted: by step, by what is so of them, in which order.

samples/*.parquet ──steps──► rows without their lists ──where──► ──sort──► the first n ──► with their lists
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from corral.experiments.config.condition import Condition
from corral.experiments.errors import ConfigError
from corral.experiments.trial.samples import files_by_step
from corral.launcher.trial.steps import chosen_steps

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, Any]
_LISTS = ("ids", "made", "logprobs", "trainer_logprobs", "advantages", "versions")


class KeptAnswers:
    """Those of one trial."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ConfigError: if it has none.
        """
        self._files = files_by_step(folder)
        if not self._files:
            hint = "samples.prompts_per_step says how many are kept; the first are there after the first train step"
            raise ConfigError.of("this trial has kept no answers", hint=hint)
        newest = self._files[max(self._files)][0]
        self.fields = ("row", *_scalars_in(newest))
        """What conditions may ask; `row` is the prompt's name in the data set."""

    def steps(self, wanted: str) -> list[int]:
        """Those that are meant; see `chosen_steps`."""
        return chosen_steps(wanted, self._files, option="--step", limit="samples.max_size")

    def read(
        self,
        steps: Sequence[int],
        *,
        where: str | None = None,
        sort: str = "",
        most: int | None = None,
        named: str | None = None,
        row: str | None = None,
        is_whole: bool = True,
    ) -> list[dict[str, Any]]:
        """The rows that are wanted.

        Args:
            named: only the sequence of this name, or all of the prompt with this uid.
            row: only those to this row of the data, the first of each step.
            is_whole: whether with their lists, which take most of the time.
            where: a condition on a row's numbers and texts, such as `reward < 1 and length > 20`.
            sort: a field to go by, from low to high, or with - before it from high to low; as they lie without one.
            most: so many at most.

        Raises:
            ConfigError: if the condition is none, or names a field that there is not.
        """
        holds = self._parsed(where)
        found = [(one, path, at) for step in steps for path in self._files[step] for at, one in _scalars(path)]
        found = [each for each in found if holds(each[0])]
        if sort:
            name, falls = sort.removeprefix("-"), sort.startswith("-")
            self._require_fields([name])
            known = [each for each in found if each[0].get(name) is not None]
            found = sorted(known, key=lambda each: each[0][name], reverse=falls)
        if named is not None:
            found = [each for each in found if named in (name_of(each[0]), each[0]["uid"])]
        if row is not None:
            found = list({each[0]["step"]: each for each in reversed(found) if each[0]["row"] == row}.values())[::-1]
        return [
            one | (_lists_of(path).slice(at, 1).to_pylist()[0] if is_whole else {}) for one, path, at in found[:most]
        ]

    def _parsed(self, where: str | None) -> Callable[[Row], bool]:
        if where is None:
            return lambda row: True
        try:
            condition = Condition.parse(where)
        except ValueError as error:
            raise ConfigError.of(f"--where: {error}") from error
        self._require_fields(condition.fields)

        def holds(row: Row) -> bool:
            values = [row.get(name) for name in condition.fields]
            return None not in values and bool(condition.holds(*values))

        return holds

    def _require_fields(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.fields:
                raise ConfigError.of(f"answers have no {name!r}", hint=f"there are {', '.join(self.fields)}")


def by_prompt(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line for each prompt of the data, the one with the lowest mean reward first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["row"], []).append(row)
    lines = [
        {
            "row": name,
            "answers": len(of_prompt),
            "reward": fmean(row["reward"] for row in of_prompt),
            "best": max(row["reward"] for row in of_prompt),
            "length": fmean(row["length"] for row in of_prompt),
            "last_step": max(row["step"] for row in of_prompt),
            "prompt": of_prompt[0]["prompt"],
        }
        for name, of_prompt in found.items()
    ]
    return sorted(lines, key=lambda line: (line["reward"], line["row"]))


def name_of(row: Row) -> str:
    """What one sequence is found by: the prompt's uid, and its number."""
    return f"{row['uid']}#{row['sequence']}"


def gaps_of(row: Row) -> list[float] | None:
    """By how much trainer and generator differ on each token, 0 where no policy made it; None without the trainer's."""
    trainer = row["trainer_logprobs"]
    if trainer is None:
        return None
    columns = trainer, row["logprobs"], row["versions"]
    return [a - b if version >= 0 else 0.0 for a, b, version in zip(*columns, strict=True)]


@lru_cache(maxsize=4)  # of sorted rows, neighbours are of several steps
def _scalars(path: Path) -> list[tuple[int, dict[str, Any]]]:
    rows = _table(path, _scalars_in(path)).to_pylist()
    return [(at, {"row": row["uid"].partition(":")[2], **row}) for at, row in enumerate(rows)]


@lru_cache(maxsize=4)
def _lists_of(path: Path) -> "pyarrow.Table":
    return _table(path, _LISTS)


def _scalars_in(path: Path) -> list[str]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        return [name for name in file.schema_arrow.names if name not in _LISTS]


def _table(path: Path, columns: Sequence[str]) -> "pyarrow.Table":
    import pyarrow.parquet

    # Not its read_table, which imports all of pandas where that is installed.
    with pyarrow.parquet.ParquetFile(path) as file:
        return file.read(columns=list(columns))
