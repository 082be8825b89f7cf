"""The models of one rank, and the calls that run on them.

    Initialize ──► weights, optimizer state ──► RoleModel of each role that this rank holds
    Generate   ──► prompts of this rank ──► Generator by the model of the call ──► answers, into the store
    Inference  ──► inputs of this rank ──► RoleModel ──► output keys, into the store
    TrainStep  ──► inputs of this rank ──► RoleModel ──► statistics
    Reallocate ──► weights of one model into another           Offload ──► one model to the host
    Evaluate   ──► RoleModel on inputs of this rank, or Generator on held-out problems ──► statistics
    SaveWeights, SaveCheckpoint ◄── engines

All of them contain collectives of a mesh and are the main thread's; the ranks of a mesh run them in the same order.
"""

import gc
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from corral.experiments.config.data import HELD_OUT_ANSWERS
from corral.experiments.worker_specs import ModelRoleSpec, ModelWorkerSpec
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, parse_model_name
from corral.workers.algorithms.base import ModelInterface, check_call
from corral.workers.algorithms.interfaces import InterfaceSettings, make_interface
from corral.workers.backends.base import Numbers
from corral.workers.backends.files.weights import WeightShard
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.mesh_engine import MeshEngine
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.train_state import StateShard
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.lifecycle.timeline import Record, unrecorded
from corral.workers.lifecycle.worker import BadConfigurationError
from corral.workers.model.data_store import DataStore
from corral.workers.model.generator import Generator
from corral.workers.model.kept_samples import KeptSamples
from corral.workers.model.reallocation import group_name, reallocate
from corral.workers.requests.messages import (
    CallRequest,
    Evaluate,
    Generate,
    HeldOutReply,
    Inference,
    Initialize,
    LoadedModel,
    Reallocate,
    SampleMetadata,
    SaveCheckpoint,
    StatsReply,
    TrainReply,
    TrainStep,
    WrittenReply,
)

if TYPE_CHECKING:
    from corral.workers.backends.megatron.engine import MegatronEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSave:
    """This rank's part of a role in a commit."""

    state: StateShard
    weights: WeightShard | None
    """None where the commit takes those that were published."""

    def copied(self) -> "RoleSave":
        """The same in host memory; a collective."""
        return RoleSave(state=self.state.copied(), weights=self.weights and self.weights.copied())

    def write(self, request: SaveCheckpoint, *, on_progress: Callable[[], None]) -> WrittenReply:
        """Write it into the directories that the request names."""
        return WrittenReply(
            weights={} if self.weights is None else self.weights.write(Path(request.weights), on_progress=on_progress),
            state=self.state.write(Path(request.state), on_progress=on_progress),
        )


