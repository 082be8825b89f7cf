"""Answers as people read them: a line each, or one whole with its tokens coloured.

What a model or a data set wrote goes to a terminal: nothing of it that would move its cursor, or change its colours or
its title, gets there.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from corral.experiments.trial.samples import PART
from corral.launcher.samples.find import gaps_of, name_of
from corral.launcher.terminal import printable

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
    table = _table(("STEP", "ID", "REWARD", "ADVANTAGE", "TOKENS", "AGE", "GAP", "PROMPT"), "ANSWER")
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
    table = _table(("ROW", "ANSWERS", "REWARD", "BEST", "TOKENS", "LAST STEP"), "PROMPT")
    for line in lines:
        numbers = (line["reward"], line["best"], line["length"])
        row, prompt = (Text(printable(line[name].replace("\n", "⏎"))) for name in ("row", "prompt"))
        table.add_row(row, str(line["answers"]), *(f"{one:.4g}" for one in numbers), str(line["last_step"]), prompt)
    return table


def dropped_table(reason_by_uid: Mapping[str, str]) -> Table:
    """A prompt that was dropped each."""
    table = _table(("PROMPT",), "WHY")
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


def _table(names: Sequence[str], last: str) -> Table:
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
