"""Draws how a trial went: metrics.jsonl -> report/curves.png, a panel per curve over train steps, time on top.

The supervisor runs this as a process of its own at the end of a trial; a failure to draw is noted and harms nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.terminal import format_duration
from corral.launcher.trial.find import read_facts
from corral.launcher.trial.metrics import ACCURACY, LOSS, REWARD, STALENESS, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMOOTH_FROM_POINTS = 30
_INK = "#24292f"
_GRID = "#e6e8eb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One curve: the first of the names that the trial has written."""

    title: str
    names: tuple[str, ...]
    colour: str
    floor_at_zero: bool = False


PANELS = (
    Panel(title="accuracy on held-out problems", names=ACCURACY, colour="#1a7f37", floor_at_zero=True),
    Panel(title="reward", names=REWARD, colour="#0969da"),
    Panel(title="loss", names=LOSS, colour="#bc4c00"),
    Panel(
        title="staleness (versions)",
        names=STALENESS,
        colour="#8250df",
        floor_at_zero=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The points of one panel."""

    panel: Panel
    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


def curves_of(lines: Sequence[dict[str, Any]]) -> list[Curve]:
    """The curves that there are data for. Of a step that was trained twice, after a failure, the last time counts."""
    curves = []
    for panel in PANELS:
        name = next((name for name in panel.names if any(_is_number(line.get(name)) for line in lines)), None)
        if name is None:
            continue
        value_by_step = {line["step"]: float(line[name]) for line in lines if _is_number(line.get(name))}
        steps = tuple(sorted(value_by_step))
        curves.append(Curve(panel=panel, name=name, steps=steps, values=tuple(value_by_step[step] for step in steps)))
    return curves


def smooth(values: Sequence[float], *, window: int) -> list[float]:
    """Centred moving average; shorter at the ends, so that no value is invented."""
    half = window // 2
    averaged = []
    for index in range(len(values)):
        part = values[max(0, index - half) : index + half + 1]
        averaged.append(sum(part) / len(part))
    return averaged


def draw(lines: Sequence[dict[str, Any]], *, title: str, path: Path) -> bool:
    """Writes the picture; False if there is nothing to draw."""
    curves = curves_of(lines)
    if not curves:
        return False
    # Not at the top: only this process draws, and it needs no display.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(2, len(curves))
    rows = -(-len(curves) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(5.6 * columns, 3.3 * rows + 0.5), squeeze=False, layout="constrained"
    )
    for axes, curve in zip(grid.flat, curves, strict=False):
        _draw_curve(axes, curve)
        _add_time_axis(axes, lines)
    for axes in list(grid.flat)[len(curves) :]:
        axes.set_visible(False)
    figure.suptitle(title, color=_INK, fontsize=12, x=0.01, ha="left")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def _draw_curve(axes: "Axes", curve: Curve) -> None:
    colour, few = curve.panel.colour, len(curve.steps) <= _SMOOTH_FROM_POINTS
    if few:
        axes.plot(curve.steps, curve.values, color=colour, linewidth=1.8, marker="o", markersize=3.5)
        last = curve.values[-1]
    else:
        axes.plot(curve.steps, curve.values, color=colour, linewidth=0.8, alpha=0.3)
        window = max(5, len(curve.values) // 20)
        smoothed = smooth(curve.values, window=window)
        axes.plot(curve.steps, smoothed, color=colour, linewidth=2.0)
        last = smoothed[-1]
    axes.annotate(
        f"{last:.3g}",
        (curve.steps[-1], last),
        xytext=(5, 0),
        textcoords="offset points",
        color=colour,
        fontsize=9,
        va="center",
        annotation_clip=False,
    )
    axes.set_title(curve.panel.title, loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("train step", fontsize=8, color=_INK)
    if curve.panel.floor_at_zero:
        axes.set_ylim(bottom=0.0, top=max(1e-6, max(curve.values)) * 1.08)
    axes.margins(x=0.04)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GRID)


def _add_time_axis(axes: "Axes", lines: Sequence[dict[str, Any]]) -> None:
    """Time since the first step, at the steps that the bottom axis names."""
    time_by_step = {line["step"]: float(line["time"]) for line in lines if _is_number(line.get("time"))}
    if len(time_by_step) < 2:
        return
    low, high = axes.get_xlim()
    begin = min(time_by_step.values())
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high and round(tick) in time_by_step]
    top = axes.secondary_xaxis("top")
    top.set_xticks(ticks, [format_duration(time_by_step[round(tick)] - begin) for tick in ticks])
    top.tick_params(labelsize=7, colors="#8c959f", length=0, pad=1)
    top.spines["top"].set_visible(False)


def _is_number(value: object) -> bool:
    # NaN is not equal to itself; a step that was skipped for it has no point.
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def main(arguments: Sequence[str]) -> int:
    """`python -m corral.launcher.status.curves --trial DIR`"""
    parser = argparse.ArgumentParser(prog="corral.launcher.status.curves", description="Draw the curves of a trial.")
    parser.add_argument("--trial", type=Path, required=True, help="the trial directory")
    directory = TrialDirectory(parser.parse_args(arguments).trial.resolve())
    facts = read_facts(directory)
    title = facts.name if facts else directory.path.name
    path = directory.report_path / "curves.png"
    print(path if draw(read_metrics(directory.metrics_path), title=title, path=path) else "no metrics to draw")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
