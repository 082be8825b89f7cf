"""Layout `packed`: placement on nodes becomes one allocation, and one step per worker inside it.

groups + shape of a node --place--> node index of every worker --> nodes x (cpus, memory, GPUs) to ask for
"""

from collections.abc import Mapping
from dataclasses import dataclass

from corral.experiments.errors import ConfigError
from corral.experiments.plan import RunPlan
from corral.launcher.srun import StepResources
from corral.scheduling.placement import SLACK_CPUS, SLACK_MEM_MB, Placement, place

# Set for the whole allocation: in `launch`, or alike in the groups' scheduling.
ALLOCATION_FIELDS = (
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "nodelist",
    "exclude",
    "time_limit",
    "begin",
    "deadline",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """What to ask SLURM for, and where each worker goes in it."""

    num_nodes: int
    cpus_per_node: int
    mem_mb_per_node: int
    gpus_per_node: int
    gpu_type: str | None
    allocation: Mapping[str, str]
    """Values of ALLOCATION_FIELDS that are set."""
    extra_arguments: tuple[str, ...]
    resources_by_worker: Mapping[str, StepResources]
    placement: Placement


def pack(plan: RunPlan) -> PackedLayout:
    """One allocation for the whole trial.

    Raises:
        ConfigError: if a group fits no node, or groups ask for different kinds of allocation.
    """
    try:
        placement = place(plan.scheduling, plan.cluster.node_shape(), max_nodes=plan.cluster.max_nodes)
    except ValueError as error:
        raise ConfigError.of(
            f"trial can never start: {error}",
            hint="a node's shape is cluster.cpus_per_node, cluster.mem_per_node and cluster.gpus_per_node",
        ) from error
    resources_by_worker: dict[str, StepResources] = {}
    for unit in placement.units:
        task = plan.scheduling[unit.kind].scheduling
        for offset, node_index in enumerate(unit.nodes):
            resources_by_worker[f"{unit.kind}/{unit.first_index + offset}"] = StepResources(
                node_index=node_index, cpus=task.cpu, mem_mb=task.mem, gpus=task.gpu
            )
    used = [
        [step for step in resources_by_worker.values() if step.node_index == node]
        for node in range(placement.num_nodes)
    ]
    return PackedLayout(
        num_nodes=placement.num_nodes,
        cpus_per_node=max(sum(step.cpus for step in steps) for steps in used) + SLACK_CPUS,
        mem_mb_per_node=max(sum(step.mem_mb for step in steps) for steps in used) + SLACK_MEM_MB,
        gpus_per_node=max(sum(step.gpus for step in steps) for steps in used),
        gpu_type=_one_gpu_type(plan),
        allocation=_allocation_values(plan),
        extra_arguments=_extra_arguments(plan),
        resources_by_worker=resources_by_worker,
        placement=placement,
    )


def _allocation_values(plan: RunPlan) -> dict[str, str]:
    values: dict[str, str] = {}
    for field in ALLOCATION_FIELDS:
        asked = {kind: getattr(group.scheduling, field) for kind, group in plan.scheduling.items()}
        launch = getattr(plan.launch, field)
        different = {value for value in (launch, *asked.values()) if value is not None}
        if len(different) > 1:
            raise ConfigError.of(
                f"layout packed is one allocation, but {field} is asked for as {', '.join(sorted(different))}",
                hint=f"set launch.{field} only",
                path=("launch", field),
                shown=launch or "null",
            )
        if different:
            values[field] = different.pop()
    return values


def _one_gpu_type(plan: RunPlan) -> str | None:
    types = {group.scheduling.gpu_type for _, group in plan.scheduling.items() if group.scheduling.gpu}
    if len(types) > 1:
        raise ConfigError.of(
            f"layout packed is one allocation, but groups ask for GPU types {', '.join(sorted(map(str, types)))}",
            hint="give every group that has GPUs the same gpu_type",
        )
    return types.pop() if types else None


def _extra_arguments(plan: RunPlan) -> tuple[str, ...]:
    of_groups = [
        argument for _, group in plan.scheduling.items() for argument in group.scheduling.extra_sbatch_arguments
    ]
    return tuple(dict.fromkeys([*plan.launch.extra_sbatch_arguments, *of_groups]))
