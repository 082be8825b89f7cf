"""RunPlan -> what a train step does, as tables: the models, the calls, the keys that move, the weights that move.

MODEL  TRAINED BY  PARAMETERS  SHARDS ON MODEL WORKERS who holds which part of what, and what of it is trained
CALL   PROMPTS     PER DP RANK    CAN RUN BESIDE       what runs on how much, and next to what
FROM   KEYS        TO                                  who gives what to whom, weights included
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from corral.experiments.errors import display_path
from corral.experiments.plan import RunPlan
from corral.experiments.worker_specs import ModelRoleSpec, ModelWorkerSpec
from corral.scheduling.mesh import Mesh
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, OffloadHook
from corral.scheduling.step_plan import Route, StepPlan, describe_shards
from corral.scheduling.worker_numbers import fold_numbers


def render_dataflow(plan: RunPlan) -> Iterator[str]:
    """The part of `rl-submit --dry-run` that is about one train step."""
    step = plan.master.step_plan
    roles = _roles(plan)
    yield from _table(_models(step, roles))
    yield ""
    yield from _table(_calls(plan, step, roles))
    yield ""
    yield from _table([("FROM", "KEYS", "TO"), *_keys(step), *_weights(step, plan.master.weights_go_to)])


def answers_per_prompt(plan: RunPlan) -> int | None:
    """Answers that are sampled for a prompt; None where rows bring their own."""
    return next((role.ppo.group_size for role in _roles(plan).values() if role.ppo is not None), None)


def _roles(plan: RunPlan) -> Mapping[ModelName, ModelRoleSpec]:
    """Every model that is held, whichever rank holds a part of it."""
    workers = [worker for worker in plan.workers if isinstance(worker, ModelWorkerSpec)]
    return {role.model_name: role for worker in workers for role in worker.roles}


def _models(step: StepPlan, roles: Mapping[ModelName, ModelRoleSpec]) -> Iterator[Sequence[str]]:
    yield "MODEL", "TRAINED BY", "DTYPE", "PARAMETERS", "SHARDS ON MODEL WORKERS", "WEIGHTS"
    for name, mesh in step.meshes.items():
        role = roles[name]
        shards, path = describe_shards(name, mesh), display_path(role.model.path)
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
        goes = step.goes(call)
        share = _per_rank(goes[0], step.mesh(call), answers_per_prompt(plan))
        updates = _updates(call, roles[call.model_name], num_goes=len(goes))
        row = [call.name, str(call.model_name), call.call_type, _goes(goes), share, _micro_batch(call), updates]
        yield [*row, ", ".join(beside[call.name]) or "-"] if has_beside else row


def _goes(goes: Sequence[int]) -> str:
    """(3, 3, 2) -> "2 x 3 + 2"."""
    whole = [size for size in goes if size == goes[0]]
    first = f"{len(whole)} x {goes[0]}" if len(whole) > 1 else str(goes[0])
    return " + ".join([first, *map(str, goes[len(whole) :])])


def _per_rank(samples: int, mesh: Mesh, answers: int | None) -> str:
    """The mean: samples are dealt by the work that they are, not by their number."""
    share = samples / mesh.dims.dp
    return f"{share:.4g}" if answers is None else f"{share:.4g}, {share * answers:.4g} answers"


def _micro_batch(call: ModelFunctionCall) -> str:
    tokens, least = call.micro_batches.max_tokens_per_micro_batch, call.micro_batches.n_min
    parts = [f"<= {tokens} tokens"] if tokens is not None else []
    return ", ".join([*parts, f">= {least} of them"] if least > 1 or not parts else parts)


def _updates(call: ModelFunctionCall, role: ModelRoleSpec, *, num_goes: int) -> str:
    if call.call_type is not CallType.TRAIN_STEP:
        return "-"
    mini_batches = role.ppo.updates_per_step if role.ppo is not None else 1
    if num_goes == 1:
        return str(mini_batches)
    return f"{num_goes} x {mini_batches} = {num_goes * mini_batches}"


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
        share = "weights" if route.eta == 1.0 else f"{route.eta:g} of its weights"
        yield _place(step, route.source), share, f"{target} {'before' if route.is_before else 'after'} {route.call}"
    for call in step.graph.calls:
        if any(isinstance(hook, OffloadHook) for hook in call.post_hooks):
            yield _place(step, call.model_name), "weights", f"host memory after {call.name}"


def _place(step: StepPlan, name: ModelName) -> str:
    return f"{name} ({fold_numbers(step.meshes[name].ranks)})"


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Columns two spaces apart; the last one is as long as it is."""
    lines = [list(map(str, row)) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]) - 1)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        yield "  ".join([*cells, line[-1]]).rstrip()
