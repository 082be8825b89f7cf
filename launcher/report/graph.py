"""StepPlan -> the dataflow graph of a train step: a Mermaid chart, which most editors draw, and a picture.

┌─────────┐ input_ids                                              calls stand on the diagonal, in their order
│ samples ├───────────┬────────────────┐                           (an N2 chart, Lano 1977): what is given goes
└─────────┘      ┌────▼────┐ ref_logprobs│                         right and then down, what comes back in the
                 │ ref_inf ├───────────┐ │                         next step goes left and then up, so that no
                 └────▲────┘      ┌────▼─▼──────┐ weights          line runs through a box or a label
                      └┄┄ eta 0.1 ┤ actor_train ├┄┄┄┄┄┄┄┐
                                  └─────────────┘ ┌─────▼──────┐
                                                  │ generation │
                                                  └────────────┘
"""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corral.launcher.report.style import FAINT, INK, role_colours
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName
from corral.scheduling.step_plan import StepPlan
from corral.scheduling.worker_information import fold_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 7.5
_CHARACTER = 0.602 * _POINTS / 72  # inches, of DejaVu Sans Mono
_LINE = 0.14  # inches from one line of text to the next
_PAD = 0.1
_PORT = 0.14  # between two lines that end at one box
_LABEL_CHARACTERS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A call, or what samples come from, or what holds weights and is not called."""

    name: str
    lines: tuple[str, ...] = ()
    """Beneath the name."""
    role: str | None = None
    """None for what is not a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Keys, or weights, that go from a node to all that take the same."""

    start: str
    ends: tuple[str, ...]
    label: str
    is_weights: bool = False


Graph = tuple[Sequence[Node], Sequence[Edge]]


def graph_of(step: StepPlan, *, samples: str, published_to: str) -> Graph:
    """Nodes in the order of the step, and edges: those without weights go to later nodes.

    Args:
        samples: what samples come from: "rollout workers" or "dataset".
        published_to: who takes the weights of a new policy version.
    """
    edges = [
        Edge(start=route.producer or samples, ends=route.consumers, label=", ".join(route.keys))
        for route in step.routes
    ]
    generating = tuple(
        call.name for call in step.graph.calls if call.call_type is CallType.GENERATE and not call.input_keys
    )
    if generating:  # it reads prompts, which are no key of a sample
        edges.append(Edge(start=samples, ends=generating, label="prompts"))
    nodes = [Node(name=samples), *(_node(step, call) for call in step.graph.calls)]
    for route in step.weight_routes:
        target = published_to if route.target is None else _call_of(step, route.target)
        start, end = (_call_of(step, route.source), route.call) if route.is_before else (route.call, target)
        nodes += [Node(name=name) for name in (start, end) if name not in {node.name for node in nodes}]
        label = "weights" if route.eta == 1.0 else f"{route.eta:g} of the weights"
        edges.append(Edge(start=start, ends=(end,), label=label, is_weights=True))
    return nodes, edges


def _node(step: StepPlan, call: ModelFunctionCall) -> Node:
    mesh = step.mesh(call)
    lines = [f"{call.model_name} {call.call_type.value}", f"{mesh.dims.short} on {fold_numbers(mesh.ranks)}"]
    goes = step.goes(call)
    if call.call_type is not CallType.EVALUATE and len(goes) > 1:
        lines.append(f"{len(goes)} goes of {goes[0]}")
    return Node(name=call.name, lines=tuple(lines), role=call.role)


def _call_of(step: StepPlan, model: ModelName) -> str:
    """Where a model's weights are used: the call that trains it, else its first, else the model itself."""
    calls = [call for call in step.graph.step_calls if call.model_name == model]
    trained = [call for call in calls if call.call_type is CallType.TRAIN_STEP]
    return next((call.name for call in (*trained, *calls)), str(model))


def render_mermaid(graph: Graph) -> str:
    """The text of the chart."""
    return "\n".join(["flowchart LR", *(f"  {line}" for line in _mermaid_lines(*graph))])


def _mermaid_lines(nodes: Sequence[Node], edges: Sequence[Edge]) -> Iterator[str]:
    # Nodes have numbers, since a name may be one of Mermaid's own words.
    number_by_name = {node.name: f"n{number}" for number, node in enumerate(nodes)}
    for node in nodes:
        left, right = ("([", "])") if node.role is None else ("[", "]")
        yield f'{number_by_name[node.name]}{left}"{"<br/>".join((node.name, *node.lines))}"{right}'
    for edge in edges:
        arrow = "-.->" if edge.is_weights else "-->"
        for end in edge.ends:
            yield f'{number_by_name[edge.start]} {arrow}|"{edge.label}"| {number_by_name[end]}'


