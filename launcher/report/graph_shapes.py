"""StepPlan -> the shapes of its picture: boxes in columns by level, lines with keys on them, dashed lines of weights.

    ┌─────────┐ input_ids    ┌─────────┐                ┌─────────────┐ weights  ┌────────────┐
    │ samples ├────────────┬►│ ref_inf ├──────────────┬►│ actor_train ├┄┄┄┄┄┄┄┄┄►│ generation │
    └─────────┘            │ └────▲────┘ ref_logprobs │ └──────┬──────┘          └────────────┘
                           └──────┆───────────────────┘        ┆
                                  └┄┄┄┄┄ eta 0.1 ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┘

A line leaves its box once for all that read the same keys, with their names on it, and then spreads. Pure: all lengths
are in inches, counted from the left and from the middle upwards; what draws the shapes is graph_picture.py.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from corral.launcher.report.layered import Item, Layers
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName
from corral.scheduling.step_plan import StepPlan
from corral.scheduling.worker_numbers import fold_numbers

Point = tuple[float, float]

_MONO_WIDTH = 0.602  # of a character of DejaVu Sans Mono, as a share of its size
NAME_POINTS, TEXT_POINTS, KEY_POINTS = 9.5, 7.5, 7.5
_LINE = 0.145  # from one line of text to the next
_PAD = 0.1
_FAN = 0.5  # where lines spread between two columns
_GAP = 0.3
_BEND_HEIGHT = 0.16
_IN_PORTS = 0.13
_LABEL_CHARACTERS = 24
_LANE = 0.22  # between the lowest box and a line of weights beneath it, and between two of those


def text_width(characters: int, points: float) -> float:
    """Inches of that many characters."""
    return characters * _MONO_WIDTH * points / 72


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A call, or what samples come from, or where weights go."""

    name: str
    lines: tuple[str, ...]
    """Beneath the name."""
    role: str | None
    """None for what is not a call."""
    left: float
    middle: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through points; it bends between those that are not at the same height, and ends as it says."""

    points: tuple[Point, ...]
    shape: Literal["curve", "corners"]
    role: str | None
    """Whose colour it has: its producer's."""
    has_arrow: bool = False
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Text that stands on a line."""

    lines: tuple[str, ...]
    left: float
    bottom: float
    role: str | None


@dataclass(slots=True)
class Picture:
    """All of it."""

    boxes: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """What a box says, and the column that it stands in."""

    name: str
    lines: tuple[str, ...]
    role: str | None
    column: int
    stays_below: bool = False

    @property
    def width(self) -> float:
        lines = [text_width(len(line), TEXT_POINTS) for line in self.lines]
        return max(text_width(len(self.name), NAME_POINTS), *lines, 0.9) + 2 * _PAD


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trunk:
    """A line from a box to all that read the same keys, by way of a bend in each column that it passes."""

    start: str
    ends: tuple[str, ...]
    label: tuple[str, ...]
    role: str | None
    is_dashed: bool = False

    def bend(self, column: int) -> str:
        return f"{self.start} {' '.join(self.ends)} {column}"

    def wires(self, column_by_name: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """From column to column."""
        here, column = self.start, column_by_name[self.start] + 1
        last = max(column_by_name[end] for end in self.ends)
        while column <= last:
            yield from ((here, end) for end in self.ends if column_by_name[end] == column)
            if column < last:
                yield here, self.bend(column)
            here, column = self.bend(column), column + 1

    @property
    def port_height(self) -> float:
        return len(self.label) * _LINE + 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Return:
    """Weights that come back from a call to one that runs before it, in the next step."""

    start: str
    end: str
    label: str
    role: str


def shapes_of(step: StepPlan, *, samples: str, published_to: str) -> Picture:
    """Where everything of a step's picture stands.

    Args:
        samples: what samples come from: "rollout workers" or "dataset".
        published_to: who takes the weights of a new policy version.
    """
    nodes, trunks, returns = _parts(step, samples, published_to)
    return _Drawing(nodes, trunks).picture(returns)


def _parts(step: StepPlan, samples: str, published_to: str) -> tuple[list[_Node], list[_Trunk], list[_Return]]:
    column_by_call = {name: 1 + level for level, names in enumerate(step.graph.levels) for name in names}
    role_by_call = {call.name: call.role for call in step.graph.calls}
    trunks = [
        _Trunk(
            start=route.producer or samples,
            ends=route.consumers,
            label=tuple(textwrap.wrap(", ".join(route.keys), _LABEL_CHARACTERS)),
            role=role_by_call.get(route.producer or ""),
        )
        for route in step.routes
    ]
    generating = tuple(
        call.name for call in step.graph.calls if call.call_type is CallType.GENERATE and not call.input_keys
    )
    if generating:  # it reads prompts, which are no key of a sample
        trunks.append(_Trunk(start=samples, ends=generating, label=("prompts",), role=None))
    returns: list[_Return] = []
    outside: dict[str, _Node] = {}
    for route in step.weight_routes:
        start = _first_call(step, route.source) if route.is_before else route.call
        end = route.call if route.is_before else _first_call(step, route.target)
        label = "weights" if route.eta == 1.0 else f"{route.eta:g} of the weights"
        if end is None:
            name, line = (str(route.target), "held, not called") if route.target else (published_to, "new version")
            outside[name] = _Node(name=name, lines=(line,), role=None, column=column_by_call[route.call] + 1)
            trunks.append(
                _Trunk(start=route.call, ends=(name,), label=(label,), role=route.source.role, is_dashed=True)
            )
        elif start is not None:
            returns.append(_Return(start=start, end=end, label=label, role=route.source.role))
    below = {way.end for way in returns}
    calls = [
        _Node(
            name=call.name,
            lines=_described(step, call),
            role=call.role,
            # Nothing goes to a call that evaluates: it stands where it is in nobody's way.
            column=0 if call.call_type is CallType.EVALUATE else column_by_call[call.name],
            stays_below=call.name in below or call.call_type is CallType.EVALUATE,
        )
        for call in step.graph.calls
    ]
    line = "rows" if generating else f"to model_worker {fold_numbers(step.sample_ranks)}"
    return [_Node(name=samples, lines=(line,), role=None, column=0), *calls, *outside.values()], trunks, returns


def _described(step: StepPlan, call: ModelFunctionCall) -> tuple[str, ...]:
    mesh = step.mesh(call)
    lines = [
        f"{call.model_name} {call.call_type.replace('_', ' ')}",
        f"{mesh.dims.short} on {fold_numbers(mesh.ranks)}",
    ]
    goes = step.goes(call)
    if call.call_type is not CallType.EVALUATE and len(goes) > 1:
        lines.append(f"{len(goes)} goes of {goes[0]}")
    return tuple(lines)


def _first_call(step: StepPlan, model: ModelName | None) -> str | None:
    """The call at which the lines of a model's weights end, or begin: the one that trains it, else its first."""
    calls = [call for call in step.graph.step_calls if call.model_name == model]
    trained = [call for call in calls if call.call_type is CallType.TRAIN_STEP]
    return next((call.name for call in (*trained, *calls)), None)


