"""Draws how a trial went: metrics.jsonl -> report/curves.png, a panel per curve over train steps, time on top."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from corral.launcher.report.style import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, RED, plain, save
from corral.launcher.terminal import format_duration
from corral.launcher.trial.metrics import ACCURACY, GAP, LOSS, REWARD, STALENESS, is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMOOTH_FROM_POINTS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One curve: the first of the names that the trial has written."""

    title: str
    names: tuple[str, ...]
    colour: str
    floor_at_zero: bool = False
    finest: float | None = None
    """Where the values span powers of ten: below this the axis is linear, so that 0 has a place. None: all of it is."""
    limits: tuple[float, ...] = ()
    """Drawn as lines: above them something is wrong."""


PANELS = (
    Panel(title="accuracy on held-out problems", names=ACCURACY, colour=GREEN, floor_at_zero=True),
    Panel(title="reward", names=REWARD, colour=BLUE),
    Panel(title="loss", names=LOSS, colour=ORANGE),
    Panel(title="staleness (versions)", names=STALENESS, colour=PURPLE, floor_at_zero=True),
    Panel(
        title="generator and trainer: difference, of what it may be",
        names=GAP,
        colour=INK,
        floor_at_zero=True,
        finest=1e-5,  # of 0.001 nats: the last bit of a log-probability near 0.1, the least that float32 shows
        limits=(1.0,),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The points of one panel."""

    panel: Panel
    steps: tuple[int, ...]
    values: tuple[float, ...]


def curves_of(lines: Sequence[dict[str, Any]]) -> list[Curve]:
    """The curves that there are data for."""
    curves = []
    for panel in PANELS:
        of_names = ([(line["step"], line[name]) for line in lines if is_number(line.get(name))] for name in panel.names)
        if points := next(filter(None, of_names), None):
            steps, values = zip(*points, strict=True)
            curves.append(Curve(panel=panel, steps=steps, values=values))
    return curves


def span_of(curves: Sequence[Curve]) -> tuple[float, float]:
    """The steps that all panels show, with some room beside: what stands above each other is of the same time."""
    first, last = min(curve.steps[0] for curve in curves), max(curve.steps[-1] for curve in curves)
    room = 0.04 * (last - first) or 1.0
    return first - room, last + room


def smooth(values: Sequence[float], *, window: int) -> list[float]:
    """Centred moving average; shorter at the ends, so that no value is invented."""
    half = window // 2
    return [fmean(values[max(0, index - half) : index + half + 1]) for index in range(len(values))]


def draw_curves(lines: Sequence[dict[str, Any]], *, title: str, path: Path) -> list[Path]:
    """Writes the picture; returns its path, or nothing if there is nothing to draw."""
    curves = curves_of(lines)
    if not curves:
        return []
    # Not at the top: only who draws needs it, and it needs no display.
    from matplotlib.figure import Figure

    columns = min(2, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(5.6 * columns, 3.3 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, curve in zip(grid.flat, curves, strict=False):
        _draw_curve(axes, curve)
        axes.set_xlim(span_of(curves))
        _add_time_axis(axes, lines)
    for axes in list(grid.flat)[len(curves) :]:
        axes.set_visible(False)
    figure.suptitle(title, color=INK, fontsize=12, x=0.01, ha="left")
    return save(figure, path)


def _draw_curve(axes: "Axes", curve: Curve) -> None:
    colour, finest = curve.panel.colour, curve.panel.finest
    # A mean over powers of ten is its largest value, at steps that never had it.
    is_short = len(curve.steps) <= _SMOOTH_FROM_POINTS
    if is_short or finest is not None:
        axes.plot(
            curve.steps, curve.values, color=colour, linewidth=1.8, marker="o" if is_short else "", markersize=3.5
        )
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
    axes.set_title(curve.panel.title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel("train step", fontsize=8, color=INK)
    if finest is not None:
        axes.set_yscale("symlog", linthresh=finest)
    for limit in curve.panel.limits:
        axes.axhline(limit, color=RED, linewidth=1.0, linestyle="--")
    if curve.panel.floor_at_zero:
        axes.set_ylim(bottom=0.0, top=max(1e-6, *curve.panel.limits, *curve.values) * (1.08 if finest is None else 3.0))
    plain(axes)


def _add_time_axis(axes: "Axes", lines: Sequence[dict[str, Any]]) -> None:
    """Time since the first step, at the steps that the bottom axis names."""
    time_by_step = {line["step"]: float(line["time"]) for line in lines if is_number(line.get("time"))}
    if len(time_by_step) < 2:
        return
    low, high = axes.get_xlim()
    begin = min(time_by_step.values())
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high and round(tick) in time_by_step]
    top = axes.secondary_xaxis("top")
    top.set_xticks(ticks, [format_duration(time_by_step[round(tick)] - begin) for tick in ticks])
    top.tick_params(labelsize=7, colors=FAINT, length=0, pad=1)
    top.spines["top"].set_visible(False)
