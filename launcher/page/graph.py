"""StepPlan -> the dataflow graph of a train step: a Mermaid chart, which most editors draw, and a table for the page.

samples   input_ids         input_ids        calls stand on the diagonal, in their order (an N2 chart, Lano
          ref_inf           ref_logprobs     1977): a row gives, a column takes, and what comes back in the
          0.1 of weights    actor_train      next step stands left of the diagonal
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName
from corral.scheduling.step_plan import StepPlan
from corral.scheduling.worker_information import fold_numbers


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
    slices = step.slices(call)
    if call.call_type is not CallType.EVALUATE and len(slices) > 1:
        lines.append(f"{len(slices)} slices of {slices[0]}")
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
