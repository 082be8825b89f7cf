"""RunPlan -> one screen of text for people: what runs, how many, on which nodes, for how many steps."""

from collections.abc import Iterator, Sequence

from corral.experiments.errors import display_path
from corral.experiments.plan import RunPlan
from corral.experiments.worker_specs import MasterWorkerSpec, ModelWorkerSpec, RolloutWorkerSpec
from corral.scheduling.model_function_call import ModelFunctionCall
from corral.scheduling.scheduling import TasksGroup

THIS_MACHINE = ("nodes      this machine",)


def render_plan(plan: RunPlan, *, nodes: Sequence[str] = THIS_MACHINE) -> str:
    """The summary that `rl-submit --dry-run` prints; no secrets are in a plan.

    Args:
        nodes: what runs where, as lines; the launcher's `render_layout` makes them.
    """
    return "\n".join([*_heading(plan), "", *_groups(plan), "", *nodes, "", *_dataflow(plan.master.calls)])


def _heading(plan: RunPlan) -> Iterator[str]:
    master, steps = plan.master, plan.total_steps
    kind = plan.config.get("experiment")
    yield f"trial      {plan.trial.experiment}/{plan.trial.trial}   ({kind}, {plan.mode}, seed {plan.seed})"
    yield f"folder     {display_path(plan.trial.directory)}"
    yield f"model      {display_path(master.initial_weights[master.published_role])}"
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


def _dataflow(calls: Sequence[ModelFunctionCall]) -> Iterator[str]:
    yield "dataflow"
    for call in calls:
        made = ", ".join(call.output_keys) or "statistics"
        yield f"  {call.name:<12} {call.role} {call.call_type.value}: {', '.join(call.input_keys)} -> {made}"
