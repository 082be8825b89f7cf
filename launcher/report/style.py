"""What the pictures of a trial have in common: colours, and how they are written."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from corral.scheduling.model_function_call import ModelFunctionCall

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#24292f"
FAINT = "#8c959f"
GRID = "#e6e8eb"
GREEN, BLUE, ORANGE, PURPLE, RED, TEAL = "#1a7f37", "#0969da", "#bc4c00", "#8250df", "#cf222e", "#1b7c83"
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL)
_COLOUR_BY_ROLE = {"actor": BLUE, "critic": ORANGE, "ref": GREEN, "reward": PURPLE}
_TINTS = (1.0, 0.55, 0.75, 0.4)  # of a role's calls, the last one first: it is the one that trains, if any does


def role_colours(roles: Iterable[str]) -> dict[str, str]:
    """A colour for each role: the usual roles have theirs in every trial, others get what is left."""
    names = list(dict.fromkeys(roles))
    colours = {role: _COLOUR_BY_ROLE[role] for role in names if role in _COLOUR_BY_ROLE}
    left = [colour for colour in _COLOURS if colour not in colours.values()] or list(_COLOURS)
    others = [role for role in names if role not in colours]
    return colours | {role: left[number % len(left)] for number, role in enumerate(others)}


def call_colours(calls: Iterable[ModelFunctionCall]) -> dict[str, str]:
    """A colour for each call: its role's, in a tint of its own."""
    calls_by_role: dict[str, list[str]] = {}
    for call in calls:
        calls_by_role.setdefault(call.role, []).append(call.name)
    colours = role_colours(calls_by_role)
    return {
        name: _tinted(colours[role], _TINTS[number % len(_TINTS)])
        for role, names in calls_by_role.items()
        for number, name in enumerate(reversed(names))
    }


def _tinted(colour: str, share: float) -> str:
    """A colour on white: 1 is the colour itself."""
    channels = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - share * (255 - channel)):02x}" for channel in channels)


def plain(axes: "Axes", *, grid: Literal["both", "x", "y"] = "both") -> None:
    """Axes with a faint grid and no frame."""
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)


def save(figure: "Figure", path: Path, *, formats: tuple[str, ...] = ("png",)) -> list[Path]:
    """Write a figure as `path` with each format's ending; text in an SVG stays text."""
    import matplotlib

    path.parent.mkdir(exist_ok=True)
    paths = [path.with_suffix(f".{name}") for name in formats]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        for target in paths:
            figure.savefig(target, dpi=130)
    return paths
