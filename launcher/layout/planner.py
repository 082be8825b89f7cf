"""Groups and the shapes of nodes -> Layout: which allocations a trial asks for, and where in them each worker runs.

    groups, launch.* --needs--> pools of groups that can share an allocation
                                  one pool             packed   [head]
                                  several              hetjob   [head + component + ...]
                                  asked for            jobs     [head] [group] [group]
    pool + shape of its nodes --place--> node and GPUs of every worker, and what a node is asked for

Pure: what the cluster has comes in as shapes of nodes, and nothing is submitted here.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec

from corral.experiments.checks.placement import place_groups
from corral.experiments.errors import ConfigError, UnsatisfiableError
from corral.experiments.plan import RunPlan
from corral.launcher.layout.layout import Allocation, AllocationRole, Layout, Step
from corral.scheduling.placement import SLACK_CPUS, SLACK_MEM_MB, NodeShape, Placement
from corral.scheduling.scheduling import NEEDS, AllocationNeeds, Scheduling, TasksGroup
from corral.scheduling.worker_information import LayoutKind, WorkerKind, parse_worker_id, worker_id

SUPERVISED: tuple[WorkerKind, ...] = ("master_worker", "gserver_manager")
"""What runs beside the supervisor, on the first node of the head."""

_GANG: WorkerKind = "model_worker"
"""Whose workers send each other tensors."""

NodeShapes = Mapping[str | None, NodeShape]
"""What most usable nodes of a partition have, by its name; None is the default partition."""


def plan_layout(plan: RunPlan, shapes: NodeShapes | None = None, *, default_partition: str | None = None) -> Layout:
    """The allocations of a trial and the place of every worker.

    Args:
        shapes: nodes of the cluster; where it says nothing, `cluster.*_per_node` or an assumption counts.
        default_partition: its name, if known: who names it and who leaves the partition out ask for the same.

    Raises:
        UnsatisfiableError: if a group fits no node, or all of them not the nodes that the trial may use.
        ConfigError: if groups that must share an allocation ask for different ones.
    """
    plan = _with_default_partition(plan, default_partition)
    pools = _pools(plan)
    kind, reason = _choose(plan, pools)
    if kind == "hetjob":
        pools = _with_company_for_the_head(plan, pools, shapes or {})
        _time_limit(plan, dict(plan.scheduling.items()))
    elif kind == "jobs":
        pools = _one_per_group(plan)
    allocations: list[Allocation] = []
    steps: dict[str, Step] = {}
    nodes_left = plan.cluster.max_nodes
    for number, pool in enumerate([*pools, *_elastic_pools(plan)]):
        beside: AllocationRole = "component" if kind == "hetjob" else "group"
        role = "elastic" if pool.elastic_index is not None else "head" if number == 0 else beside
        max_nodes = None if role == "elastic" else nodes_left
        allocation, placed = _place_pool(plan, pool, role, number, shapes or {}, max_nodes)
        allocations.append(allocation)
        steps |= placed
        nodes_left = None if nodes_left is None else nodes_left - allocation.num_nodes
    by_worker = {f"{spec.kind}/{spec.index}": steps[f"{spec.kind}/{spec.index}"] for spec in plan.workers}
    return Layout(kind=kind, reason=reason, allocations=tuple(allocations), steps=by_worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """Groups that can share an allocation."""

    needs: AllocationNeeds
    gpu_type: str | None
    groups: dict[WorkerKind, TasksGroup] = field(default_factory=dict)
    elastic_index: int | None = None
    """Of the one worker, where it may come and go."""


def _with_default_partition(plan: RunPlan, default: str | None) -> RunPlan:
    """The plan with the default partition by its name for all, if somebody calls it so."""
    named = {group.scheduling.partition for _, group in plan.scheduling.items()}
    if default is None or default not in named or plan.launch.partition is not None:
        return plan
    return plan.model_copy(update={"launch": plan.launch.model_copy(update={"partition": default})})


def asked_for(plan: RunPlan, task: Scheduling, name: str) -> Any:
    """A group's own value, else that of `launch` where that has one."""
    own = getattr(task, name)
    return getattr(plan.launch, name, None) if own is None else own


def _pool_of(plan: RunPlan, groups: dict[WorkerKind, TasksGroup], *, elastic_index: int | None = None) -> _Pool:
    """A pool of groups that need the same."""
    tasks = [group.scheduling for group in groups.values()]
    gpu_type = next((task.gpu_type for task in tasks if task.gpu_type), None)
    return _Pool(needs=_needs(plan, tasks[0]), gpu_type=gpu_type, groups=groups, elastic_index=elastic_index)


def _needs(plan: RunPlan, scheduling: Scheduling) -> AllocationNeeds:
    return AllocationNeeds(**{name: asked_for(plan, scheduling, name) for name in NEEDS})


