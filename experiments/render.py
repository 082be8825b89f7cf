"""RunPlan -> one screen of text for people: what runs, how many, on which nodes, for how many steps."""

from collections.abc import Iterator, Sequence

from corral.experiments.errors import display_path
from corral.experiments.plan import RunPlan
from corral.experiments.worker_specs import MasterWorkerSpec, ModelWorkerSpec, RolloutWorkerSpec
from corral.scheduling.dataflow import ModelFunctionCall
from corral.scheduling.placement import Placement, place
from corral.scheduling.scheduling import TasksGroup

_MAX_NODES_SHOWN = 8


def render_plan(plan: RunPlan, *, warnings: Sequence[str] = ()) -> str:
    """The summary that `rl-submit --dry-run` prints; no secrets are in a plan."""
    lines = [
        *_heading(plan),
        "",
        *_groups(plan),
        "",
        *_placement(plan),
        "",
        *_dataflow(plan.master.calls),
        *(f"warning: {warning}" for warning in warnings),
    ]
    return "\n".join(lines)


def _heading(plan: RunPlan) -> Iterator[str]:
    master, steps = plan.master, plan.total_steps
    kind = plan.config.get("experiment")
    yield f"trial      {plan.trial.experiment}/{plan.trial.trial}   ({kind}, {plan.mode}, seed {plan.seed})"
    yield f"folder     {display_path(plan.trial.directory)}"
    yield f"model      {display_path(master.initial_weights)}"
    yield f"data       {_data(plan)}"
    yield _steps(master, steps)
    if master.source == "trajectories":
        yield f"staleness  eta {master.max_head_offpolicyness}: no token is trained on that is older by more versions"


def _steps(master: MasterWorkerSpec, steps: int) -> str:
    unit = "rows" if master.source == "dataset" else "prompts"
    epochs = master.control.total_train_epochs
    in_all = master.num_prompts * epochs
    consumed = min(steps * master.train_batch_size, in_all)
    cut = "" if consumed == in_all else " (control.max_steps ends it early)"
    in_all_text = f"{epochs} x {master.num_prompts} {unit}"
    return f"steps      {steps} of {master.train_batch_size} {unit}; {consumed} of {in_all_text}{cut}"


def _data(plan: RunPlan) -> str:
    for worker in plan.workers:
        if isinstance(worker, RolloutWorkerSpec | ModelWorkerSpec) and worker.dataset is not None:
            dataset = worker.dataset
            return f"{display_path(dataset.config.path)}   {dataset.num_rows} rows, sha256 {dataset.sha256[:12]}"
    return "none"


def _groups(plan: RunPlan) -> Iterator[str]:
    yield f"{'GROUP':<18}  {'COUNT':>5}  {'CPU':>4}  {'GPU':>4}  {'MEMORY':>8}"
    for kind, group in plan.scheduling.items():
        task = group.scheduling
        yield f"{kind:<18}  {group.count:>5}  {task.cpu:>4}  {task.gpu:>4}  {_memory(task.mem):>8}"
    groups = [group for _, group in plan.scheduling.items()]
    cpus, gpus, memory = _total(groups, "cpu"), _total(groups, "gpu"), _memory(_total(groups, "mem"))
    yield f"{'all':<18}  {plan.scheduling.num_tasks:>5}  {cpus:>4}  {gpus:>4}  {memory:>8}"


def _total(groups: Sequence[TasksGroup], field: str) -> int:
    return sum(group.count * int(getattr(group.scheduling, field)) for group in groups)


def _memory(megabytes: int) -> str:
    return f"{megabytes / 1024:.4g} GiB" if megabytes >= 1024 else f"{megabytes} MiB"


def _placement(plan: RunPlan) -> Iterator[str]:
    if plan.mode == "local":
        yield "nodes      this machine"
        return
    cluster = plan.cluster
    shape = cluster.node_shape()
    placement = place(plan.scheduling, shape, max_nodes=cluster.max_nodes)
    where = f"partition {plan.launch.partition or '(default)'}, time {plan.launch.time_limit or '(default)'}"
    yield f"nodes      {placement.num_nodes} x {shape.cpus} CPUs, {shape.gpus} GPUs, {_memory(shape.mem_mb)}; {where}"
    for node in range(min(placement.num_nodes, _MAX_NODES_SHOWN)):
        yield f"  n{node:<8} {_tasks_on(placement, node)}"
    if placement.num_nodes > _MAX_NODES_SHOWN:
        yield f"  and {placement.num_nodes - _MAX_NODES_SHOWN} more nodes"


def _tasks_on(placement: Placement, node: int) -> str:
    indices_by_kind: dict[str, list[int]] = {}
    for unit in placement.units:
        for offset, where in enumerate(unit.nodes):
            if where == node:
                indices_by_kind.setdefault(unit.kind, []).append(unit.first_index + offset)
    return "   ".join(f"{kind} {_ranges(indices)}" for kind, indices in indices_by_kind.items())


def _ranges(indices: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and parts[-1][-1] == index - 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _dataflow(calls: Sequence[ModelFunctionCall]) -> Iterator[str]:
    yield "dataflow"
    for call in calls:
        made = ", ".join(call.output_keys) or "statistics"
        yield f"  {call.name:<12} {call.role} {call.call_type.value}: {', '.join(call.input_keys)} -> {made}"
