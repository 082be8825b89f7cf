"""RunPlan -> the dataflow graph as a Mermaid flow chart, which GitHub, GitLab and most editors draw.

flowchart LR
  samples(["rollout workers"])
  c0["actor_inf<br/>actor/0 inference<br/>d2 on 0-1"]
  samples -->|"input_ids, prompt_mask"| c0
  c1 -.->|"weights"| published
"""

from collections.abc import Iterator

from corral.experiments.plan import RunPlan
from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.step_plan import StepPlan
from corral.scheduling.worker_numbers import fold_numbers

_SAMPLES, _PUBLISHED = "samples", "published"


def render_mermaid(plan: RunPlan) -> str:
    """The text of the chart."""
    return "\n".join(["flowchart LR", *(f"  {line}" for line in _lines(plan.master))])


def _lines(master: MasterWorkerSpec) -> Iterator[str]:
    step = master.step_plan
    # Nodes have numbers, since a name may be one of Mermaid's own words.
    node = {call.name: f"c{number}" for number, call in enumerate(step.graph.calls)}
    yield f'{_SAMPLES}(["{master.samples_from}"])'
    for call in step.graph.calls:
        mesh = step.mesh(call)
        place = f"{mesh.dims.short} on {fold_numbers(mesh.ranks)}"
        yield f'{node[call.name]}["{call.name}<br/>{call.model_name} {call.call_type.value}<br/>{place}"]'
    for route in step.routes:
        start = _SAMPLES if route.producer is None else node[route.producer]
        for consumer in route.consumers:
            yield f'{start} -->|"{", ".join(route.keys)}"| {node[consumer]}'
    yield from _weights(step, node, master.weights_go_to)


def _weights(step: StepPlan, node: dict[str, str], published_to: str) -> Iterator[str]:
    for number, route in enumerate(step.weight_routes):
        share = "weights" if route.eta == 1.0 else f"{route.eta:g} of the weights"
        if route.is_before:
            yield f'm{number}(["{route.source}"]) -.->|"{share}"| {node[route.call]}'
        elif route.target is None:
            yield f'{node[route.call]} -.->|"{share}"| {_PUBLISHED}(["{published_to}"])'
        else:
            yield f'{node[route.call]} -.->|"{share}"| m{number}(["{route.target}"])'
