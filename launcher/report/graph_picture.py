"""Draws the dataflow graph of a trial's train step: plan.json -> report/dataflow.svg and report/dataflow.png."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from corral.launcher.report.graph_shapes import (
    KEY_POINTS,
    NAME_POINTS,
    TEXT_POINTS,
    Box,
    Label,
    Line,
    Picture,
    Point,
    shapes_of,
    text_width,
)
from corral.launcher.report.style import FAINT, INK, role_colours, save
from corral.scheduling.step_plan import StepPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path as Outline

_MARGIN = 0.25
_TITLE = 0.35
_LINE_SPACING = 1.25
_ARROW = 0.085
_CORNER = 0.1


def draw_graph(step: StepPlan, *, title: str, samples: str, published_to: str, path: Path) -> list[Path]:
    """Writes the picture as SVG and as PNG; returns both paths.

    Args:
        samples: what samples come from.
        published_to: who takes the weights of a new policy version.
        path: without an ending that counts.
    """
    picture = shapes_of(step, samples=samples, published_to=published_to)
    colours: dict[str | None, str] = {None: FAINT}
    colours.update(role_colours(call.role for call in step.graph.calls))
    left, right, bottom, top = _extent(picture)
    # Not at the top: only this process draws, and it needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(right - left, top - bottom), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(left, right), ylim=(bottom, top))
    axes.axis("off")
    for line in picture.lines:
        _draw_line(axes, line, colours[line.role])
    for box in picture.boxes:
        _draw_box(axes, box, colours[box.role])
    for label in picture.labels:
        _draw_label(axes, label, colours[label.role])
    axes.text(left + _MARGIN, top - _MARGIN, title, fontsize=12, color=INK, va="top")
    return save(figure, path, formats=("svg", "png"))


def _extent(picture: Picture) -> tuple[float, float, float, float]:
    """Left, right, bottom and top of everything, with a margin and room for the title."""
    x = [value for box in picture.boxes for value in (box.left, box.left + box.width)]
    y = [value for box in picture.boxes for value in (box.middle - box.height / 2, box.middle + box.height / 2)]
    points = [point for line in picture.lines for point in line.points]
    for label in picture.labels:
        x.append(label.left + text_width(max(map(len, label.lines)), KEY_POINTS))
        y.append(label.bottom + len(label.lines) * KEY_POINTS * _LINE_SPACING / 72)
    x, y = [*x, *(px for px, _ in points)], [*y, *(py for _, py in points)]
    return min(x) - _MARGIN, max(x) + _MARGIN, min(y) - _MARGIN, max(y) + _MARGIN + _TITLE


def _draw_box(axes: "Axes", box: Box, colour: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = (box.left, box.middle - box.height / 2)
    style = "round,pad=0,rounding_size=0.06"
    for face, alpha, edge in (("white", 1.0, "none"), (colour, 0.1, "none"), ("none", 1.0, colour)):
        axes.add_patch(
            FancyBboxPatch(
                corner,
                box.width,
                box.height,
                boxstyle=style,
                facecolor=face,
                edgecolor=edge,
                alpha=alpha,
                linewidth=1.3,
            )
        )
    lines = 1 + len(box.lines)
    step = TEXT_POINTS * 1.4 / 72
    y = box.middle + step * (lines - 1) / 2
    for number, text in enumerate((box.name, *box.lines)):
        axes.text(
            box.left + box.width / 2,
            y - number * step + (0.015 if number == 0 else 0.0),
            text,
            fontsize=TEXT_POINTS if number else NAME_POINTS,
            fontweight="normal" if number else "bold",
            family="monospace",
            color=INK,
            ha="center",
            va="center",
        )


def _draw_line(axes: "Axes", line: Line, colour: str) -> None:
    from matplotlib.patches import PathPatch, Polygon

    x, y = line.points[-1]
    is_upwards = line.shape == "corners"
    if line.has_arrow:
        half = _ARROW * 0.45
        base = [(x - half, y - _ARROW), (x + half, y - _ARROW)]
        if not is_upwards:
            base = [(x - _ARROW, y - half), (x - _ARROW, y + half)]
        axes.add_patch(Polygon([(x, y), *base], closed=True, facecolor=colour, edgecolor="none"))
        # The line ends where the arrow is wider than it is.
        x, y = (x, y - _ARROW / 2) if is_upwards else (x - _ARROW / 2, y)
    points = (*line.points[:-1], (x, y))
    axes.add_patch(
        PathPatch(
            _corners(points) if is_upwards else _curve(points),
            facecolor="none",
            edgecolor=colour,
            linewidth=1.2,
            linestyle=(0, (4, 2.5)) if line.is_dashed else "solid",
            capstyle="butt",
        )
    )


def _curve(points: Sequence[Point]) -> "Outline":
    """Straight to the point before the last one, and from there level at both ends."""
    from matplotlib.path import Path as Outline

    *straight, (x0, y0), (x1, y1) = points
    middle = (x0 + x1) / 2
    vertices = [*straight, (x0, y0), (middle, y0), (middle, y1), (x1, y1)]
    codes = [Outline.MOVETO, *[Outline.LINETO] * len(straight), *[Outline.CURVE4] * 3]
    return Outline(vertices, codes)


def _corners(points: Sequence[Point]) -> "Outline":
    """Straight from point to point, with round corners."""
    from matplotlib.path import Path as Outline

    vertices, codes = [points[0]], [Outline.MOVETO]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        vertices += [_towards(corner, before), corner, _towards(corner, after)]
        codes += [Outline.LINETO, Outline.CURVE3, Outline.CURVE3]
    return Outline([*vertices, points[-1]], [*codes, Outline.LINETO])


def _towards(corner: Point, other: Point) -> Point:
    """Where the corner begins to be round."""
    length = abs(other[0] - corner[0]) + abs(other[1] - corner[1])  # one of them is 0
    share = min(0.5, _CORNER / length) if length else 0.0
    return corner[0] + share * (other[0] - corner[0]), corner[1] + share * (other[1] - corner[1])


def _draw_label(axes: "Axes", label: Label, colour: str) -> None:
    axes.text(
        label.left,
        label.bottom,
        "\n".join(label.lines),
        fontsize=KEY_POINTS,
        family="monospace",
        color=INK if colour == FAINT else colour,
        va="bottom",
        linespacing=_LINE_SPACING,
    )
