"""metrics.jsonl -> what the page draws: each number over train steps, and what a step is in time and in tokens.

Of a long trial a curve keeps the lowest and the highest point of each stretch of steps, so that no peak is lost.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.launcher.trial.metrics import ACCURACY, GAP, LOSS, REWARD, STALENESS

_NO_CURVES = ("step", "time", "trainer_epoch")
_SHOWN = (ACCURACY, REWARD, LOSS, ("response_length/mean",), STALENESS, GAP)
"""What is drawn before anybody chooses: of each, the first name that the trial has written."""

Points = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Steps, and values at them."""


def curves_of(lines: Sequence[Mapping[str, Any]], *, most: int) -> dict[str, Any]:
    """Curves by name, with at most so many points each: `{"axes", "curves", "shown"}`.

    Args:
        lines: of every step once, in order.
        most: points of a curve.
    """
    numbers = _columns(lines)
    times, tokens = (numbers.get(name, _NO_POINTS) for name in ("time", "train/tokens"))
    curves = {}
    for name in sorted(numbers.keys() - set(_NO_CURVES)):
        steps, values = numbers[name]
        kept = thinned(values, most=most)
        curves[name] = {"steps": steps[kept].tolist(), "values": [float(f"{value:.6g}") for value in values[kept]]}
    shown = (next((name for name in candidates if name in curves), None) for candidates in _SHOWN)
    axes = _axes(times, tokens, most=most)
    return {"axes": axes, "curves": curves, "shown": [name for name in shown if name]}


def thinned(values: npt.NDArray[np.float64], *, most: int) -> npt.NDArray[np.int64]:
    """Which values stay, in order: all of few; of many, the lowest and the highest of each of `most / 2` stretches."""
    if len(values) <= most:
        return np.arange(len(values))
    size = math.ceil(len(values) / (most // 2))
    filled = np.pad(values, (0, -len(values) % size), mode="edge").reshape(-1, size)
    first = np.arange(len(filled)) * size
    kept = np.concatenate([first + filled.argmin(axis=1), first + filled.argmax(axis=1)])
    return np.unique(np.minimum(kept, len(values) - 1))


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for line in lines:
        step = line["step"]
        for name, value in line.items():
            # A bool, which is an int, has no point, nor has what is not finite.
            if (type(value) is float or type(value) is int) and math.isfinite(value):
                steps, values = columns.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    return {name: (np.array(steps), np.array(values, np.float64)) for name, (steps, values) in columns.items()}


def _axes(times: Points, tokens: Points, *, most: int) -> dict[str, list[float]]:
    """What the time and the tokens of a step are: between two of these both grow evenly."""
    steps, moments = times
    at = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), most)).astype(int))
    trained = np.concatenate([[0.0], np.cumsum(tokens[1])])[np.searchsorted(tokens[0], steps[at], side="right")]
    return {"step": steps[at].tolist(), "time": moments[at].tolist(), "tokens": trained.tolist()}


_NO_POINTS: Points = (np.array([], np.int64), np.array([], np.float64))
