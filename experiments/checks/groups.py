"""Checks of groups of workers: as many as the allocation says, images that can run, nodes that they fit on."""

from collections.abc import Iterator, Mapping

from corral.experiments.config.cluster import ClusterConfig, GroupsConfig
from corral.experiments.errors import ConfigProblem, KeyPath
from corral.scheduling.placement import NodeShape, most_tasks_that_fit, place
from corral.scheduling.scheduling import ExperimentScheduling
from corral.scheduling.worker_information import WorkerKind

# What the file leaves open, only the cluster can tell.
_LEAST_MEM_MB = 200  # a worker without torch has 150 MB once it has imported its modules
_ANY_NODE = NodeShape(cpus=1 << 20, gpus=1 << 12, mem_mb=1 << 40)


def check_groups(groups: GroupsConfig, expected_count: Mapping[WorkerKind, int | None]) -> Iterator[ConfigProblem]:
    """Counts that contradict the allocation, and settings of groups that nobody would read.

    Args:
        groups: what the experiment says.
        expected_count: by kind that the experiment has; None where the user may choose.
    """
    for kind, group in groups.items():
        path: KeyPath = ("groups", kind)
        if kind not in expected_count:
            if group.model_fields_set:
                hint = f"remove it; there are {', '.join(expected_count)}"
                yield ConfigProblem(f"this experiment has no {kind}", hint, path=path)
            continue
        expected = expected_count[kind]
        if group.count is not None and expected is not None and group.count != expected:
            reason = (
                "a trial has one" if kind in ("master_worker", "gserver_manager") else f"the allocation says {expected}"
            )
            yield ConfigProblem(
                f"groups.{kind}.count is {group.count}, but {reason}",
                f"remove the count, or {'write 1' if reason.endswith('one') else 'change the allocation'}",
                path=(*path, "count"),
            )
        for key, scheduling in group.given_schedulings():
            if scheduling.mem < _LEAST_MEM_MB:
                yield ConfigProblem(
                    f"{scheduling.mem} MB of memory are too few for any worker: Python and its packages take more",
                    f"a number without a unit is in MB; did you mean {scheduling.mem}G?",
                    path=(*path, *key, "mem"),
                )
        if kind != "generation_server" and group.scheduling is not None and group.scheduling.gpu > 1:
            yield ConfigProblem(
                f"a worker drives at most 1 GPU, got {group.scheduling.gpu}",
                "raise d in the allocation instead",
                path=(*path, "scheduling", "gpu"),
            )


def check_containers(groups: GroupsConfig, cluster: ClusterConfig) -> Iterator[ConfigProblem]:
    """Images that nothing could run, and mounts without an image."""
    for kind, group in groups.items():
        for key, scheduling in group.given_schedulings():
            path: KeyPath = ("groups", kind, *key)
            if scheduling.container_image is not None and cluster.container_runtime is None:
                yield ConfigProblem(
                    "container_image needs cluster.container_runtime, which is not set",
                    "set cluster.container_runtime to apptainer, singularity or pyxis, whichever this site has",
                    path=(*path, "container_image"),
                )
            if scheduling.container_mounts and scheduling.container_image is None:
                yield ConfigProblem(
                    "container_mounts has no effect without container_image",
                    "set container_image, or remove it",
                    path=(*path, "container_mounts"),
                )


def check_placement(scheduling: ExperimentScheduling, cluster: ClusterConfig) -> Iterator[ConfigProblem]:
    """Groups that do not fit the nodes that the configuration describes."""
    shape = cluster.node_shape(_ANY_NODE)
    try:
        place(scheduling, shape, max_nodes=cluster.max_nodes)
    except ValueError as error:
        sizes = {"CPUs": cluster.cpus_per_node, "GPUs": cluster.gpus_per_node, "MB": cluster.mem_per_node}
        size = ", ".join(f"{number} {unit}" for unit, number in sizes.items() if number is not None)
        nearest = "; ".join(_what_fits(scheduling, shape, max_nodes=cluster.max_nodes))
        otherwise = "change the groups' scheduling (gpu: 0 runs on CPUs), the allocation, or the cluster's description"
        yield ConfigProblem(
            f"the groups cannot be placed on {cluster.max_nodes or 'any number of'} node(s) of {size}: {error}",
            f"{nearest}; or {otherwise}" if nearest else otherwise,
            path=("cluster",),
        )


def _what_fits(scheduling: ExperimentScheduling, shape: NodeShape, *, max_nodes: int | None) -> Iterator[str]:
    """The nearest numbers with which the groups could be placed; nothing where a single task is too large."""
    try:
        enough = place(scheduling, shape).num_nodes
    except ValueError:
        return
    yield f"{enough} such nodes are enough (cluster.max_nodes)"
    ranks, rollout = scheduling["model_worker"], scheduling.get("rollout_worker")
    follows = rollout is not None and rollout.count == ranks.count
    kinds: tuple[WorkerKind, ...] = ("model_worker", "rollout_worker") if follows else ("model_worker",)
    if count := most_tasks_that_fit(scheduling, kinds, shape, max_nodes=max_nodes):
        also = ", with as many rollout workers," if follows else ""
        yield f"{count} of {ranks.count} model workers{also} fit beside the others"
    servers = scheduling.get("generation_server")
    if servers and (count := most_tasks_that_fit(scheduling, ("generation_server",), shape, max_nodes=max_nodes)):
        yield f"{count} of {servers.count} generation servers fit beside the others"