def draw_graph(graph: Graph, *, title: str) -> "Figure":
    """The picture."""
    # Not at the top: only this process draws, and it needs no display.
    from matplotlib.figure import Figure

    drawing = Drawing(*graph)
    width, height = drawing.size
    figure = Figure(figsize=(width + 4 * _PAD, height + 8 * _PAD), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-2 * _PAD, width + 2 * _PAD), ylim=(height + 2 * _PAD, -6 * _PAD))
    axes.axis("off")
    axes.text(0.0, -4 * _PAD, title, fontsize=12, color=INK)
    drawing.draw(axes)
    return figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Where a node stands."""

    node: Node
    left: float
    top: float
    width: float
    height: float


class Drawing:
    """Boxes on a diagonal, and lines with a corner or none; lengths in inches, to the right and downwards."""

    def __init__(self, nodes: Sequence[Node], edges: Sequence[Edge]) -> None:
        self._colours = role_colours(node.role for node in nodes if node.role)
        self.edges = edges
        self.labels = [textwrap.wrap(edge.label, _LABEL_CHARACTERS) for edge in edges]
        self.boxes: dict[str, Box] = {}
        x = y = 0.0
        for node in nodes:
            width = _CHARACTER * max(map(len, (node.name, *node.lines, " " * 8))) + 2 * _PAD
            ports = [len(label) for edge, label in zip(edges, self.labels, strict=True) if edge.start == node.name]
            height = _LINE * max(1 + len(node.lines), sum(ports) + len(ports)) + 2 * _PAD
            self.boxes[node.name] = Box(node=node, left=x, top=y, width=width, height=height)
            # A label may go on above the left half of the next box: lines to that end in its right half.
            x += width + _CHARACTER * _LABEL_CHARACTERS - width / 2 + 2 * _PAD
            y += height + 2 * _PAD

    @property
    def size(self) -> tuple[float, float]:
        """Width and height."""
        last = [*self.boxes.values()][-1]
        return last.left + last.width, last.top + last.height

    def draw(self, axes: "Axes") -> None:
        leaving, arriving = Counter[str](), Counter[str]()
        arriving_in_all = Counter(end for edge in self.edges for end in edge.ends)
        for edge, label in zip(self.edges, self.labels, strict=True):
            start = self.boxes[edge.start]
            colour = self._colours.get(start.node.role or "", FAINT)
            leaving[edge.start] += len(label) + 1  # a label stands on its line
            y = start.top + leaving[edge.start] * _LINE
            for end in edge.ends:
                target = self.boxes[end]
                spacing = min(_PORT, target.width / 2 / arriving_in_all[end])
                x = target.left + target.width / 2 + spacing * (arriving[end] + 0.5)
                arriving[end] += 1
                self._line(axes, start, target, corner=(x, y), colour=colour, is_dashed=edge.is_weights)
            is_back = self.boxes[edge.ends[0]].top < start.top
            x = start.left - _PAD if is_back else start.left + start.width + _PAD
            _write(axes, x, y - 0.02, "\n".join(label), ha="right" if is_back else "left", va="bottom")
        for box in self.boxes.values():
            self._box(axes, box)

    def _line(
        self, axes: "Axes", start: Box, end: Box, *, corner: tuple[float, float], colour: str, is_dashed: bool
    ) -> None:
        x, y = corner
        is_back = end.top < start.top
        begin, edge = (start.left, end.top + end.height) if is_back else (start.left + start.width, end.top)
        style = "--" if is_dashed else "-"
        axes.plot([begin, x, x], [y, y, edge], color=colour, linestyle=style, linewidth=1.2, zorder=1)
        axes.plot(x, edge, marker="^" if is_back else "v", color=colour, markersize=5, zorder=1)

    def _box(self, axes: "Axes", box: Box) -> None:
        from matplotlib.patches import Rectangle

        colour = self._colours.get(box.node.role or "", FAINT)
        for face, alpha in (("white", 1.0), (colour, 0.12)):
            corner = (box.left, box.top)
            axes.add_patch(Rectangle(corner, box.width, box.height, facecolor=face, alpha=alpha, edgecolor=colour))
        for number, text in enumerate((box.node.name, *box.node.lines)):
            y = box.top + box.height / 2 + _LINE * (number - len(box.node.lines) / 2)
            _write(axes, box.left + _PAD, y, text, va="center", weight="normal" if number else "bold")


def _write(axes: "Axes", x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, text, color=INK, fontsize=_POINTS, family="monospace", **style)
