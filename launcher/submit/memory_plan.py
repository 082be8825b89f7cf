"""RunPlan -> the peak memory of every GPU of a trial -> one table for people.

    roles of a rank, calls of the step ─┐
    model directories (config.json) ────┼─► one GpuUse for all ranks that hold the same models in the same layouts
    servers, their engine ──────────────┘   one for the generation servers

Workers without a GPU hold all of this in host memory, and are left out. So is a model whose type is not known: its GPU
has no figures, and says why.

    GiB of one GPU                   params   grads   optim   activ   head   buffers    all
    ───────────────────────────────────────────────────────────────────────────────────────
    model_worker 0-31
      actor/0 d32                       3.8     3.8     7.6    36.4    2.0      17.0   70.7
      ref/0 d32                         3.8                                             3.8
      all, in actor_train                                                              74.5
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from corral.experiments.config.data import HELD_OUT_ANSWERS
from corral.experiments.config.model import ModelConfig, Recompute, TrainedModelConfig
from corral.experiments.inputs.decoder_config import decoder_sizes
from corral.experiments.inputs.parameters import ITEM_SIZES, adapted_layers
from corral.experiments.plan import RunPlan
from corral.experiments.worker_specs import GenerationServerSpec, ModelRoleSpec, ModelWorkerSpec, RolloutWorkerSpec
from corral.launcher.submit.plan_text import answers_per_prompt, table
from corral.scheduling.memory.decoder_sizes import DecoderSizes, tensor_shapes
from corral.scheduling.memory.gpu import (
    ANSWER,
    CONTEXT_BYTES,
    FRAGMENTATION,
    GIB,
    MIB,
    PARTS,
    CallOnGpu,
    ModelOnGpu,
    Part,
    Peak,
    peak_of,
    server_on_gpu,
    usable_bytes,
)
from corral.scheduling.memory.model import Adapters, CallKind, CallSizes, RoleModel
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, OffloadHook, PushWeightsHook
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.scheduling.worker_information import WorkerKind, fold_numbers

RECOMPUTE_FULL = "recompute full"
_HEADINGS: dict[Part, str] = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "head": "head",
    "KV cache": "KV",
    "buffers": "buffers",
}
_LIGHTER: tuple[tuple[str, Recompute, bool], ...] = (
    ("recompute selective", "selective", False),
    (RECOMPUTE_FULL, "full", False),
    ("offload optimizer", "none", True),
    (f"offload optimizer with {RECOMPUTE_FULL}", "full", True),
)
"""What to set, so that less is held: how much is computed again, and whether moments lie in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """GPUs that all hold the same."""

    kind: WorkerKind
    workers: tuple[int, ...]
    """Indices of the workers of that kind."""
    dims_by_model: Mapping[str, ParallelDims]
    peak: Peak | None
    """None if the models are not known."""
    unknown: tuple[str, ...] = ()
    """Models whose config.json does not say how large they are, or whose type is not known."""

    @property
    def num_gpus(self) -> int:
        """Of all these workers; a server may have several."""
        each = max(dims.tp for dims in self.dims_by_model.values()) if self.kind == "generation_server" else 1
        return each * len(self.workers)


