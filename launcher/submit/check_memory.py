"""Whether each GPU can hold what the plan gives it, and the nearest thing to change where it cannot.

    GpuUse ──usable_bytes──► too much? ─► nearest_layout of the same or more GPUs ──┐
                                      └─► fewer tokens of a micro-batch or cache ───┴─► problem: role, part, bytes, hint

Parameters, gradients, optimizer state and caches are known to the byte; activations and buffers are estimates. On a
cluster that is only imagined all of it decides: that is the question asked. A real submission is refused only for what
is certain, and warned of the rest: an estimate must not keep a trial from running that would have run.
"""

import bisect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from corral.experiments.checks.generation import check_allocation, check_heads
from corral.experiments.checks.training import check_layouts
from corral.experiments.errors import ConfigError, ConfigProblem
from corral.experiments.plan import RunPlan
from corral.experiments.worker_specs import GenerationServerSpec
from corral.launcher.submit.memory_plan import (
    RECOMPUTE_FULL,
    GpuUse,
    TrainingMemory,
    gpu_uses,
    longest_answer,
    models_alone,
    server_uses,
)
from corral.scheduling.allocation import EVERY_ROLE, Allocation, RoleGroup, parse_allocation
from corral.scheduling.memory.gpu import ANSWER, GIB, MIB, Peak, gpu_bytes_for, usable_bytes
from corral.scheduling.model_function_call import ModelName, parse_model_name
from corral.scheduling.parallel import Mesh, ParallelDims, nearest_layout
from corral.scheduling.worker_information import fold_numbers

# Where nobody says how many GPUs there are: times as many as now, but not beyond what is looked through in seconds.
_MAX_GROWTH, _MAX_LOOKED_THROUGH = 16, 128
_LEAST_TOKENS = 256  # a budget that holds no answer is no way out
_TOKENS_STEP = 64