class RoleModel:
    """A model, as far as this rank holds it: its engine, and the interfaces of the calls that run on it.

    Raises:
        BadConfigurationError: if a call's interface cannot be made.
    """

    def __init__(
        self,
        spec: ModelRoleSpec,
        worker: ModelWorkerSpec,
        context: ParallelContext,
        *,
        seed: int,
    ) -> None:
        self.spec = spec
        self.context = context
        self._worker = worker
        self._engine: MeshEngine | None = None
        self._seed = seed
        self._calls = [
            call
            for call in worker.calls
            if call.model_name == spec.model_name
            and call.call_type is not CallType.GENERATE
            and call.implementation != HELD_OUT_ANSWERS
        ]
        self._interfaces = self._make_interfaces()

    @property
    def engine(self) -> MeshEngine:
        """The engine that `initialize` has made: nothing is asked of a model before."""
        assert self._engine is not None, self.spec.model_name
        return self._engine

    def free(self) -> None:
        """Give up the engine, and the memory that it has."""
        self._engine = None
        gc.collect()  # modules and their hooks refer to each other
        if self.context.device.type == "cuda":
            torch.cuda.empty_cache()

    def initialize(self, weights: Path | None, state: Path | None, *, on_progress: Callable[[], None]) -> None:
        """Load weights and, of a model that is trained, what training resumes from.

        Args:
            weights: None for a model that no commit holds: it keeps its weights, once it has them. Those of a commit
                are not read for a model with adapters: it is loaded from its own path, and `state` has the adapters.
            on_progress: called for every piece of optimizer state that was read.

        Raises:
            BadConfigurationError: if the backend cannot compute this model in its layout.
        """
        if self._engine is None:
            self._interfaces = self._make_interfaces()
            directory = weights or self.spec.model.path
            with _blamed_on_the_plan(f"model {self.spec.model_name} of {directory}: "):
                self._engine = self._make_engine(directory)
        if state is not None:
            numbers = self._engine.load_state(state, on_progress=on_progress)
            for name, interface in self._interfaces.items():
                own = {key.removeprefix(f"{name}/"): n for key, n in numbers.items() if key.startswith(f"{name}/")}
                interface.load_state_dict(own)

    def save(self, *, with_weights: bool) -> RoleSave:
        """This rank's shard of what a commit has of the model, as it is until the next step."""
        numbers: Numbers = {
            f"{name}/{key}": number
            for name, interface in self._interfaces.items()
            for key, number in interface.state_dict().items()
        }
        weights = self.engine.weight_shard() if with_weights else None
        return RoleSave(state=self.engine.state_shard(extra=numbers), weights=weights)

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model's shape; the same in every epoch."""
        config = json.loads((self.spec.model.path / "config.json").read_text())
        return LoadedModel(
            architecture=str(config.get("model_type", "")),
            num_parameters=self.engine.num_parameters,
            num_layers=int(config.get("num_hidden_layers", 0)),
            hidden_size=int(config.get("hidden_size", 0)),
            vocab_size=int(config.get("vocab_size", 0)),
        )

    def ready_for(self, call: ModelFunctionCall) -> tuple[MeshEngine, ModelInterface]:
        """What a call runs on, and what it runs."""
        self.engine.micro_batches = call.micro_batches
        return self.engine, self._interfaces[call.implementation]

    def _make_interfaces(self) -> dict[str, ModelInterface]:
        spec = self.spec
        settings = InterfaceSettings(
            ppo=spec.ppo,
            critic=spec.critic,
            dpo=spec.dpo,
            behaviour=self._worker.behaviour,
            dtype=spec.model.dtype,
            seed=self._seed,
            taught_sources=spec.taught_sources,
        )
        interfaces: dict[str, ModelInterface] = {}
        for call in self._calls:
            name = call.implementation
            with _blamed_on_the_plan(f"model {self.spec.model_name} cannot run {name}: "):
                if name not in interfaces:
                    interfaces[name] = make_interface(name, settings)
                check_call(interfaces[name], call)
        return interfaces

    def _make_engine(self, directory: Path) -> MeshEngine:
        spec = self.spec
        updates_per_step = spec.ppo.updates_per_step if spec.ppo is not None else 1
        lora = spec.lora
        if lora is not None and directory != spec.model.path:
            # A commit's weights are merged: adapters belong beside those that they were trained beside, and its state
            # has what has become of those that training started from.
            lora, directory = lora.model_copy(update={"adapter": None}), spec.model.path
        kind: type[MeshEngine] = _megatron_engine() if spec.backend == "megatron" else FSDPEngine
        return kind(
            directory,
            context=self.context,
            head=spec.head,
            optimizer=spec.optimizer,
            lora=lora,
            recompute=spec.recompute,
            gradient_sums=spec.gradient_sums,
            hosts_optimizer=spec.model.offload == "optimizer",
            is_held_low=spec.is_held_low,
            total_steps=self._worker.total_steps * updates_per_step,
            seed=self._seed,
            compute_dtype=torch.bfloat16 if spec.model.dtype == "bfloat16" else torch.float32,
            takes_tf32=spec.model.dtype == "tf32",
        )


