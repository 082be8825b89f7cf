"""Which of the answers that a trial has kept are wanted: by step, by what is so of them, in which order.

samples/*.parquet ──steps──► rows without their lists ──where──► ──sort──► the first n ──► with their lists
"""

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from corral.experiments.config.condition import Condition
from corral.experiments.errors import ConfigError
from corral.experiments.trial.samples import PART, files_by_step
from corral.launcher.terminal import printable
from corral.launcher.trial.view import chosen_steps

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, Any]
_LISTS = ("ids", "made", "logprobs", "trainer_logprobs", "advantages", "versions")


# Answers as people read them: a line each, or one whole with its tokens coloured.
#
# What a model or a data set wrote goes to a terminal: nothing of it that would move its cursor, or change its colours
# or its title, gets there.

Colour = Literal["logprob", "gap", "advantage"]
_LEGENDS: Mapping[Colour, str] = {
    "logprob": "the redder, the less likely the generator found the token",
    "gap": "the redder, the further generator and trainer are apart",
    "advantage": "green: made likelier; red: made less likely",
}
_TEXTS = ("ID", "ROW", "PROMPT")
_SHOWN_PROMPT = 32  # characters, so that answers have room on a terminal
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_SHADES = 5
_FULL_SCALE: Mapping[Colour, float] = {"logprob": 5.0, "gap": 0.5, "advantage": 2.0}  # nats, nats, deviations
_REDS = ("default", "color(223)", "color(216)", "color(209)", "color(203)", "bold color(196)")
_GREENS = ("default", "color(193)", "color(156)", "color(119)", "color(82)", "bold color(46)")


def as_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line each."""
    table = _empty_table(("STEP", "ID", "REWARD", "ADVANTAGE", "TOKENS", "AGE", "GAP", "PROMPT"), "ANSWER")
    for row in rows:
        table.add_row(
            str(row["step"]),
            Text(printable(name_of(row))),
            f"{row['reward']:.4g}",
            f"{row['advantage']:+.2f}",
            str(row["length"]) + ("…" if row["is_cut"] else ""),
            str(row["staleness"]),
            "-" if row["gap"] is None else f"{row['gap']:.2g}",
            Text(printable(_end_of(row["prompt"].replace("\n", "⏎")))),
            Text(printable(row["said"].replace("\n", "⏎"))),
        )
    return table


def _end_of(prompt: str) -> str:
    """What distinguishes a prompt from others, mostly: its end."""
    return prompt if len(prompt) <= _SHOWN_PROMPT else f"…{prompt[1 - _SHOWN_PROMPT :]}"


def prompts_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """A prompt of the data each."""
    table = _empty_table(("ROW", "ANSWERS", "REWARD", "BEST", "TOKENS", "LAST STEP"), "PROMPT")
    for line in lines:
        numbers = (line["reward"], line["best"], line["length"])
        row, prompt = (Text(printable(line[name].replace("\n", "⏎"))) for name in ("row", "prompt"))
        table.add_row(row, str(line["answers"]), *(f"{one:.4g}" for one in numbers), str(line["last_step"]), prompt)
    return table


def dropped_table(reason_by_uid: Mapping[str, str]) -> Table:
    """A prompt that was dropped each."""
    table = _empty_table(("PROMPT",), "WHY")
    for uid, reason in reason_by_uid.items():
        table.add_row(Text(printable(uid)), Text(printable(reason)))
    return table


def as_diff(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Answers to one prompt, each beside the one before it: its new words are green, those that have gone are red."""
    shown: list[RenderableType] = [Text(printable(rows[0]["prompt"]), "dim")] if rows else []
    before: list[str] = []
    for row in rows:
        words, text = _WORDS.findall(row["said"]), Text()
        for kind, a, b, c, d in SequenceMatcher(None, before, words, autojunk=False).get_opcodes():
            if kind != "equal" and before:
                text.append(_lines(before[a:b]), "red strike")
            text.append(_lines(words[c:d]), "default" if kind == "equal" or not before else "green")
        facts = f"step {row['step']}, {name_of(row)}, reward {row['reward']:.4g}"
        shown += [Text(printable(facts), "bold"), text]
        before = words
    return Group(*shown)


def _lines(words: Sequence[str]) -> str:
    return "\n".join(map(printable, "".join(words).split("\n")))


def _empty_table(names: Sequence[str], last: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name in _TEXTS else "right", no_wrap=True)
    table.add_column(last, no_wrap=True, overflow="ellipsis", ratio=1)
    return table


def as_whole(row: Mapping[str, Any], tokenizer: Any, colour: Colour) -> RenderableType:
    """Prompt and answer token by token, what was given is dim; of several turns, where each begins. Above it what was
    said of it."""
    facts = (
        f"{name_of(row)}   step {row['step']}, reward {row['reward']:.4g}, advantage {row['advantage']:+.3f}, "
        f"{row['length']} tokens made{', cut off' if row['is_cut'] else ''}, age {row['staleness']}"
    )
    parts = [
        f"{name.removeprefix(PART)} {row[name]:.4g}" for name in row if name.startswith(PART) and row[name] is not None
    ]
    if parts:
        facts += f"\nreward of {', '.join(parts)}"
    text, values = Text(), _values(row, colour)
    turns = [(is_made, list(places)) for is_made, places in groupby(range(len(values)), key=row["made"].__getitem__)]
    for number, (is_made, places) in enumerate(turns):
        if len(turns) > 2:  # more than a prompt and its answer
            start = "" if number == 0 else "\n"
            text.append(f"{start}── {len(places)} tokens {'made' if is_made else 'given'} ──\n", "bold cyan")
        for at in places:
            said = _lines([tokenizer.decode([row["ids"][at]], skip_special_tokens=False)])
            text.append(said, _style(values[at], colour) if is_made else "dim")
    remarks = [Text(_lines([row["remarks"]]), "italic")] if row.get("remarks") else []  # older trials have none
    return Group(Text(_lines([facts]), "bold"), *remarks, Text(f"{_LEGENDS[colour]}; dim: given", "dim"), text)


def _values(row: Mapping[str, Any], colour: Colour) -> Sequence[float]:
    if colour == "advantage":
        return list(row["advantages"])
    gaps = gaps_of(row) if colour == "gap" else None
    return list(row["logprobs"]) if gaps is None else gaps


def _style(value: float, colour: Colour) -> str:
    shade = min(_SHADES, round(abs(value) / _FULL_SCALE[colour] * _SHADES))
    return (_GREENS if colour == "advantage" and value > 0 else _REDS)[shade]


class KeptAnswers:
    """Those of one trial."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ConfigError: if it has none.
        """
        self._files = files_by_step(folder)
        if not self._files:
            hint = "samples_per_step says how many are kept; the first are there after the first train step"
            raise ConfigError.of("this trial has kept no answers", hint=hint)
        newest = self._files[max(self._files)][0]
        self.fields = ("row", *_scalars_in(newest))
        """What conditions may ask; `row` is the prompt's name in the data set."""

    def steps(self, wanted: str) -> list[int]:
        """Those that are meant; see `chosen_steps`."""
        return chosen_steps(wanted, self._files, option="--step", limit="the space for answers, 512 MB")

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
