"""metrics.jsonl -> what the page draws: each number over train steps, and what a step is in time and in tokens.

Of a long trial a curve keeps the lowest and the highest point of each stretch of steps, so that no peak is lost.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

from corral.launcher.trial.metrics import ACCURACY, GAP, LOSS, REWARD, STALENESS, is_number

Point = tuple[int, float]
_NO_CURVES = ("step", "time", "trainer_epoch")
_SHOWN = (ACCURACY, REWARD, LOSS, ("response_length/mean",), STALENESS, GAP)
"""What is drawn before anybody chooses: of each, the first name that the trial has written."""


def curves_of(lines: Sequence[Mapping[str, Any]], *, most: int) -> dict[str, Any]:
    """Curves by name, with at most so many points each: `{"axes", "curves", "shown"}`.

    Args:
        lines: of every step once, in order.
        most: points of a curve.
    """
    names = sorted({name for line in lines for name in line} - set(_NO_CURVES))
    curves = {}
    for name in names:
        points = [(line["step"], line[name]) for line in lines if _has_point(line.get(name))]
        if points:
            steps, values = zip(*thinned(points, most=most), strict=True)
            curves[name] = {"steps": steps, "values": [float(f"{value:.6g}") for value in values]}
    shown = (next((name for name in candidates if name in curves), None) for candidates in _SHOWN)
    return {"axes": _axes(lines, most=most), "curves": curves, "shown": [name for name in shown if name]}


def thinned(points: Sequence[Point], *, most: int) -> list[Point]:
    """All of few points; of many, the lowest and the highest of each of `most / 2` stretches of them, in order."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept = []
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        kept += sorted({min(stretch, key=itemgetter(1)), max(stretch, key=itemgetter(1))})
    return kept


def _axes(lines: Sequence[Mapping[str, Any]], *, most: int) -> dict[str, list[float]]:
    """What the time and the tokens of a step are: between two of these both grow evenly."""
    timed = [line for line in lines if is_number(line.get("time"))]
    tokens = list(accumulate(line["train/tokens"] if is_number(line.get("train/tokens")) else 0 for line in timed))
    places = range(0, len(timed), math.ceil(2 * len(timed) / most) or 1)
    chosen = sorted({*places, len(timed) - 1} - {-1})
    return {
        "step": [timed[at]["step"] for at in chosen],
        "time": [timed[at]["time"] for at in chosen],
        "tokens": [tokens[at] for at in chosen],
    }


def _has_point(value: object) -> bool:
    return is_number(value) and math.isfinite(value)
