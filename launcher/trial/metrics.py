"""The end of metrics.jsonl, where the master writes one line of numbers for each train step."""

import json
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from corral.experiments.trial.directory import read_tail

_TAIL_BYTES = 65536
_TAIL_LINES = 100


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines that hold a step."""
    try:
        return _parse(path.read_bytes())
    except FileNotFoundError:
        return []


def last_metrics(path: Path) -> dict[str, Any]:
    """The newest value of every number in the last lines; {} before the first step."""
    lines = _parse(b"\n".join(read_tail(path, _TAIL_BYTES).split(b"\n")[-_TAIL_LINES:]))
    newest: dict[str, Any] = {}
    for line in lines:  # evaluations come every few steps, and stay worth showing in between
        newest.update({name: value for name, value in line.items() if value is not None})
    return newest


def _parse(data: bytes) -> list[dict[str, Any]]:
    lines = []
    for text in data.split(b"\n"):
        try:
            line = _decode(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def _decode(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)  # slower, but it knows NaN, which a step that went wrong may have written


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a line's value has a point in a picture: NaN, which a step that was skipped may have, has none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


# The name that a quantity has depends on the algorithm; the first that was written is shown.
ACCURACY = ("eval/accuracy",)
REWARD = ("rewards/mean", "ppo/reward/mean")
LOSS = ("sft/loss", "ppo/loss", "loss")
STALENESS = ("staleness/mean", "staleness/max")
GAP = ("gap/max",)


def headline(metrics: dict[str, Any]) -> str:
    """The few numbers that say how training goes: `accuracy 0.93  reward 0.88`."""
    parts = []
    for label, names in (("accuracy", ACCURACY), ("reward", REWARD), ("loss", LOSS)):
        value = next((metrics[name] for name in names if isinstance(metrics.get(name), int | float)), None)
        if value is not None:
            parts.append(f"{label} {value:.3g}")
    return "  ".join(parts[:2])
