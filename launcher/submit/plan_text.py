"""RunPlan -> one screen of text for people: how many steps, what runs on which nodes, what a step does.

The tables of the step itself are made in dataflow_text.py.
"""

from collections.abc import Iterator, Sequence

from corral.experiments.config.control import TrainControl
from corral.experiments.errors import display_path
from corral.experiments.plan import RunPlan
from corral.experiments.worker_specs import GenerationServerSpec, ModelWorkerSpec, RolloutWorkerSpec
from corral.launcher.submit.dataflow_text import answers_per_prompt, render_dataflow
from corral.scheduling.scheduling import TasksGroup

THIS_MACHINE = ("nodes      this machine",)


def render_plan(plan: RunPlan, *, nodes: Sequence[str] = THIS_MACHINE) -> str:
    """The summary that `rl-submit --dry-run` prints; no secrets are in a plan.

    Args:
        nodes: what runs where, as lines; the launcher's `render_layout` makes them.
    """
    return "\n".join([*_heading(plan), "", *_groups(plan), "", *nodes, "", *render_dataflow(plan)])


def _heading(plan: RunPlan) -> Iterator[str]:
    master, kind = plan.master, plan.config.get("experiment")
    yield f"trial      {plan.trial.experiment}/{plan.trial.trial}   ({kind}, {plan.mode}, seed {plan.seed})"
    yield f"folder     {display_path(plan.trial.directory)}"
    yield f"data       {_data(plan)}"
    yield f"steps      {_steps(plan)}"
    yield from _generation(plan)
    if master.source == "trajectories":
        yield f"staleness  eta {master.max_head_offpolicyness}: no token is trained on that is older by more versions"
    yield f"commits    {_commits(master.control)}"
    yield from _evaluation(plan)


def _steps(plan: RunPlan) -> str:
    """'12 of 7 prompts = 28 answers, 6 per epoch; 80 of 2 x 40 prompts, the last step has 3'"""
    master, steps, answers = plan.master, plan.total_steps, answers_per_prompt(plan)
    batch, unit, epochs = master.train_batch_size, master.sample_unit, master.control.total_train_epochs
    in_all = master.num_prompts * epochs
    consumed = min(steps * batch, in_all)
    in_answers = "" if answers is None else f" = {batch * answers} answers"
    per_epoch = f", {master.num_prompts / batch:.4g} per epoch" if epochs > 1 else ""
    end = "" if consumed == in_all else " (control.max_steps ends it early)"
    last = f"; the last step has {consumed % batch}" if consumed % batch else ""
    return f"{steps} of {batch} {unit}{in_answers}{per_epoch}; {consumed} of {epochs} x {master.num_prompts}{end}{last}"


def _generation(plan: RunPlan) -> Iterator[str]:
    """'generate   4 servers of SGLang, 2 GPUs each, float32; /site/sglang/bin/python', and what of memory one takes.

    Nothing where the graph generates, or no call does.
    """
    servers = [worker for worker in plan.workers if isinstance(worker, GenerationServerSpec)]
    if not servers:
        return
    count = f"{len(servers)} server{'s' if len(servers) > 1 else ''}"
    first = servers[0]
    if first.backend == "hf":
        rounding = f", weights rounded to {first.engine.quantization}" if first.engine.quantization else ""
        yield f"generate   {count} of the embedded engine, {first.engine.dtype}{rounding}"
    else:
        assert first.sglang.python is not None
        size = _size(plan, first)
        yield f"generate   {count} of SGLang{size}, {first.engine.dtype}; {display_path(first.sglang.python)}"
    if first.memory_mb:
        yield f"memory     {_memory_of_server(plan, first)}"


def _memory_of_server(plan: RunPlan, server: GenerationServerSpec) -> str:
    """'of its 60 GiB a server takes at least 28.7 GiB: 400 MiB for its processes + 28.3 GiB for 2 versions ...'"""
    asked = _memory(plan.scheduling["generation_server"].scheduling_of(server.index).mem)
    parts = " + ".join(f"{_memory(size_mb)} for {what}" for what, size_mb in server.memory_mb.items())
    return f"of its {asked} a server takes at least {_memory(sum(server.memory_mb.values()))}: {parts}"


def _size(plan: RunPlan, server: GenerationServerSpec) -> str:
    """What a server is that is more than one process."""
    ranks = server.tensor_parallel_size
    if ranks == 1:
        return ""
    on = "GPUs" if plan.scheduling["generation_server"].scheduling.gpu else "processes without a GPU"
    return f", {ranks} {on} each"


def _commits(control: TrainControl) -> str:
    exports = "at the end" if control.save_frequency.is_never else f"{control.save_frequency} and at the end"
    return f"{control.commit_frequency}, {control.keep_commits} are kept; weights that stay: {exports}"


def _evaluation(plan: RunPlan) -> Iterator[str]:
    """Of each call that looks at held-out problems."""
    every, step = plan.master.evaluate_every, plan.master.step_plan
    worker = next(worker for worker in plan.workers if isinstance(worker, ModelWorkerSpec))
    if worker.evaluation is None:
        return
    between = "" if every.is_never else f"{every}, "
    for call in step.graph.evaluate_calls:
        share = call.n_seqs / step.mesh(call).dims.dp
        yield (
            f"held-out   {display_path(worker.evaluation.dataset.path)}   {call.implementation}, {call.n_seqs} at a "
            f"time, {share:.4g} per dp rank of {call.model_name}; before the first step, {between}after the last"
        )


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