def gpu_uses(plan: RunPlan) -> list[GpuUse]:
    """All GPUs of the trial; none where no worker asks for one."""
    with_gpus = {kind for kind, group in plan.scheduling.items() if group.scheduling.gpu}
    uses = TrainingMemory(plan=plan, roles=plan.roles).uses() if "model_worker" in with_gpus else []
    return [*uses, *server_uses(plan)] if "generation_server" in with_gpus else uses


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """The memory of training ranks, for the plan's layouts or for others."""

    plan: RunPlan
    roles: Mapping[ModelName, ModelRoleSpec]

    @cached_property
    def models(self) -> Mapping[ModelName, RoleModel | None]:
        """By name; None of a type that is not known."""
        calls = (call for worker in self.plan.all_of(ModelWorkerSpec) for call in worker.calls)
        hooks = (hook for call in calls for hook in call.post_hooks if isinstance(hook, PushWeightsHook))
        followers = {hook.target for hook in hooks if hook.eta < 1.0}
        return {name: _model_of(role, follows=name in followers) for name, role in self.roles.items()}

    def has_experts(self, names: Iterable[ModelName]) -> bool:
        """Whether experts of one of these models could be spread over ranks."""
        models = [self.models[name] for name in names]
        return any(model and model.backend == "megatron" and model.sizes.sparse_layers for model in models)

    def config_of(self, name: ModelName) -> ModelConfig:
        """What an experiment says of a model, as far as layouts may not suit it."""
        role = self.roles[name]
        if role.optimizer is None:
            return role.model
        return TrainedModelConfig(
            **dict(role.model), optimizer=role.optimizer, lora=role.lora, recompute=role.recompute
        )

    def lighter(self) -> "Iterator[tuple[str, TrainingMemory]]":
        """The same trial with less of what is trained on a GPU, and what to set for it; the least change first."""
        seen = [self.roles]
        for setting, recompute, hosts in _LIGHTER:
            roles = {name: _lighter(role, recompute, hosts=hosts) for name, role in self.roles.items()}
            if roles not in seen:
                seen.append(roles)
                yield setting, TrainingMemory(plan=self.plan, roles=roles)

    def uses(self) -> list[GpuUse]:
        """One for each set of models that some ranks hold."""
        meshes = self.plan.master.step_plan.meshes
        ranks_by_names: dict[tuple[ModelName, ...], list[int]] = {}
        for rank in range(self.plan.master.num_model_workers):
            names = tuple(name for name, mesh in meshes.items() if rank in mesh.ranks)
            ranks_by_names.setdefault(names, []).append(rank)
        return [
            GpuUse(
                kind="model_worker",
                workers=tuple(ranks),
                dims_by_model={str(name): meshes[name].dims for name in names},
                peak=self.peak(names, {name: meshes[name].dims for name in names}),
                unknown=tuple(str(name) for name in names if self.models[name] is None),
            )
            for names, ranks in ranks_by_names.items()
        ]

    def peak(
        self, names: Iterable[ModelName], dims: Mapping[ModelName, ParallelDims], *, max_tokens: int | None = None
    ) -> Peak | None:
        """The worst moment of a GPU that holds these models in these layouts; None if one of them is not known.

        Args:
            max_tokens: of every micro-batch, in place of what the calls say.
        """
        graph = self.plan.master.step_plan.graph
        calls = [call for call in (*graph.step_calls, *graph.evaluate_calls) if call.model_name in dims]
        held: list[ModelOnGpu] = []
        for name in names:
            model = self.models[name]
            if model is None:
                return None
            own = [call for call in calls if call.model_name == name]
            sizes = [self._sizes(call, dims[name], max_tokens) for call in own]
            held.append(model.on_gpu(str(name), dims[name], sizes))
        return peak_of(held, [_on_gpu(call) for call in calls])

    def _sizes(self, call: ModelFunctionCall, dims: ParallelDims, max_tokens: int | None) -> CallSizes:
        is_held_out = call.call_type is CallType.EVALUATE and call.implementation == HELD_OUT_ANSWERS
        if call.call_type is CallType.GENERATE or is_held_out:
            return self._generation_sizes(call, dims)
        kind: CallKind = "train" if call.call_type is CallType.TRAIN_STEP else "infer"
        limits = [call.micro_batches.max_tokens_per_micro_batch, max_tokens, self._most_tokens(call, dims)]
        return CallSizes(name=call.name, kind=kind, tokens=min((limit for limit in limits if limit), default=0))

    def _most_tokens(self, call: ModelFunctionCall, dims: ParallelDims) -> int | None:
        """Of a rank's shard of the batch, which may be less than a micro-batch may hold; None where nobody knows, as
        where an answer may be several sequences of many turns."""
        longest = longest_answer(self.plan)
        if longest is None or any(worker.rollout.makes_episodes for worker in self.plan.all_of(RolloutWorkerSpec)):
            return None
        # Samples are dealt by their lengths: a rank may get one more than the mean.
        return (call.n_seqs // dims.dp + 1) * (answers_per_prompt(self.plan) or 1) * longest

    def _generation_sizes(self, call: ModelFunctionCall, dims: ParallelDims) -> CallSizes:
        """As `workers/model/generator.py` makes its batch: the longest prompt and answer for each at a time."""
        spec = self.plan.all_of(ModelWorkerSpec)[0]
        running = -(-call.n_seqs // dims.dp)
        if call.call_type is CallType.GENERATE:
            assert spec.generation is not None
            running = min(spec.generation.max_running_requests, running * spec.generation.group_size)
            longest = longest_answer(self.plan) or 0
        else:
            assert spec.evaluation is not None
            longest = spec.evaluation.dataset.max_prompt_tokens + spec.evaluation.sampling.max_new_tokens
        return CallSizes(name=call.name, kind="generate", tokens=running * longest, sequences=running)


def _lighter(role: ModelRoleSpec, recompute: Recompute, *, hosts: bool) -> ModelRoleSpec:
    """A role that is trained, if its layers were computed again at least in so far, and its moments on the host."""
    if role.optimizer is None:
        return role
    offload = "optimizer" if hosts and role.backend == "fsdp" else role.model.offload
    return role.model_copy(
        update={
            "recompute": max(role.recompute, recompute, key=("none", "selective", "full").index),
            "model": role.model.model_copy(update={"offload": offload}),
        }
    )


def longest_answer(plan: RunPlan) -> int | None:
    """Tokens of the longest prompt with its answer; None where rows bring answers of their own."""
    for worker in plan.workers:
        if isinstance(worker, RolloutWorkerSpec):
            if worker.rollout.makes_episodes and worker.rollout.episode.max_tokens is not None:
                return worker.rollout.episode.max_tokens
            return worker.dataset.config.max_prompt_tokens + worker.rollout.sampling.max_new_tokens
        if isinstance(worker, ModelWorkerSpec) and worker.generation is not None and worker.dataset is not None:
            return worker.dataset.config.max_prompt_tokens + worker.generation.sampling.max_new_tokens
    return None


def _on_gpu(call: ModelFunctionCall) -> CallOnGpu:
    offloads = any(isinstance(hook, OffloadHook) for hook in call.post_hooks)
    return CallOnGpu(name=call.name, model=str(call.model_name), offloads=offloads)


def _model_of(role: ModelRoleSpec, *, follows: bool) -> RoleModel | None:
    sizes = decoder_sizes(role.model.path)
    if sizes is None:
        return None
    return RoleModel(
        sizes=sizes,
        backend=role.backend,
        output="vocabulary" if role.head == "lm" else "score",
        optimizer=role.optimizer.type if role.optimizer is not None else None,
        adapters=_adapters(role, sizes),
        compute_bytes=ITEM_SIZES[role.model.dtype],
        recompute=role.recompute,
        follows=follows,
        sums_gradients_once=role.gradient_sums == "last_micro_batch",
        shares_prompts=role.model.shared_prompts == "auto",
        hosts_optimizer=role.model.offload == "optimizer",
        is_held_low=role.is_held_low,
    )


def _adapters(role: ModelRoleSpec, sizes: DecoderSizes) -> Adapters | None:
    if role.lora is None:
        return None
    layers = frozenset(name for name, _ in adapted_layers(role.lora, tensor_shapes(sizes)))
    return Adapters(rank=role.lora.rank, layers=layers)


def server_uses(plan: RunPlan, *, num_gpus: int | None = None, max_total_tokens: int | None = None) -> Iterator[GpuUse]:
    """What the generation servers hold: those of the policy, and those of a judge.

    Args:
        num_gpus: of each, in place of what the plan says.
        max_total_tokens: likewise.
    """
    for name, is_judge in (("server", False), ("judge", True)):
        if servers := [server for server in plan.all_of(GenerationServerSpec) if server.is_judge is is_judge]:
            yield _server_use(plan, name, servers, num_gpus=num_gpus, max_total_tokens=max_total_tokens)


def _server_use(
    plan: RunPlan,
    name: str,
    servers: Sequence[GenerationServerSpec],
    *,
    num_gpus: int | None,
    max_total_tokens: int | None,
) -> GpuUse:
    server, sizes = servers[0], decoder_sizes(servers[0].initial_weights)
    each = num_gpus or server.tensor_parallel_size
    peak = None
    if sizes is not None:
        model = server_on_gpu(
            name,
            sizes,
            number_bytes=ITEM_SIZES[server.engine.dtype],
            max_total_tokens=max_total_tokens or server.engine.max_total_tokens or 0,
            max_running_requests=server.engine.max_running_requests,
            num_gpus=each,
            is_embedded=server.backend == "hf",
            is_rounded=server.engine.quantization is not None,
            longest=longest_answer(plan) or 0,
        )
        peak = peak_of([model], [CallOnGpu(name=ANSWER, model=name)])
    return GpuUse(
        kind="generation_server",
        workers=tuple(worker.index for worker in servers),
        dims_by_model={name: ParallelDims(dp=len(servers), tp=each)},
        peak=peak,
        unknown=() if sizes is not None else (name,),
    )


def models_alone(meshes: Mapping[ModelName, Mesh], names: Sequence[ModelName]) -> Mesh | None:
    """The mesh that these models share, if no other model holds any of its ranks, nor any of them another one."""
    first = meshes[names[0]]
    others = [mesh for name, mesh in meshes.items() if name not in names]
    is_shared = all(meshes[name] == first for name in names)
    is_alone = not any(set(mesh.ranks) & set(first.ranks) for mesh in others)
    return first if is_shared and is_alone else None


def render_memory(uses: Sequence[GpuUse], *, gpu_memory_mb: int | None) -> str:
    """The table, and what of a GPU it leaves out.

    Args:
        gpu_memory_mb: of one GPU; None if nobody says.
    """
    peaks = [use.peak for use in uses if use.peak is not None]
    held = {part for peak in peaks for parts in peak.parts_by_model.values() for part, size in parts.items() if size}
    shown = [part for part in PARTS if part in held]
    rows = [["GiB of one GPU", *(_HEADINGS[part] for part in shown), "all"]]
    for use in uses:
        rows += [*_rows(use, shown), [""]]
    heading, *lines = table(rows, has_numbers=True)
    return "\n".join([heading, "\u2500" * len(heading), *lines, _caption(gpu_memory_mb)])


def _rows(use: GpuUse, shown: Sequence[Part]) -> Iterator[list[str]]:
    yield [f"{use.kind} {fold_numbers(use.workers)}"]
    if use.peak is None:
        yield [f"  not known: config.json of {', '.join(use.unknown)}"]
        return
    for model, parts in use.peak.parts_by_model.items():
        cells = [_gib(parts.get(part, 0)) for part in shown]
        yield [f"  {model} {use.dims_by_model[model].short}", *cells, _gib(sum(parts.values()))]
    moment = "" if use.peak.call == ANSWER else f", in {use.peak.call}"
    yield [f"  all{moment}", *[""] * len(shown), _gib(use.peak.total)]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size else ""


def _caption(gpu_memory_mb: int | None) -> str:
    reserve = f"{CONTEXT_BYTES / GIB:.4g} GiB for CUDA and NCCL and {FRAGMENTATION:.0%} for fragmentation"
    if gpu_memory_mb is None:
        return f"Estimated; a GPU needs {reserve} besides. cluster.gpu_memory (80G) compares this with what it has."
    usable = usable_bytes(gpu_memory_mb * MIB) / GIB
    return f"Estimated; {usable:.1f} of a GPU's {gpu_memory_mb / 1024:.4g} GiB are usable: {reserve} are set aside."