def _pools(plan: RunPlan) -> list[_Pool]:
    """Groups by what they need, the master's first; a group without GPUs takes nodes with any type of them."""
    pools: list[_Pool] = []
    items = sorted(plan.scheduling.items(), key=lambda item: item[0] not in SUPERVISED)
    # Groups that name a type of GPU first: the others can then join them.
    for kind, group in sorted(items, key=lambda item: item[1].scheduling.gpu_type is None):
        needs, gpu_type = _needs(plan, group.scheduling), group.scheduling.gpu_type
        for pool in pools:
            if pool.needs == needs and gpu_type in (None, pool.gpu_type):
                pool.groups[kind] = group
                break
        else:
            pools.append(_pool_of(plan, {kind: group}))
    ordered = [_Pool(needs=pool.needs, gpu_type=pool.gpu_type, groups=_in_order(plan, pool.groups)) for pool in pools]
    return sorted(ordered, key=lambda pool: "master_worker" not in pool.groups)


def _in_order(plan: RunPlan, groups: Mapping[WorkerKind, TasksGroup]) -> dict[WorkerKind, TasksGroup]:
    return {kind: group for kind, group in plan.scheduling.items() if kind in groups}


def _choose(plan: RunPlan, pools: Sequence[_Pool]) -> tuple[LayoutKind, str]:
    """The kind of layout, and why."""
    asked, difference = plan.launch.layout, _difference(plan, pools)
    if asked == "jobs":
        return "jobs", "launch.layout asks for it: one job per group"
    if difference is None:
        also = "; hetjob would be the same" if asked == "hetjob" else ""
        return (
            "packed",
            "launch.layout asks for it" if asked == "packed" else f"all groups can share one allocation{also}",
        )
    name, values = difference
    shown = ", ".join(f"{value or 'default'} ({' and '.join(kinds)})" for value, kinds in values.items())
    if asked == "packed":
        raise ConfigError.of(
            f"layout packed is one allocation for all groups, but they ask for different nodes: {name} {shown}",
            hint=f"set launch.layout to hetjob or auto, or give all groups the same {name}",
            path=("groups", list(values.values())[-1][0], "scheduling", name),
        )
    return "hetjob", f"groups ask for different nodes: {name} {shown}"


def _difference(plan: RunPlan, pools: Sequence[_Pool]) -> tuple[str, dict[str | None, list[WorkerKind]]] | None:
    """The first field in which pools differ, with the groups by value."""
    if len(pools) == 1:
        return None
    for name in (*NEEDS, "gpu_type"):
        values: dict[str | None, list[WorkerKind]] = {}
        for kind, group in plan.scheduling.items():
            if name != "gpu_type" or group.scheduling.gpu:
                values.setdefault(asked_for(plan, group.scheduling, name), []).append(kind)
        if len(values) > 1:
            return name, values
    raise AssertionError("pools differ in what decides whether groups share one")


def _one_per_group(plan: RunPlan) -> list[_Pool]:
    """Layout jobs: the master and the manager are the head, every other group has a job."""
    head = {kind: group for kind, group in plan.scheduling.items() if kind in SUPERVISED}
    master = plan.scheduling["master_worker"].scheduling
    manager = plan.scheduling.get("gserver_manager")
    if manager is not None and _needs(plan, manager.scheduling) != _needs(plan, master):
        raise ConfigError.of(
            "with layout jobs the master_worker and the gserver_manager share a job, but they ask for different nodes",
            hint="give both the same partition, constraint, account, ...",
            path=("groups", "gserver_manager", "scheduling"),
        )
    others = [{kind: group} for kind, group in plan.scheduling.items() if kind not in SUPERVISED]
    return [_pool_of(plan, groups) for groups in (head, *others)]


def _with_company_for_the_head(plan: RunPlan, pools: Sequence[_Pool], shapes: NodeShapes) -> list[_Pool]:
    """Lets master and manager ride with other groups where nobody forces them onto nodes of their own.

    Components of a heterogeneous job never share a node: alone, one CPU of a master would take a whole one.
    """
    head, *others = pools
    is_forced = head.needs != AllocationNeeds() or head.gpu_type is not None
    if is_forced or not others or any(kind not in SUPERVISED for kind in head.groups):
        return list(pools)
    host = max(others, key=lambda pool: _free_cpus(plan, pool, shapes))
    together = _Pool(needs=host.needs, gpu_type=host.gpu_type, groups=_in_order(plan, {**host.groups, **head.groups}))
    return [together, *(pool for pool in others if pool is not host)]


def _free_cpus(plan: RunPlan, pool: _Pool, shapes: NodeShapes) -> int:
    """CPUs that the pool's nodes have beyond what its tasks ask for."""
    shape = _shape(plan, pool.needs.partition, shapes)
    placed = _place(plan, pool.groups, shape, role="component", max_nodes=None)
    used = sum(group.count * shape.whole_cores(group.scheduling.cpu) for group in pool.groups.values())
    return placed.num_nodes * shape.cpus - used


def _time_limit(plan: RunPlan, groups: Mapping[WorkerKind, TasksGroup]) -> str | None:
    """The time limit of an allocation; a group's own counts before that of launch."""
    own = {kind: group.scheduling.time_limit for kind, group in groups.items()}
    values = {value: kind for kind, value in own.items() if value is not None}
    if len(values) > 1:
        raise ConfigError.of(
            f"groups that start and end together ask for time_limit {', '.join(values)}",
            hint="set launch.time_limit only",
            path=("groups", list(values.values())[-1], "scheduling", "time_limit"),
        )
    return next(iter(values), plan.launch.time_limit)


