"""Where the time of train steps goes, by call: metrics.jsonl -> report/step_times.png.

    time/ref_inf_s           seconds that it ran             ┐
    time/ref_inf/inputs_s    waited for its input keys       ├ one call of one step: ░░inputs░░▒▒ranks▒▒████ran████
    time/ref_inf/ranks_s     waited for its ranks            ┘

Above, a bar per step: the wait for its batch, what ran, call on call, and the commit, beside the time that all of it
took: where the bar is higher, calls ran at the same time. Below, a mean step from its start to its end, a row per call.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from corral.launcher.report.style import FAINT, GRID, INK, plain, save
from corral.launcher.trial.metrics import is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_BARS = 60  # more would be thinner than a pixel of a printed page; then a bar is the mean of several steps


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


def draw_step_times(
    lines: Sequence[dict[str, Any]], *, title: str, colours: Mapping[str, str], path: Path
) -> list[Path]:
    """Writes the picture; returns its path, or nothing where no step has times by call.

    Args:
        colours: by call, in the order in which bars are stacked.
    """
    steps = step_times_of(lines, calls=colours)
    if not steps:
        return []
    from matplotlib.figure import Figure

    typical = mean_of(steps[1:] or steps)  # the first one loads and compiles
    colours = {name: colour for name, colour in colours.items() if name in typical.calls}
    rows = len(typical.calls)
    figure = Figure(figsize=(8.4, 3.6 + 0.8 + 0.34 * rows), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3.2, 0.8 + 0.34 * rows))
    _draw_bars(above, steps, colours)
    _draw_rows(below, typical, colours)
    figure.suptitle(title, color=INK, fontsize=12, x=0.01, ha="left")
    return save(figure, path)


def _draw_bars(axes: "Axes", steps: Sequence[StepTimes], colours: Mapping[str, str]) -> None:
    from matplotlib.ticker import MaxNLocator

    size = -(-len(steps) // _MOST_BARS)
    bars = [mean_of(steps[first : first + size]) for first in range(0, len(steps), size)]
    x, base = [bar.step for bar in bars], [0.0] * len(bars)
    width = 0.8 * min((after - before for before, after in zip(x, x[1:], strict=False)), default=1.0)
    parts = [(name, colour, [_run_s(bar, name) for bar in bars]) for name, colour in colours.items()]
    parts.append(("commit", FAINT, [bar.commit_s for bar in bars]))
    parts.append(("wait for a batch", GRID, [bar.wait_s for bar in bars]))
    for name, colour, heights in parts:
        axes.bar(x, heights, width, bottom=base, color=colour, label=name)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    wall = [bar.wait_s + bar.run_s + bar.commit_s for bar in bars]
    axes.hlines(wall, [at - width / 2 for at in x], [at + width / 2 for at in x], color=INK, label="whole step")
    axes.set_title("seconds of each step" if size == 1 else f"seconds, means of {size} steps", loc="left", fontsize=10)
    axes.set_xlabel("train step", fontsize=8, color=INK)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    plain(axes, grid="y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _run_s(step: StepTimes, name: str) -> float:
    return step.calls[name].run_s if name in step.calls else 0.0


def _draw_rows(axes: "Axes", step: StepTimes, colours: Mapping[str, str]) -> None:
    for row, (name, call) in enumerate(step.calls.items()):
        axes.barh(row, call.inputs_s, 0.62, color=GRID)
        axes.barh(row, call.ranks_s, 0.62, left=call.inputs_s, color=GRID, hatch="////", edgecolor=FAINT, linewidth=0)
        axes.barh(row, call.run_s, 0.62, left=call.inputs_s + call.ranks_s, color=colours[name])
        axes.text(call.end_s, row, f"  {call.run_s:.3g} s", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(step.calls)), list(step.calls), family="monospace")
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_title("a mean step: waits for inputs (grey), for its workers (hatched), runs", loc="left", fontsize=10)
    axes.set_xlabel("seconds from the start of the step", fontsize=8, color=INK)
    plain(axes, grid="x")


def _call_seconds(line: Mapping[str, Any], name: str) -> CallSeconds | None:
    seconds: list[Any] = [line.get(f"time/{name}{part}_s") for part in ("/inputs", "/ranks", "")]
    return CallSeconds(*map(float, seconds)) if all(map(is_number, seconds)) else None


def _ordered(calls: Mapping[str, CallSeconds]) -> dict[str, CallSeconds]:
    return dict(sorted(calls.items(), key=lambda item: (item[1].end_s, item[0])))
