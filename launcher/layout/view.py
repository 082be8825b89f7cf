"""Layout -> what people read before they submit: which layout and why, and what runs on which node.

plan     hetjob: 2 components, 3 nodes (groups ask for different nodes: partition ...)
           head          2 x 9 CPUs, 4 GPUs, 33 GiB; partition h100, time 24:00:00
             n0          master_worker 0   generation_server 0 (GPUs 0-1)   model_worker 0-1 (GPUs 2-3)
             n1          model_worker 2-5 (GPUs 0-3)
"""

from collections.abc import Iterator, Sequence

from corral.launcher.layout.layout import Allocation, Layout, Step
from corral.scheduling.worker_information import parse_worker_id
from corral.scheduling.worker_numbers import fold_numbers

_MAX_NODES_SHOWN = 8


def render_layout(layout: Layout) -> list[str]:
    """The lines that rl-submit prints for people."""
    nodes = sum(layout.allocations[index].num_nodes for index in layout.fixed)
    elastic = len(layout.allocations) - len(layout.fixed)
    components = len(layout.components)
    jobs = 1 + len(layout.fixed) - components
    parts = _count(jobs, "job") + (f" of {components} components" if components > 1 else "")
    # Jobs that leave room on a node may share it.
    at_most = "up to " if jobs > 1 else ""
    heading = f"{layout.kind}: {parts}, {at_most}{_count(nodes, 'node')}"
    heading += f", {_count(elastic, 'elastic worker')}" if elastic else ""
    lines = [f"plan       {heading} ({layout.reason})"]
    for index, allocation in enumerate(layout.allocations):
        lines.append(f"  {allocation.name:<19}  {_asked(allocation)}")
        if allocation.role != "elastic":
            lines += _nodes(layout, index)
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _asked(allocation: Allocation) -> str:
    parts = [f"{allocation.num_nodes} x {allocation.cpus_per_node} CPUs"]
    if allocation.gpus_per_node:
        kind = f"{allocation.gpu_type} " if allocation.gpu_type else ""
        parts.append(f"{allocation.gpus_per_node} {kind}GPUs")
    megabytes = allocation.mem_mb_per_node
    parts.append(f"{megabytes / 1024:.4g} GiB" if megabytes >= 1024 else f"{megabytes} MiB")
    values = {"partition": "(default)", **allocation.options}
    values.setdefault("time_limit", "(default)")
    where = ", ".join(f"{name.replace('_limit', '')} {value}" for name, value in values.items())
    return f"{', '.join(parts)}; {where}"


def _nodes(layout: Layout, index: int) -> Iterator[str]:
    num_nodes = layout.allocations[index].num_nodes
    for node in range(min(num_nodes, _MAX_NODES_SHOWN)):
        yield f"    n{node:<16}  {_workers_on(layout, index, node)}"
    if num_nodes > _MAX_NODES_SHOWN:
        yield f"    and {num_nodes - _MAX_NODES_SHOWN} more nodes"


def _workers_on(layout: Layout, index: int, node: int) -> str:
    steps_by_kind: dict[str, dict[int, Step]] = {}
    for worker, step in layout.steps.items():
        if (step.allocation, step.node_index) == (index, node):
            kind, number = parse_worker_id(worker)
            steps_by_kind.setdefault(kind, {})[number] = step
    return "   ".join(
        f"{kind} {fold_numbers(sorted(steps))}{_gpus([steps[number] for number in sorted(steps)])}"
        for kind, steps in steps_by_kind.items()
    )


def _gpus(steps: Sequence[Step]) -> str:
    """The GPUs of a kind's workers on a node: ' (GPUs 0-3)' where each has one, ' (GPUs 0-1 + 2-3)' where more."""
    shares = [step.gpu_indices for step in steps if step.gpu_indices]
    if not shares:
        return ""
    if all(len(share) == 1 for share in shares):
        shares = [tuple(sorted(gpu for share in shares for gpu in share))]
    return f" (GPUs {' + '.join(fold_numbers(share) for share in shares)})"
