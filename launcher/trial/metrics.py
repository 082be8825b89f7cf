"""The end of metrics.jsonl, where the master writes one line of numbers for each train step, and for each evaluation,
which may come after the lines of later steps.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeGuard

import msgspec

from corral.experiments.trial.directory import read_tail

_TAIL_BYTES = 1 << 18
_TAIL_LINES = 100
_PACE_STEPS = 20  # long enough to even out evaluations and commits, short enough to show a change


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """What whole lines hold of each step, in order; of one that was trained twice, after a failure, the last values."""
    by_step: dict[int, dict[str, Any]] = {}
    lines = _parse(path.read_bytes()) if path.exists() else []
    for line in sorted(lines, key=lambda line: "train/tokens" in line):  # so that `time` is that of the train step
        known = by_step.setdefault(line["step"], {})
        known.update({name: value for name, value in line.items() if value is not None})
    return [by_step[step] for step in sorted(by_step)]


def last_lines(path: Path) -> list[dict[str, Any]]:
    """The last lines that hold a step, oldest first; at most 256 KiB of them."""
    return _parse(b"\n".join(read_tail(path, _TAIL_BYTES).split(b"\n")[-_TAIL_LINES:]))


def newest_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The value of every number in the line of the latest step that has it; {} before the first step."""
    newest: dict[str, Any] = {}
    # Evaluations come every few steps, and stay worth showing in between.
    for line in sorted(lines, key=lambda line: int(line.get("step", -1))):
        newest.update({name: value for name, value in line.items() if value is not None})
    return newest


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast training goes."""

    step_s: float
    """Seconds from the end of a train step to that of the next; the median, so that one restart does not count."""
    tokens_per_s: float
    """Tokens that are trained on; 0 if no line says how many."""


def pace_of(lines: Sequence[Mapping[str, Any]]) -> Pace | None:
    """From the last train steps; None before two of them have followed each other."""
    steps = [line for line in lines if is_number(line.get("train/tokens")) and is_number(line.get("time"))]
    steps = steps[-_PACE_STEPS - 1 :]
    times = [new["time"] - old["time"] for old, new in pairwise(steps) if new["step"] == old["step"] + 1]
    if not times or (step_s := median(times)) <= 0:
        return None
    return Pace(step_s, fmean(line["train/tokens"] for line in steps[1:]) / step_s)


def _parse(data: bytes) -> list[dict[str, Any]]:
    lines = (_decoded(text) for text in data.split(b"\n") if text)
    return [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int)]


def _decoded(text: bytes) -> Any:
    # The first is ten times as fast; the second knows NaN, which a step that went wrong may have written.
    for decode in (msgspec.json.decode, json.loads):
        with suppress(ValueError):
            return decode(text)
    return None


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a line's value has a point in a picture: NaN, which a step that was skipped may have, has none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


# The name that a quantity has depends on the algorithm; the first that was written is shown.
ACCURACY = ("eval/accuracy",)
REWARD = ("rewards/mean", "ppo/reward/mean")
LOSS = ("sft/loss", "ppo/loss", "loss")
STALENESS = ("staleness/mean", "staleness/max")
GAP = ("gap/of_allowed",)


NONE_IS_CORRECT = "no answer reaches evaluation.correct"
"""Said of an accuracy of 0 where answers have rewards: right answers may have lower ones, as with a cost for length."""


def headline(metrics: dict[str, Any]) -> str:
    """The few numbers that say how training goes: `accuracy 0.93  reward 0.88`."""
    parts = []
    for label, names in (("accuracy", ACCURACY), ("reward", REWARD), ("loss", LOSS)):
        value = next((metrics[name] for name in names if isinstance(metrics.get(name), int | float)), None)
        if value is not None:
            is_doubtful = label == "accuracy" and value == 0 and metrics.get("eval/reward/mean", 0.0) > 0.0
            parts.append(f"{label} {value:.3g}" + (f" ({NONE_IS_CORRECT})" if is_doubtful else ""))
    return "  ".join(parts[:2])
