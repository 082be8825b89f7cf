"""metrics.jsonl -> what the page draws: each number over train steps, and what a step is in time and in tokens.

Of a long trial a curve keeps the lowest and the highest point of each stretch of steps, so that no peak is lost.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from corral.launcher.trial.metrics import ACCURACY, GAP, LOSS, REWARD, STALENESS, is_number

_NO_CURVES = ("step", "time", "trainer_epoch")
_SHOWN = (ACCURACY, REWARD, LOSS, ("response_length/mean",), STALENESS, GAP)
"""What is drawn before anybody chooses: of each, the first name that the trial has written."""

Points = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Steps, and values at them."""


# Where the time of train steps goes, by call: metrics.jsonl -> bars of the page.
#
#     time/ref_inf_s           seconds that it ran             ┐
#     time/ref_inf/inputs_s    waited for its input keys       ├ one call of one step: ░░inputs░░▒▒ranks▒▒████ran████
#     time/ref_inf/ranks_s     waited for its ranks            ┘
#
# A bar per step: the wait for its batch, what ran, call on call, and the commit, beside the time that all of it took:
# where the bar is higher, calls ran at the same time. And a mean step from its start to its end, a row per call.

_MOST_BARS = 60  # more would be too thin to point at; then a bar is the mean of several steps


class CallSeconds(NamedTuple):
    """Of one call in one step, or in the mean of several."""

    inputs_s: float
    ranks_s: float
    run_s: float

    @property
    def end_s(self) -> float:
        """When it had taken the whole batch, counted from the start of the step."""
        return self.inputs_s + self.ranks_s + self.run_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Of one train step, or of the mean of several."""

    step: float
    calls: Mapping[str, CallSeconds]
    """By call, in the order in which they ended."""
    wait_s: float
    """Before it, for a batch."""
    run_s: float
    """All calls, from the first to the last, with the publishing of what they trained."""
    commit_s: float
    """Of the step before, which this one had to wait for."""


def step_times_of(lines: Sequence[dict[str, Any]], *, calls: Iterable[str]) -> list[StepTimes]:
    """The steps whose times were written."""
    names = tuple(calls)
    steps = []
    for line in lines:
        found = {name: seconds for name in names if (seconds := _call_seconds(line, name)) is not None}
        if found:
            times = StepTimes(
                step=line["step"],
                calls=_ordered(found),
                wait_s=line["time/wait_s"] if is_number(line.get("time/wait_s")) else 0.0,
                run_s=max(call.end_s for call in found.values()),
                commit_s=line["time/commit_s"] if is_number(line.get("time/commit_s")) else 0.0,
            )
            steps.append(times)
    return steps


def mean_of(steps: Sequence[StepTimes]) -> StepTimes:
    """The mean step; a call that some steps lack counts where it is."""
    names = dict.fromkeys(name for step in steps for name in step.calls)
    of_calls = {name: [step.calls[name] for step in steps if name in step.calls] for name in names}
    return StepTimes(
        step=fmean(step.step for step in steps),
        calls=_ordered({name: CallSeconds(*map(fmean, zip(*calls, strict=True))) for name, calls in of_calls.items()}),
        wait_s=fmean(step.wait_s for step in steps),
        run_s=fmean(step.run_s for step in steps),
        commit_s=fmean(step.commit_s for step in steps),
    )


def bars_of(steps: Sequence[StepTimes]) -> list[StepTimes]:
    """The steps, or means of as many as there is room for bars."""
    size = -(-len(steps) // _MOST_BARS)
    return [mean_of(steps[first : first + size]) for first in range(0, len(steps), size or 1)]


def _call_seconds(line: Mapping[str, Any], name: str) -> CallSeconds | None:
    seconds: list[Any] = [line.get(f"time/{name}{part}_s") for part in ("/inputs", "/ranks", "")]
    return CallSeconds(*map(float, seconds)) if all(map(is_number, seconds)) else None


def _ordered(calls: Mapping[str, CallSeconds]) -> dict[str, CallSeconds]:
    return dict(sorted(calls.items(), key=lambda item: (item[1].end_s, item[0])))


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
