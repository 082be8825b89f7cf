"""RunPlan, Layout -> the summary before a submission: number of steps, workers by node, calls of a step.

plan     hetjob: 2 components, 3 nodes (groups ask for different nodes: partition ...)
           head          2 x 9 CPUs, 4 GPUs, 33 GiB; partition h100, time 24:00:00
             n0          master_worker 0   generation_server 0 (GPUs 0-1)   model_worker 0-1 (GPUs 2-3)
             n1          model_worker 2-5 (GPUs 0-3)

MODEL  TRAINED BY  PARAMETERS  SHARDS ON MODEL WORKERS who holds which part of what, and what of it is trained
CALL   PROMPTS     PER DP RANK    CAN RUN BESIDE       what runs on how much, and next to what
FROM   KEYS        TO                                  who gives what to whom, weights included
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from corral.experiments.config.control import KEPT_COMMITS, TrainControl
from corral.experiments.datasets.formats import name_of
from corral.experiments.errors import display_path
from corral.experiments.plan import RunPlan
from corral.experiments.worker_specs import GenerationServerSpec, ModelRoleSpec, ModelWorkerSpec, RolloutWorkerSpec
from corral.launcher.layout.layout import Allocation, Layout, Step
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, OffloadHook
from corral.scheduling.parallel import Mesh
from corral.scheduling.step_plan import Route, StepPlan, describe_shards
from corral.scheduling.worker_information import fold_numbers, parse_worker_id

THIS_MACHINE = ("nodes      this machine",)


def render_plan(plan: RunPlan, *, nodes: Sequence[str] = THIS_MACHINE) -> str:
    """The summary that `rl-submit --dry-run` prints; no secrets are in a plan.

    Args:
        nodes: what runs where, as lines; the launcher's `render_layout` makes them.
    """
    return "\n".join(
        [*_heading(plan), "", *table(_groups(plan), has_numbers=True), "", *nodes, "", *render_dataflow(plan)]
    )


def _heading(plan: RunPlan) -> Iterator[str]:
    master, kind = plan.master, plan.config.get("experiment")
    yield f"trial      {plan.trial.experiment}/{plan.trial.trial}   ({kind}, {plan.mode}, seed {plan.seed})"
    yield f"folder     {display_path(plan.trial.directory)}"
    yield f"data       {_data(plan)}"
    yield from _environment(plan)
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
    servers = plan.all_of(GenerationServerSpec)
    if not servers:
        return
    count, first = count_of(len(servers), "server"), servers[0]
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
    return f"{control.commit_frequency}, {KEPT_COMMITS} are kept; weights that stay: {exports}"


def _evaluation(plan: RunPlan) -> Iterator[str]:
    """The evaluation of held-out rows, and its schedule."""
    every, step = plan.master.evaluate_every, plan.master.step_plan
    worker = plan.all_of(ModelWorkerSpec)[0]
    if worker.evaluation is None:
        return
    file, between = name_of(worker.evaluation.dataset), "" if every.is_never else f"{every}, "
    if plan.all_of(RolloutWorkerSpec):
        more = f" and {len(worker.evaluation.more)} more" if worker.evaluation.more else ""
        yield (
            f"held-out   {file}{more}   answered by generation servers, {worker.evaluation.batch_size} at a time; "
            f"before the first step, {between}after the last"
        )
    for call in step.graph.evaluate_calls:
        per_rank = call.n_seqs / step.mesh(call).dims.dp
        yield (
            f"held-out   {file}   {call.implementation}, {call.n_seqs} at a "
            f"time, {per_rank:.4g} per dp rank of {call.model_name}; before the first step, {between}after the last"
        )


def _environment(plan: RunPlan) -> Iterator[str]:
    """The environment, which plays and judges in place of an agent and a reward."""
    workers = plan.all_of(RolloutWorkerSpec)
    if workers and (spec := workers[0].environment) is not None and (config := workers[0].rollout.environment):
        versions = ", ".join(f"{name} {version}" for name, version in sorted(spec.packages.items()))
        yield f"plays      environment {config.id} ({versions}); {display_path(Path(str(config.python)))}"


def _data(plan: RunPlan) -> str:
    of_rollout = [worker.dataset for worker in plan.all_of(RolloutWorkerSpec)]
    for dataset in (*of_rollout, *(rank.dataset for rank in plan.all_of(ModelWorkerSpec))):
        if dataset is not None:
            return f"{name_of(dataset.config)}   {dataset.num_rows} rows, sha256 {dataset.sha256[:12]}"
    return "none"


def _groups(plan: RunPlan) -> Iterator[Sequence[object]]:
    counted = [(group.count, group.scheduling) for _, group in plan.scheduling.items()]
    yield "GROUP", "COUNT", "CPU", "GPU", "MEMORY"
    for kind, group in plan.scheduling.items():
        yield kind, group.count, group.scheduling.cpu, group.scheduling.gpu, _memory(group.scheduling.mem)
    cpus, gpus, mem_mb = (sum(count * getattr(task, it) for count, task in counted) for it in ("cpu", "gpu", "mem"))
    yield "all", sum(count for count, _ in counted), cpus, gpus, _memory(mem_mb)


def _memory(megabytes: int) -> str:
    return f"{megabytes / 1024:.4g} GiB" if megabytes >= 1024 else f"{megabytes} MiB"


def render_dataflow(plan: RunPlan) -> Iterator[str]:
    """The part of `rl-submit --dry-run` that is about one train step."""
    step = plan.master.step_plan
    roles = plan.roles
    yield from table(_models(step, roles))
    yield ""
    yield from table(_calls(plan, step, roles))
    yield ""
    yield from table([("FROM", "KEYS", "TO"), *_keys(step), *_weights(step, plan.master.weights_go_to)])


def answers_per_prompt(plan: RunPlan) -> int | None:
    """Answers that are sampled for a prompt; None where rows bring their own."""
    return next((role.ppo.group_size for role in plan.roles.values() if role.ppo is not None), None)


def _models(step: StepPlan, roles: Mapping[ModelName, ModelRoleSpec]) -> Iterator[Sequence[str]]:
    yield "MODEL", "TRAINED BY", "DTYPE", "PARAMETERS", "SHARDS ON MODEL WORKERS", "WEIGHTS"
    for name, mesh in step.meshes.items():
        role = roles[name]
        shards, path = describe_shards(mesh), display_path(role.model.path)
        yield str(name), _trained_by(role), role.model.dtype, _parameters(role), shards, path


def _trained_by(role: ModelRoleSpec) -> str:
    """'adamw in host memory, lr 2e-05, recompute full'."""
    if role.optimizer is None:
        return "-"
    place = " in host memory" if role.model.offload == "optimizer" else ""
    by = f"{role.optimizer.type}{place}, lr {role.optimizer.lr:g}"
    return by if role.recompute == "none" else f"{by}, recompute {role.recompute}"


def _parameters(role: ModelRoleSpec) -> str:
    """'11,264 trained (lora, rank 8), 518,000 frozen'; a question mark where the files do not say."""
    counts = role.num_parameters
    if counts is None:
        return "?"
    if role.lora is not None:
        return f"{counts.trained:,} trained (lora, rank {role.lora.rank}), {counts.frozen:,} frozen"
    return f"{counts.trained:,} trained" if role.optimizer is not None else f"{counts.frozen:,} not trained"


def _calls(plan: RunPlan, step: StepPlan, roles: Mapping[ModelName, ModelRoleSpec]) -> Iterator[Sequence[str]]:
    heading = ["CALL", "MODEL", "TYPE", plan.master.sample_unit.upper(), "PER DP RANK", "MICRO-BATCH", "UPDATES"]
    beside = {call.name: step.beside(call.name) for call in step.graph.step_calls}
    has_beside = any(beside.values())
    yield [*heading, "CAN RUN BESIDE"] if has_beside else heading
    for call in step.graph.step_calls:
        slices = step.slices(call)
        per_rank = _per_rank(slices[0], step.mesh(call), answers_per_prompt(plan))
        updates = _updates(call, roles[call.model_name], num_slices=len(slices))
        row = [call.name, str(call.model_name), call.call_type, _slices(slices), per_rank, _micro_batch(call), updates]
        yield [*row, ", ".join(beside[call.name]) or "-"] if has_beside else row


def _slices(slices: Sequence[int]) -> str:
    """(3, 3, 2) -> "2 x 3 + 2"."""
    whole = [size for size in slices if size == slices[0]]
    first = f"{len(whole)} x {slices[0]}" if len(whole) > 1 else str(slices[0])
    return " + ".join([first, *map(str, slices[len(whole) :])])


def _per_rank(samples: int, mesh: Mesh, answers: int | None) -> str:
    """The mean: samples are dealt by their work, not by their number."""
    mean = samples / mesh.dims.dp
    return f"{mean:.4g}" if answers is None else f"{mean:.4g}, {mean * answers:.4g} answers"


def _micro_batch(call: ModelFunctionCall) -> str:
    tokens, least = call.micro_batches.max_tokens_per_micro_batch, call.micro_batches.n_min
    parts = [f"<= {tokens} tokens"] if tokens is not None else []
    return ", ".join([*parts, f">= {least} of them"] if least > 1 or not parts else parts)


def _updates(call: ModelFunctionCall, role: ModelRoleSpec, *, num_slices: int) -> str:
    if call.call_type is not CallType.TRAIN_STEP:
        return "-"
    mini_batches = role.ppo.updates_per_step if role.ppo is not None else 1
    if num_slices == 1:
        return str(mini_batches)
    return f"{num_slices} x {mini_batches} = {num_slices * mini_batches}"


def _keys(step: StepPlan) -> Iterator[Sequence[str]]:
    for route in step.routes:
        source = f"{route.producer or 'samples'} ({fold_numbers(route.source)})"
        yield source, ", ".join(route.keys), _consumers(step, route)


def _consumers(step: StepPlan, route: Route) -> str:
    """By the ranks that read: "ref_inf, actor_train (0-1); values (2-3)"."""
    names_by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name in route.consumers:
        names_by_ranks.setdefault(step.mesh(step.graph.call(name)).ranks, []).append(name)
    return "; ".join(f"{', '.join(names)} ({fold_numbers(ranks)})" for ranks, names in names_by_ranks.items())


def _weights(step: StepPlan, published_to: str) -> Iterator[Sequence[str]]:
    for route in step.weight_routes:
        target = published_to if route.target is None else _place(step, route.target)
        if route.eta != 1.0:
            target += f", which keeps {1 - route.eta:g} of its own,"
        weights = "weights" if route.eta == 1.0 else f"{route.eta:g} of its weights"
        yield _place(step, route.source), weights, f"{target} {'before' if route.is_before else 'after'} {route.call}"
    for call in step.graph.calls:
        if any(isinstance(hook, OffloadHook) for hook in call.post_hooks):
            yield _place(step, call.model_name), "weights", f"host memory after {call.name}"


def _place(step: StepPlan, name: ModelName) -> str:
    return f"{name} ({fold_numbers(step.meshes[name].ranks)})"


def table(rows: Iterable[Sequence[object]], *, has_numbers: bool = False) -> Iterator[str]:
    """Columns two spaces apart; a row of one cell widens none.

    Args:
        has_numbers: all columns but the first stand to the right.
    """
    lines = [list(map(str, row)) for row in rows]
    columns = zip_longest(*(line for line in lines if len(line) > 1), fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    for first, *others in lines:
        cells = zip(others, widths[1:], strict=False)
        padded = [cell.rjust(width) if has_numbers else cell.ljust(width) for cell, width in cells]
        yield "  ".join([first.ljust(widths[0]) if widths else first, *padded]).rstrip()


_MAX_NODES_SHOWN = 8


def render_layout(layout: Layout) -> list[str]:
    """The lines that rl-submit prints for people."""
    nodes = sum(layout.allocations[index].num_nodes for index in layout.fixed)
    elastic = len(layout.allocations) - len(layout.fixed)
    components = len(layout.components)
    jobs = 1 + len(layout.fixed) - components
    parts = count_of(jobs, "job") + (f" of {components} components" if components > 1 else "")
    # Jobs that leave room on a node may share it.
    at_most = "up to " if jobs > 1 else ""
    heading = f"{layout.kind}: {parts}, {at_most}{count_of(nodes, 'node')}"
    heading += f", {count_of(elastic, 'elastic worker')}" if elastic else ""
    lines = [f"plan       {heading} ({layout.reason})"]
    for index, allocation in enumerate(layout.allocations):
        lines.append(f"  {allocation.name:<19}  {describe(allocation)}")
        if allocation.role != "elastic":
            lines += _nodes(layout, index)
    return lines


def count_of(number: int, what: str) -> str:
    """'1 node', '2 nodes'."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def describe(allocation: Allocation) -> str:
    """The request in words: '2 x 9 CPUs, 4 GPUs, 33 GiB; partition h100, time 24:00:00'."""
    values = {"partition": "(default)", "time_limit": "(default)", **allocation.options}
    where = ", ".join(f"{name.replace('_limit', '')} {value}" for name, value in values.items())
    return f"{allocation.num_nodes} x {request_per_node(allocation)}; {where}"


def request_per_node(allocation: Allocation) -> str:
    """The request per node in words: '9 CPUs, 4 h100 GPUs, 33 GiB'."""
    kind = f"{allocation.gpu_type} " if allocation.gpu_type else ""
    gpus = f", {allocation.gpus_per_node} {kind}GPUs" if allocation.gpus_per_node else ""
    memory = f", {_memory(allocation.mem_mb_per_node)}" if allocation.mem_mb_per_node else ""
    return f"{allocation.cpus_per_node} CPUs{gpus}{memory}"


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
    by_worker = [step.gpu_indices for step in steps if step.gpu_indices]
    if not by_worker:
        return ""
    if all(len(gpus) == 1 for gpus in by_worker):
        by_worker = [tuple(sorted(gpu for gpus in by_worker for gpu in gpus))]
    return f" (GPUs {' + '.join(fold_numbers(gpus) for gpus in by_worker)})"