class _Drawing:
    """Puts boxes and trunks in their places."""

    def __init__(self, nodes: Sequence[_Node], trunks: Sequence[_Trunk]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._column = {node.name: node.column for node in nodes}
        self._trunks = trunks
        self._wires = [(trunk, start, end) for trunk in trunks for start, end in trunk.wires(self._column)]
        bends = dict.fromkeys((end, trunk) for trunk, _, end in self._wires if end not in self._nodes)
        for trunk in trunks:
            for column in range(self._column[trunk.start] + 1, max(self._column[end] for end in trunk.ends)):
                self._column[trunk.bend(column)] = column
        self._height = {node.name: self._box_height(node) for node in nodes}
        items = [
            *(
                Item(name=node.name, column=node.column, height=self._height[node.name], stays_below=node.stays_below)
                for node in nodes
            ),
            *(Item(name=name, column=self._column[name], height=_BEND_HEIGHT) for name, _ in bends),
        ]
        layers = Layers(items=items, wires=[(start, end) for _, start, end in self._wires], gap=_GAP)
        self._y = layers.centres()
        self._left, self._widths = self._columns()

    def picture(self, returns: Sequence[_Return]) -> Picture:
        picture = Picture()
        for node in self._nodes.values():
            picture.boxes.append(
                Box(
                    name=node.name,
                    lines=node.lines,
                    role=node.role,
                    left=self._left[node.column],
                    middle=self._y[node.name],
                    width=self._widths[node.column],
                    height=self._height[node.name],
                )
            )
        self._add_trunks(picture)
        self._add_returns(picture, returns)
        return picture

    def _box_height(self, node: _Node) -> float:
        text = _LINE * (1 + len(node.lines)) + 2 * _PAD + 0.04
        outgoing = sum(trunk.port_height for trunk in self._trunks if trunk.start == node.name)
        incoming = _IN_PORTS * (1 + sum(end == node.name for _, _, end in self._wires))
        return max(text, outgoing, incoming)

    def _columns(self) -> tuple[dict[int, float], dict[int, float]]:
        """Left edge and width of each column; between two of them is room for labels, and for lines to spread."""
        left, widths, x = {}, {}, 0.0
        for column in range(1 + max(node.column for node in self._nodes.values())):
            left[column] = x
            widths[column] = max((node.width for node in self._nodes.values() if node.column == column), default=0.0)
            x += widths[column] + self._stub(column) + _FAN
        return left, widths

    def _stub(self, column: int) -> float:
        """How far lines go straight on after a column, under their labels."""
        lines = [line for trunk in self._trunks if self._column[trunk.start] == column for line in trunk.label]
        return text_width(max(map(len, lines), default=0), KEY_POINTS) + 2 * _PAD

    def _add_trunks(self, picture: Picture) -> None:
        out_port, in_port = self._out_ports(), self._in_ports()
        for trunk in self._trunks:
            column = self._column[trunk.start]
            x, y = self._left[column] + self._widths[column], out_port[trunk]
            picture.labels.append(Label(lines=trunk.label, left=x + _PAD, bottom=y + 0.03, role=trunk.role))
        for trunk, start, end in self._wires:
            column = self._column[start]
            x = self._left[column] + (self._widths[column] if start in self._nodes else 0.0)
            y = out_port[trunk] if start in self._nodes else self._y[start]
            spread = self._left[column] + self._widths[column] + self._stub(column)
            picture.lines.append(
                Line(
                    points=((x, y), (spread, y), (self._left[column + 1], in_port[trunk, end])),
                    shape="curve",
                    role=trunk.role,
                    has_arrow=end in self._nodes,
                    is_dashed=trunk.is_dashed,
                )
            )

    def _out_ports(self) -> dict[_Trunk, float]:
        """Height at which each trunk leaves its box: in the order of where they go."""
        ports: dict[_Trunk, float] = {}
        for name in self._nodes:
            trunks = [trunk for trunk in self._trunks if trunk.start == name]
            trunks.sort(key=lambda trunk: -fmean(self._y[end] for _, end in trunk.wires(self._column)))
            # A label stands on its line, so that it is its own height that keeps a line from the one above it.
            y = self._y[name] + sum(trunk.port_height for trunk in trunks[1:]) / 2
            for number, trunk in enumerate(trunks):
                y -= trunk.port_height if number else 0.0
                ports[trunk] = y
        return ports

    def _in_ports(self) -> dict[tuple[_Trunk, str], float]:
        """Height at which each wire meets its end: in the order of where they come from."""
        out_port = self._out_ports()
        ports: dict[tuple[_Trunk, str], float] = {}
        for end in self._column:
            wires = [(trunk, start) for trunk, start, other in self._wires if other == end]
            wires.sort(key=lambda wire: -(out_port[wire[0]] if wire[1] in self._nodes else self._y[wire[1]]))
            for number, (trunk, _) in enumerate(wires):
                ports[trunk, end] = self._y[end] + ((len(wires) - 1) / 2 - number) * _IN_PORTS
        return ports

    def _add_returns(self, picture: Picture, returns: Sequence[_Return]) -> None:
        """Beneath everything: from the right side of a box down, to the left, and up to another one."""
        lowest = min(box.middle - box.height / 2 for box in picture.boxes)
        # Those that go furthest to the left run lowest, so that none crosses another.
        for number, way in enumerate(sorted(returns, key=lambda way: -self._nodes[way.end].column)):
            start, end = self._nodes[way.start], self._nodes[way.end]
            right = self._left[start.column] + self._widths[start.column]
            y = self._y[way.start] - self._height[way.start] / 2 + 0.07 * (number + 1)
            turn, lane = right + 0.12 + 0.07 * number, lowest - _LANE * (number + 1)
            middle = self._left[end.column] + self._widths[end.column] / 2 + 0.15 * number
            bottom = self._y[way.end] - self._height[way.end] / 2
            picture.lines.append(
                Line(
                    points=((right, y), (turn, y), (turn, lane), (middle, lane), (middle, bottom)),
                    shape="corners",
                    role=way.role,
                    has_arrow=True,
                    is_dashed=True,
                )
            )
            picture.labels.append(Label(lines=(way.label,), left=middle + _PAD, bottom=lane + 0.03, role=way.role))