def _place_pool(
    plan: RunPlan, pool: _Pool, role: AllocationRole, number: int, shapes: NodeShapes, max_nodes: int | None
) -> tuple[Allocation, dict[str, Step]]:
    shape = _shape(plan, pool.needs.partition, shapes)
    placement = _place(plan, pool.groups, shape, role=role, max_nodes=max_nodes)
    steps: dict[str, Step] = {}
    for placed, (node, gpus) in placement.slots.items():
        kind, index = parse_worker_id(placed)
        task = pool.groups[kind].scheduling
        steps[worker_id(kind, index + (pool.elastic_index or 0))] = Step(
            allocation=number,
            node_index=node,
            cpus=shape.whole_cores(task.cpu),
            mem_mb=task.mem if shape.memory.is_counted else 0,
            gpus=task.gpu,
            gpu_indices=gpus,
            gpu_binding=(task.gpu_binding or "per_task") if task.gpu else "none",
        )
    steps = _one_binding_per_node(steps, pool.groups)
    on_nodes = [[step for step in steps.values() if step.node_index == node] for node in range(placement.num_nodes)]
    asked = {**pool.needs.model_dump(), "time_limit": _time_limit(plan, pool.groups)}
    tasks = [group.scheduling for group in pool.groups.values()]
    # Other jobs are asked for once the head has begun.
    of_trial = [one for one in plan.launch.extra_sbatch_arguments if role == "head" or not one.startswith("--be")]
    extra = chain(of_trial, *(task.extra_sbatch_arguments for task in tasks))
    slack_cpus, slack_mem_mb = (shape.whole_cores(SLACK_CPUS), SLACK_MEM_MB) if role == "head" else (0, 0)
    cpus = max(sum(step.cpus for step in node) for node in on_nodes) + slack_cpus
    mem_mb = max(sum(step.mem_mb for step in node) for node in on_nodes) + slack_mem_mb
    mem_mb = mem_mb if shape.memory.is_counted else 0
    allocation = Allocation(
        name="head" if role == "head" else next(iter(steps if role == "elastic" else pool.groups)),
        role=role,
        num_nodes=placement.num_nodes,
        cpus_per_node=shape.whole_cores(shape.memory.cpus(cpus, mem_mb)),
        mem_mb_per_node=mem_mb,
        gpus_per_node=max(sum(step.gpus for step in node) for node in on_nodes),
        gpu_type=pool.gpu_type,
        options={name: value for name, value in asked.items() if value is not None},
        extra_arguments=tuple(dict.fromkeys(extra)),
        memory=shape.memory,
    )
    return allocation, steps


def _place(
    plan: RunPlan,
    groups: Mapping[WorkerKind, TasksGroup],
    shape: NodeShape,
    *,
    role: AllocationRole,
    max_nodes: int | None,
) -> Placement:
    if max_nodes is not None and max_nodes < 1:
        raise UnsatisfiableError.of(
            f"trial can never start: {', '.join(groups)} need nodes of their own, and the other groups use all of "
            f"cluster.max_nodes={plan.cluster.max_nodes}",
            hint="raise cluster.max_nodes, or let all groups share an allocation",
            path=("cluster", "max_nodes"),
        )
    return place_groups(groups, shape, has_slack=role == "head", max_nodes=max_nodes)


def _shape(plan: RunPlan, partition: str | None, shapes: NodeShapes) -> NodeShape:
    # A list of partitions means the first that can start; the first stands for all.
    return plan.cluster.node_shape(shapes.get(partition.split(",")[0] if partition else None))


def _one_binding_per_node(steps: dict[str, Step], groups: Mapping[WorkerKind, TasksGroup]) -> dict[str, Step]:
    """Where one worker's GPUs are cut out of the node's, all are: SLURM counts those of overlapping steps as free.

    So are those of training ranks on one node, unless their group says otherwise: a device cgroup of its own hides the
    GPU of each from the others, and NCCL would go through host memory or fail (NVIDIA/nccl issue 1066).
    """
    sliced = {step.node_index for step in steps.values() if step.gpu_binding == "slice"}
    if (gang := groups.get(_GANG)) is not None and gang.scheduling.gpu_binding is None:
        gpu_ranks = [step for worker, step in steps.items() if step.gpus and parse_worker_id(worker)[0] == _GANG]
        ranks = Counter(step.node_index for step in gpu_ranks)
        sliced |= {node for node, count in ranks.items() if count > 1}
    return {
        worker: msgspec.structs.replace(step, gpu_binding="slice") if step.gpus and step.node_index in sliced else step
        for worker, step in steps.items()
    }


def _elastic_pools(plan: RunPlan) -> list[_Pool]:
    """One for each worker that has a job of its own."""
    return [
        _pool_of(plan, {kind: TasksGroup(count=1, scheduling=group.elastic.scheduling)}, elastic_index=index)
        for kind, group in plan.scheduling.items()
        if group.elastic is not None
        for index in range(group.count, group.total_count)
    ]
