"""Whether groups of workers fit on nodes: one answer, for nodes that the configuration describes and for SLURM's.

groups, shape of a node, most nodes ──place──► Placement | UnsatisfiableError: what does not fit, and what would
"""

from collections.abc import Iterator

from corral.experiments.errors import KeyPath, UnsatisfiableError
from corral.scheduling.placement import Groups, NodeShape, Placement, PlacementError, most_tasks_that_fit, place
from corral.scheduling.worker_information import WorkerKind

ANY_NODE = NodeShape(cpus=1 << 20, gpus=1 << 12, mem_mb=1 << 40)
"""A node that nobody has described: only the cluster can tell what it has."""
_DESCRIPTION = "cluster.cpus_per_node, cluster.mem_per_node and cluster.gpus_per_node"


def place_groups(
    groups: Groups, shape: NodeShape, *, max_nodes: int | None = None, has_slack: bool = True
) -> Placement:
    """Where each task of the groups goes; see `place`.

    Raises:
        UnsatisfiableError: naming what does not fit, the nearest numbers that do, and the key that decides.
    """
    try:
        return place(groups, shape, has_slack=has_slack, max_nodes=max_nodes)
    except PlacementError as error:
        there = {"CPUs": (shape.cpus, ANY_NODE.cpus), "GPUs": (shape.gpus, ANY_NODE.gpus)}
        there["MB"] = shape.mem_mb, ANY_NODE.mem_mb
        size = ", ".join(f"{number} {unit}" for unit, (number, unknown) in there.items() if number < unknown)
        nearest = list(_what_fits(groups, shape, max_nodes=max_nodes, has_slack=has_slack))
        by_slurm = f": SLURM gives jobs {shape.rules}" if shape.rules else ""
        otherwise = (
            "change the groups' scheduling (gpu: 0 runs on CPUs), the allocation, or the cluster's description "
            f"({_DESCRIPTION}{by_slurm})"
        )
        raise UnsatisfiableError.of(
            f"trial can never start on {max_nodes or 'any number of'} node(s) of {size}: {error}",
            hint="; ".join([*nearest, f"or {otherwise}"]) if nearest else otherwise,
            path=("cluster", "max_nodes") if nearest else _path_of(error),
        ) from error


def _path_of(error: PlacementError) -> KeyPath:
    """The key that decides how much of the resource a task takes."""
    if (error.kind, error.resource) == ("generation_server", "gpu"):
        return ("allocation",)
    return ("groups", error.kind, "scheduling", error.resource)


def _what_fits(groups: Groups, shape: NodeShape, *, max_nodes: int | None, has_slack: bool) -> Iterator[str]:
    """The nearest numbers with which the groups could be placed; nothing where a single task is too large."""
    try:
        enough = place(groups, shape, has_slack=has_slack).num_nodes
    except PlacementError:
        return
    yield f"{enough} such nodes are enough (cluster.max_nodes)"
    counts = {kind: group.count for kind, group in groups.items()}
    ranks = counts.get("model_worker")
    follows = ranks is not None and ranks == counts.get("rollout_worker")
    trainers: list[WorkerKind] = ["model_worker", "rollout_worker"] if follows else ["model_worker"]
    beside: list[tuple[list[WorkerKind], str]] = [
        (trainers, f"model workers{', with as many rollout workers,' if follows else ''}"),
        (["generation_server"], "generation servers"),
    ]
    for kinds, who in beside:
        if kinds[0] in counts and (
            count := most_tasks_that_fit(groups, kinds, shape, has_slack=has_slack, max_nodes=max_nodes)
        ):
            yield f"{count} of {counts[kinds[0]]} {who} fit beside the others"