class Models:
    """Runs model function calls on samples of the store; their outputs are put there, too.

    Raises:
        BadConfigurationError: if the plan's roles cannot be run.
    """

    def __init__(
        self,
        spec: ModelWorkerSpec,
        store: DataStore,
        contexts: Mapping[str, ParallelContext | None],
        *,
        seed: int,
        secrets: Sequence[Path],
        kept: KeptSamples | None = None,
        record: Record = unrecorded,
    ) -> None:
        """
        Args:
            record: has what happens beside the phases.
            kept: takes what people may read of what is trained on.
            secrets: folders that a reward is kept from.
            contexts: this rank's place in the mesh of each model, and of each reallocation, by name.
        """
        self._contexts = contexts
        self._store, self._kept = store, kept
        self._calls = {call.name: call for call in spec.calls}
        self._models = {
            role.model_name: RoleModel(role, spec, _place(contexts, role), seed=seed) for role in spec.roles
        }
        here = [call for call in spec.calls if call.model_name in self._models]
        evaluates = any(call.implementation == HELD_OUT_ANSWERS for call in here)
        self._generator: Generator | None = None
        if evaluates or any(call.call_type is CallType.GENERATE for call in here):
            with _blamed_on_the_plan():
                self._generator = Generator(spec, store, seed=seed, secrets=secrets, evaluates=evaluates, record=record)

    def close(self) -> None:
        """End the processes of the reward."""
        if self._generator is not None:
            self._generator.close()

    def initialize(self, request: Initialize, *, on_progress: Callable[[], None]) -> dict[str, LoadedModel]:
        """Load weights and optimizer state; a model that is not trained keeps its weights, once it has them.

        Args:
            on_progress: called for every piece of optimizer state that was read.

        Returns:
            What each model has become, by its name.
        """
        weights, states = request.weights, request.states
        # All are freed before any is loaded: there is not always memory for both.
        for model in self._models.values():
            if model.spec.role in weights:
                model.free()
        for model in self._models.values():
            role = model.spec.role
            model.initialize(
                Path(weights[role]) if role in weights else None,
                Path(states[role]) if role in states else None,
                on_progress=on_progress,
            )
        return {str(name): model.loaded for name, model in self._models.items()}

    def generate(self, request: Generate) -> list[SampleMetadata]:
        """Answer prompts; a data-parallel head keeps the answers to its shard."""
        model = self._models[self._calls[request.mfc].model_name]
        assert self._generator is not None
        return self._generator.generate(model.engine.model, request, context=model.context)

    def inference(self, request: Inference) -> None:
        """Compute a call's output keys, as the graph names them, and keep them beside its inputs."""
        call, model, sample = self._inputs(request)
        engine, interface = model.ready_for(call)
        outputs = interface.inference(engine, sample)
        named = {call.output_key_remap.get(name, name): values for name, values in outputs.items()}
        for key in call.output_keys if sample.uids and model.context.is_dp_head else ():
            self._store.put(sample.select_keys(["input_ids"]).with_key(key, named[key]).select_keys([key]))

    def train_step(self, request: TrainStep) -> TrainReply:
        """Update a call's model on this rank's shard of the batch; what that did is equal on all ranks."""
        call, model, sample = self._inputs(request)
        engine, interface = model.ready_for(call)
        steps_before, nonfinite_before = engine.step, engine.num_nonfinite
        stats = interface.train_step(engine, sample, version=request.version)
        learned = interface.take_learned()
        if learned is not None and model.context.is_dp_head and self._kept is not None:
            self._kept.offer(learned, version=request.version)
        return TrainReply(
            stats=stats,
            num_updates=engine.step - steps_before,
            num_nonfinite=engine.num_nonfinite - nonfinite_before,
            is_damaged=engine.is_damaged,
            notices=interface.take_notices(),
        )

    def evaluate(self, request: Evaluate) -> StatsReply | HeldOutReply:
        """Evaluate the call's model on the named held-out rows, or on its shard of its own held-out problems."""
        call, model, sample = self._inputs(request)
        if call.implementation == HELD_OUT_ANSWERS:
            assert self._generator is not None
            return self._generator.evaluate(model.engine.model, context=model.context, batch_size=call.n_seqs)
        engine, interface = model.ready_for(call)
        return StatsReply(stats=interface.evaluate(engine, sample))

    def reallocate(self, request: Reallocate) -> None:
        """Let one model take over another one's weights; this rank may hold either, or both."""
        source, target = (parse_model_name(name) for name in (request.source, request.target))
        group = self._contexts.get(group_name(source, target))
        given, taking = (model.engine if (model := self._models.get(name)) else None for name in (source, target))
        reallocate(given, taking, group, eta=request.eta)

    def offload(self, call_name: str) -> None:
        """Move the model of a call to host memory."""
        self._models[self._calls[call_name].model_name].engine.offload()

    def save_weights(
        self, role: str, directory: Path, *, base: Path | None = None, on_progress: Callable[[], None]
    ) -> dict[str, FileEntry]:
        """Write this rank's files of a role's weights in Hugging Face format, and what leads to them from `base`."""
        return self._models[ModelName(role)].engine.save_weights(directory, base=base, on_progress=on_progress)

    def role_save(self, role: str, *, with_weights: bool) -> RoleSave:
        """This rank's shard of what a commit has of a role, as it is until the role's next step."""
        return self._models[ModelName(role)].save(with_weights=with_weights)

    def _inputs(self, request: CallRequest) -> tuple[ModelFunctionCall, RoleModel, SequenceSample]:
        """The call of a request, its model, and this rank's shard of the samples by the interface's names."""
        call = self._calls[request.mfc]
        # A rank without samples still takes part in every collective, with no rows of the same keys.
        sample = self._store.gather(request.uids, call.input_keys).remap_keys(call.input_key_remap)
        return call, self._models[call.model_name], sample


@contextmanager
def _blamed_on_the_plan(prefix: str = "") -> Iterator[None]:
    try:
        yield
    except (ValueError, ImportError) as error:
        raise BadConfigurationError(f"{prefix}{error}") from error


def _place(contexts: Mapping[str, ParallelContext | None], role: ModelRoleSpec) -> ParallelContext:
    context = contexts[str(role.model_name)]
    assert context is not None, f"the plan gives this rank model {role.model_name}, whose mesh does not have it"
    return context


def _megatron_engine() -> "type[MegatronEngine]":
    """Imported where it is used: megatron-core is heavy, and not installed everywhere.

    Raises:
        BadConfigurationError: if it is not here.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fused kernels that are not installed, one warning for each
            from corral.workers.backends.megatron.engine import MegatronEngine
    except ImportError as error:
        raise BadConfigurationError(
            f"the allocation has a megatron backend, and this worker cannot import it ({error}): run make megatron, or "
            "pip install 'corral-rl[megatron]' in the workers' environment"
        ) from error
    return MegatronEngine