def check_memory(plan: RunPlan, *, is_estimate_enough: bool = False) -> list[str]:
    """Compares the memory of every GPU, which the plan's cluster says, with what it has to hold.

    Args:
        is_estimate_enough: whether to refuse what is only estimated to be too much.

    Returns:
        Warnings of what is likely too much.

    Raises:
        ConfigError: naming who has too much and what of it is largest, with the nearest layout that fits.
    """
    checks = _Checks(plan=plan, uses=gpu_uses(plan), gpu_bytes=(plan.cluster.gpu_memory or 0) * MIB)
    refused: list[ConfigProblem] = []
    warned: list[ConfigProblem] = []
    for use in checks.uses:
        if use.peak is not None and not checks.fits(use.peak):
            is_certain = use.peak.certain > checks.gpu_bytes
            (refused if is_certain or is_estimate_enough else warned).append(checks.problem(use, use.peak))
    if refused:
        raise ConfigError(refused)
    return [f"{problem.message} ({problem.note}); {problem.hint}" for problem in warned]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checks:
    """A plan beside the GPUs that there are."""

    plan: RunPlan
    uses: Sequence[GpuUse]
    gpu_bytes: int

    def problem(self, use: GpuUse, peak: Peak) -> ConfigProblem:
        """What is too much where, and what would not be."""
        model, part = peak.largest
        size = peak.parts_by_model[model][part]
        layouts = ", ".join(dict.fromkeys(dims.short for dims in use.dims_by_model.values()))
        message = (
            f"{', '.join(use.dims_by_model)} cannot fit: {use.kind} {fold_numbers(use.workers)} ({layouts}) need "
            f"{show_bytes(peak.total)} of each GPU, and {show_bytes(usable_bytes(self.gpu_bytes))} of its "
            f"{show_bytes(self.gpu_bytes)} are usable"
        )
        hints = list(self._training_hints(use) if use.kind == "model_worker" else self._server_hints())
        least = f"GPUs of {show_bytes(gpu_bytes_for(peak.total))} would hold it as it is"
        return ConfigProblem(
            message=message,
            hint="; or ".join(hints) if hints else f"no layout that this version runs fits; {least}",
            path=("allocation",),
            note=f"the largest part: {part} of {model}, {show_bytes(size)}"
            + ("" if peak.call == ANSWER else f", in {peak.call}"),
        )

    def _allocation_text(self) -> str:
        return str(self.plan.config.get("allocation", ""))

    def fits(self, peak: Peak | None) -> bool:
        return peak is not None and peak.total <= usable_bytes(self.gpu_bytes)

    def _max_gpus(self, *uses: GpuUse) -> int:
        """How many GPUs these workers could have."""
        cluster, now = self.plan.cluster, sum(use.num_gpus for use in uses)
        others = sum(other.num_gpus for other in self.uses if not any(other is use for use in uses))
        if cluster.max_nodes is None or cluster.gpus_per_node is None:
            return max(2 * now, min(_MAX_GROWTH * now, _MAX_LOOKED_THROUGH))
        return cluster.max_nodes * cluster.gpus_per_node - others

    def _on_one_node(self, dims: ParallelDims) -> bool:
        """Whether ranks that share layers or rows of tokens, which talk most, can be of one node."""
        gpus_per_node = self.plan.cluster.gpus_per_node
        return gpus_per_node is None or gpus_per_node % (dims.tp * dims.cp) == 0

    def _training_hints(self, use: GpuUse) -> Iterator[str]:
        memory = TrainingMemory(plan=self.plan, roles=self.plan.roles)
        names = [parse_model_name(name) for name in use.dims_by_model]
        meshes = self.plan.master.step_plan.meshes
        fixed = {name: meshes[name].dims for name in names}
        mesh = models_alone(meshes, names)
        found = None if mesh is None else self._nearest_for(use, memory, names, mesh)
        if found is not None:
            yield f"allocation {found} fits"
        trained = " and ".join(name.role for name in names if memory.roles[name].optimizer is not None)
        lighter = dict(memory.lighter())
        enough = next((one for one, changed in lighter.items() if self.fits(changed.peak(names, fixed))), None)
        if enough is not None:
            yield f"{enough} of {trained} fits this layout"
        elif mesh is not None and found is None and RECOMPUTE_FULL in lighter:
            if with_less := self._nearest_for(use, lighter[RECOMPUTE_FULL], names, mesh):
                yield f"allocation {with_less} with {RECOMPUTE_FULL} of {trained} fits"
        largest = self._largest_tokens(lambda tokens: self.fits(memory.peak(names, fixed, max_tokens=tokens)), names)
        if largest:
            yield f"max_tokens_per_micro_batch {largest} fits this layout"

    def _nearest_for(self, use: GpuUse, memory: TrainingMemory, names: Sequence[ModelName], mesh: Mesh) -> str | None:
        """The allocation with the nearest layout of these models that fits."""
        allocation = parse_allocation(self._allocation_text())
        group = _group_on(allocation, mesh)
        if group is None:
            return None
        named = [role for one in allocation.training for role in one.roles if role != EVERY_ROLE]
        models = {name.role: memory.config_of(name) for name in names}

        def may_run(dims: ParallelDims) -> bool:
            if dims.dp > self.plan.master.train_batch_size or not self._on_one_node(dims):
                return False
            changed = _with_layout(allocation, group, dims)
            layout = Mesh(ranks=tuple(range(dims.world_size)), dims=dims)
            problems = check_allocation(changed, roles=named, generates=allocation.generation is not None)
            problems += check_layouts(changed, dict.fromkeys(models, layout), models)
            return all(problem.is_of_running for problem in problems)

        found = nearest_layout(
            mesh.dims,
            max_gpus=self._max_gpus(use),
            may_run=may_run,
            fits=lambda dims: self.fits(memory.peak(names, dict.fromkeys(names, dims))),
            spreads_experts=memory.has_experts(names),
        )
        return None if found is None else _short(_with_layout(allocation, group, found))

    def _largest_tokens(self, fits: Callable[[int], bool], names: Sequence[ModelName]) -> int | None:
        """The largest budget of tokens that fits, in steps; None if none does that holds the longest answer."""
        calls = [call for call in self.plan.master.calls if call.model_name in names]
        most = max((call.micro_batches.max_tokens_per_micro_batch or 0 for call in calls), default=0)
        return _largest(most, fits, least=max(_LEAST_TOKENS, longest_answer(self.plan) or 0))

    def _server_hints(self) -> Iterator[str]:
        allocation = parse_allocation(self._allocation_text())
        assert allocation.generation is not None
        generation, servers = allocation.generation, self.plan.all_of(GenerationServerSpec)

        def may_run(dims: ParallelDims) -> bool:
            is_built = dims.pp == 1 and (generation.backend == "sglang" or dims.tp == 1)
            heads = (
                check_heads(server.initial_weights, server.sglang.flags, gpus_per_server=dims.tp) for server in servers
            )
            return is_built and self._on_one_node(dims) and not any(itertools.chain(*heads))

        def fits(**changed: int) -> bool:
            return all(self.fits(use.peak) for use in server_uses(self.plan, **changed))

        found = nearest_layout(
            generation.dims,
            max_gpus=self._max_gpus(*(use for use in self.uses if use.kind == "generation_server")),
            may_run=may_run,
            fits=lambda dims: fits(num_gpus=dims.tp),
        )
        if found is not None:
            yield f"{generation.backend}:{found.short} in the allocation fits"
        tokens = _largest(servers[0].engine.max_total_tokens or 0, lambda tokens: fits(max_total_tokens=tokens))
        if tokens:
            yield f"engine.max_total_tokens {tokens} fits this layout"


def _largest(most: int, fits: Callable[[int], bool], *, least: int = _LEAST_TOKENS) -> int | None:
    """The largest multiple of a step from `least` to `most` that fits."""
    sizes = range(-(-least // _TOKENS_STEP) * _TOKENS_STEP, most + 1, _TOKENS_STEP)
    num_fitting = bisect.bisect_left(sizes, True, key=lambda size: not fits(size)) if len(sizes) > 1 else 0
    return sizes[num_fitting - 1] if num_fitting else None


def _group_on(allocation: Allocation, mesh: Mesh) -> RoleGroup | None:
    """The only role group on exactly these ranks; None if several are, or if an experiment's own code sets them."""
    meshes = allocation.meshes(group.roles[0] for group in allocation.training)
    groups = [group for group in allocation.training if meshes[group.roles[0]] == mesh]
    return groups[0] if len(groups) == 1 else None


def _with_layout(allocation: Allocation, group: RoleGroup, dims: ParallelDims) -> Allocation:
    changed = replace(group, engine=replace(group.engine, dims=dims))
    return replace(allocation, training=tuple(changed if one == group else one for one in allocation.training))


def _short(allocation: Allocation) -> str:
    """As one would write it: sizes of 1 left out, but for d."""
    return re.sub(r"(?<=[0-9])[tpc]1(?![0-9])", "", str(allocation))


def show_bytes(size: int) -> str:
    """'74.0 GiB'; megabytes below one of these."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
