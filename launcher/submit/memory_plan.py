"""RunPlan -> what every GPU of a trial holds at its worst moment.

    roles of a rank, calls of the step ─┐
    model directories (config.json) ────┼─► one GpuUse for all ranks that hold the same models in the same layouts
    servers, their engine ──────────────┘   one for the generation servers

Workers without a GPU hold all of this in host memory, and are left out. So is a model whose type is not known: its GPU
has no figures, and says why.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from corral.experiments.config.data import HELD_OUT_ANSWERS
from corral.experiments.config.model import ModelConfig, Recompute, TrainedModelConfig
from corral.experiments.inputs.decoder_config import decoder_sizes
from corral.experiments.inputs.parameters import adapted_layers
from corral.experiments.plan import RunPlan
from corral.experiments.worker_specs import GenerationServerSpec, ModelRoleSpec, ModelWorkerSpec, RolloutWorkerSpec
from corral.launcher.submit.dataflow_text import answers_per_prompt
from corral.scheduling.memory.decoder_sizes import DecoderSizes, tensor_shapes
from corral.scheduling.memory.fsdp import Adapters, CallKind, CallSizes, RoleModel
from corral.scheduling.memory.gpu import CallOnGpu, ModelOnGpu, Peak, peak_of
from corral.scheduling.memory.megatron import MegatronModel
from corral.scheduling.memory.server import ANSWER, server_on_gpu
from corral.scheduling.mesh import Mesh
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, OffloadHook, PushWeightsHook
from corral.scheduling.parallel import ParallelDims
from corral.scheduling.worker_information import WorkerKind

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
RECOMPUTE_MORE = _RECOMPUTE[1:]
"""Ways to keep less of layers, the least first."""


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
    uses: list[GpuUse] = []
    if _has_gpus(plan, "model_worker"):
        uses += TrainingMemory.of(plan).uses()
    if _has_gpus(plan, "generation_server"):
        uses.append(server_use(plan))
    return uses


def _has_gpus(plan: RunPlan, kind: WorkerKind) -> bool:
    group = plan.scheduling.get(kind)
    return group is not None and group.scheduling.gpu > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """What training ranks hold, asked for the plan's layouts or for others."""

    plan: RunPlan
    roles: Mapping[ModelName, ModelRoleSpec]
    models: Mapping[ModelName, RoleModel | MegatronModel | None]
    """By name; None of a type that is not known."""

    @classmethod
    def of(cls, plan: RunPlan) -> "TrainingMemory":
        workers = [worker for worker in plan.workers if isinstance(worker, ModelWorkerSpec)]
        roles = {role.model_name: role for worker in workers for role in worker.roles}
        return cls(plan=plan, roles=roles, models=_models_of(plan, roles))

    def has_experts(self, names: Iterable[ModelName]) -> bool:
        """Whether experts of one of these models could be spread over ranks."""
        models = [self.models[name] for name in names]
        return any(isinstance(model, MegatronModel) and model.sizes.sparse_layers for model in models)

    def config_of(self, name: ModelName) -> ModelConfig:
        """What an experiment says of a model, as far as layouts may not suit it."""
        role = self.roles[name]
        if role.optimizer is None:
            return role.model
        return TrainedModelConfig(
            **dict(role.model), optimizer=role.optimizer, lora=role.lora, recompute=role.recompute
        )

    def with_recompute(self, how: Recompute) -> "TrainingMemory":
        """The same trial, if the layers of all that is trained were computed again at least in so far."""
        roles = {
            name: role.model_copy(update={"recompute": how}) if self.could_recompute([name], how) else role
            for name, role in self.roles.items()
        }
        return self._with(roles)

    def with_optimizer_on_host(self) -> "TrainingMemory":
        """The same trial, if the state of every optimizer lay in host memory where its backend can do that."""
        return self._with(
            {
                name: role.model_copy(update={"model": role.model.model_copy(update={"offload": "optimizer"})})
                if self.could_host_optimizer([name])
                else role
                for name, role in self.roles.items()
            }
        )

    def _with(self, roles: Mapping[ModelName, ModelRoleSpec]) -> "TrainingMemory":
        return TrainingMemory(plan=self.plan, roles=roles, models=_models_of(self.plan, roles))

    def could_host_optimizer(self, names: Iterable[ModelName]) -> bool:
        """Whether the state of the optimizer of one of these models could lie in host memory, and does not."""
        roles = [self.roles[name] for name in names]
        return any(
            role.optimizer is not None and role.backend == "fsdp" and role.model.offload != "optimizer"
            for role in roles
        )

    def could_recompute(self, names: Iterable[ModelName], how: Recompute) -> bool:
        """Whether one of these models is trained and computes less than that again."""
        weaker = _RECOMPUTE[: _RECOMPUTE.index(how)]
        roles = [self.roles[name] for name in names]
        return any(role.optimizer is not None and role.recompute in weaker for role in roles)

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
        if call.call_type is CallType.GENERATE:
            return self._generation_sizes(call, dims)
        if call.call_type is CallType.EVALUATE and call.implementation == HELD_OUT_ANSWERS:
            return self._held_out_sizes(call, dims)
        kind: CallKind = "train" if call.call_type is CallType.TRAIN_STEP else "infer"
        limits = [call.micro_batches.max_tokens_per_micro_batch, max_tokens, self._most_tokens(call, dims)]
        return CallSizes(name=call.name, kind=kind, tokens=min((limit for limit in limits if limit), default=0))

    def _most_tokens(self, call: ModelFunctionCall, dims: ParallelDims) -> int | None:
        """Of a rank's share of the batch, which may be less than a micro-batch may hold; None where nobody knows."""
        longest = longest_answer(self.plan)
        if longest is None:
            return None
        # Samples are dealt by their lengths: a rank may get one more than the mean.
        return (call.n_seqs // dims.dp + 1) * (answers_per_prompt(self.plan) or 1) * longest

    def _generation_sizes(self, call: ModelFunctionCall, dims: ParallelDims) -> CallSizes:
        """As `workers/model/generator.py` makes its batch: the longest prompt and answer for each at a time."""
        spec = next(worker for worker in self.plan.workers if isinstance(worker, ModelWorkerSpec))
        assert spec.generation is not None
        prompts = -(-call.n_seqs // dims.dp)
        running = min(spec.generation.max_running_requests, prompts * spec.generation.group_size)
        longest = longest_answer(self.plan) or 0
        return CallSizes(name=call.name, kind="generate", tokens=running * longest, sequences=running)

    def _held_out_sizes(self, call: ModelFunctionCall, dims: ParallelDims) -> CallSizes:
        spec = next(worker for worker in self.plan.workers if isinstance(worker, ModelWorkerSpec))
        assert spec.evaluation is not None
        running = -(-call.n_seqs // dims.dp)
        longest = spec.evaluation.dataset.max_prompt_tokens + spec.evaluation.max_new_tokens
        return CallSizes(name=call.name, kind="generate", tokens=running * longest, sequences=running)


def longest_answer(plan: RunPlan) -> int | None:
    """Tokens of the longest prompt with its answer; None where rows bring answers of their own."""
    for worker in plan.workers:
        if isinstance(worker, RolloutWorkerSpec):
            return worker.dataset.config.max_prompt_tokens + worker.rollout.sampling.max_new_tokens
        if isinstance(worker, ModelWorkerSpec) and worker.generation is not None and worker.dataset is not None:
            return worker.dataset.config.max_prompt_tokens + worker.generation.sampling.max_new_tokens
    return None


def _on_gpu(call: ModelFunctionCall) -> CallOnGpu:
    offloads = any(isinstance(hook, OffloadHook) for hook in call.post_hooks)
    return CallOnGpu(name=call.name, model=str(call.model_name), offloads=offloads)


def _models_of(
    plan: RunPlan, roles: Mapping[ModelName, ModelRoleSpec]
) -> dict[ModelName, RoleModel | MegatronModel | None]:
    calls = (call for worker in plan.workers if isinstance(worker, ModelWorkerSpec) for call in worker.calls)
    hooks = (hook for call in calls for hook in call.post_hooks if isinstance(hook, PushWeightsHook))
    followers = {hook.target for hook in hooks if hook.eta < 1.0}
    return {name: _model_of(role, follows=name in followers) for name, role in roles.items()}


def _model_of(role: ModelRoleSpec, *, follows: bool) -> RoleModel | MegatronModel | None:
    sizes = decoder_sizes(role.model.path)
    if sizes is None:
        return None
    if role.backend == "megatron":
        return MegatronModel(
            sizes,
            output="vocabulary" if role.head == "lm" else "score",
            is_trained=role.optimizer is not None,
            follows=follows,
            adapters=_adapters(role, sizes),
            compute_bytes=NUMBER_BYTES[role.model.dtype],
            recompute=role.recompute,
        )
    return RoleModel(
        sizes,
        output="vocabulary" if role.head == "lm" else "score",
        optimizer=role.optimizer.type if role.optimizer is not None else None,
        adapters=_adapters(role, sizes),
        compute_bytes=NUMBER_BYTES[role.model.dtype],
        recompute=role.recompute,
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


def server_use(plan: RunPlan, *, num_gpus: int | None = None, max_total_tokens: int | None = None) -> GpuUse:
    """What the generation servers hold.

    Args:
        num_gpus: of each, in place of what the plan says.
        max_total_tokens: likewise.
    """
    servers = [worker for worker in plan.workers if isinstance(worker, GenerationServerSpec)]
    server, sizes = servers[0], decoder_sizes(servers[0].initial_weights)
    each = num_gpus or server.tensor_parallel_size
    name = "server"
    peak = None
    if sizes is not None:
        model = server_on_gpu(
            name,
            sizes,
            number_bytes=NUMBER_BYTES[server.engine.dtype],
            max_total_tokens=max_total_tokens or server.engine.max_total_tokens or 0,
            max_running_requests=server.engine.max_running_requests,
            num_gpus=each,
            is_embedded=server.backend == "hf",
            is_rounded=server.engine.quantization is not None,
            has_graphs=server.engine.cuda_graphs,
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
