"""Where the time of train steps goes, by call: metrics.jsonl -> bars of the page.

    time/ref_inf_s           seconds that it ran             ┐
    time/ref_inf/inputs_s    waited for its input keys       ├ one call of one step: ░░inputs░░▒▒ranks▒▒████ran████
    time/ref_inf/ranks_s     waited for its ranks            ┘

A bar per step: the wait for its batch, what ran, call on call, and the commit, beside the time that all of it took:
where the bar is higher, calls ran at the same time. And a mean step from its start to its end, a row per call.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from corral.launcher.trial.metrics import is_number

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
