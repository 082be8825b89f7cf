"""The models of one rank: an engine and an interface for each role, and the calls that run on them.

    Initialize ──► weights, optimizer state ──► engines
    Inference  ──► inputs of this rank ──► interface.inference ──► output keys, into the store
    TrainStep  ──► inputs of this rank ──► interface.train_step ──► statistics
    Evaluate   ──► Evaluator on the trained role       SaveWeights, SaveCheckpoint ◄── engines
    ModelConfig ◄── config.json of a role

All of them but ModelConfig contain collectives and are the main thread's; every rank runs them in the same order.
"""

import gc
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from corral.experiments.worker_specs import ModelRoleSpec, ModelWorkerSpec
from corral.scheduling.dataflow import ModelFunctionCall
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.algorithms.base import ModelInterface, StatefulInterface
from corral.workers.algorithms.ppo import PPOActorInterface
from corral.workers.algorithms.sft import SFTInterface
from corral.workers.backends.fsdp import FSDPEngine
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.data.sequence_sample import SequenceSample, key_spec
from corral.workers.evaluation.held_out import Evaluator
from corral.workers.lifecycle.worker import BadConfigurationError
from corral.workers.model.data_store import DataStore
from corral.workers.requests.messages import Inference, Initialize, ModelConfigReply, TrainReply, TrainStep

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Models:
    """Runs model function calls on samples of the store; their outputs are put there, too.

    Raises:
        BadConfigurationError: if the plan's roles cannot be run.
    """

    def __init__(self, spec: ModelWorkerSpec, store: DataStore, parallel: ParallelContext, *, seed: int) -> None:
        self.trained = _trained_role(spec)
        self._spec = spec
        self._store = store
        self._parallel = parallel
        self._calls = {call.name: call for call in spec.calls}
        self._roles = {role.role: role for role in spec.roles}
        self._seed = seed
        self._interfaces = {role.role: self._make_interface(role) for role in spec.roles}
        self._engines: dict[str, FSDPEngine] = {}
        self._evaluator = _make_evaluator(spec, self.trained, parallel)

    def initialize(self, request: Initialize, *, on_progress: Callable[[], None]) -> None:
        """Load weights and optimizer state; a role that is not trained keeps its weights, once it has them.

        Args:
            on_progress: called for every piece of optimizer state that was read.
        """
        self._free([role.role for role in self._spec.roles if role.optimizer is not None])
        for role in self._spec.roles:
            if role.role not in self._engines:
                directory = Path(request.weights.get(role.role, role.model.path))
                self._interfaces[role.role] = self._make_interface(role)
                self._engines[role.role] = self._make_engine(role, directory, seed=request.seed)
            if role.role in request.states:
                self._load_state(role.role, Path(request.states[role.role]), on_progress=on_progress)

    def _load_state(self, role: str, directory: Path, *, on_progress: Callable[[], None]) -> None:
        numbers = self._engines[role].load_state(directory, on_progress=on_progress)
        interface = self._interfaces[role]
        if isinstance(interface, StatefulInterface):
            interface.load_state_dict(numbers)

    def _free(self, roles: Iterable[str]) -> None:
        """Give up engines before others are loaded: there is not always memory for both."""
        for role in roles:
            self._engines.pop(role, None)
        gc.collect()  # modules and their hooks refer to each other
        if self._parallel.device.type == "cuda":
            torch.cuda.empty_cache()

    def inference(self, request: Inference) -> None:
        """Compute a call's output keys and keep them beside its inputs."""
        call = self._calls[request.mfc]
        sample = self._inputs(call, request)
        outputs = self._interfaces[call.role].inference(self._engines[call.role], sample)
        for name, values in outputs.items():
            key = call.output_key_remap.get(name, name)
            if sample.uids:
                self._store.put(sample.select_keys(["input_ids"]).with_key(key, values).select_keys([key]))

    def train_step(self, request: TrainStep) -> TrainReply:
        """Update a call's model on this rank's share of the batch; what that did is equal on all ranks."""
        call = self._calls[request.mfc]
        sample, engine = self._inputs(call, request), self._engines[call.role]
        steps_before, nonfinite_before = engine.step, engine.num_nonfinite
        stats = self._interfaces[call.role].train_step(engine, sample, version=request.version)
        return TrainReply(
            stats=stats,
            num_updates=engine.step - steps_before,
            num_nonfinite=engine.num_nonfinite - nonfinite_before,
            is_damaged=engine.is_damaged,
        )

    def evaluate(self) -> dict[str, float]:
        """Answer the held-out problems with the present weights.

        Raises:
            ValueError: if the plan has none.
        """
        if self._evaluator is None:
            raise ValueError("the plan has no held-out problems to evaluate on")
        return self._evaluator.evaluate(self._engines[self.trained.role].model)

    def save_weights(self, role: str, directory: Path, *, on_progress: Callable[[], None]) -> dict[str, FileEntry]:
        """Write this rank's files of a role's weights in Hugging Face format."""
        return self._engines[role].save_weights(directory, on_progress=on_progress)

    def save_state(self, role: str, directory: Path, *, on_progress: Callable[[], None]) -> dict[str, FileEntry]:
        """Write this rank's pieces of what a role's training resumes from."""
        interface = self._interfaces[role]
        numbers = interface.state_dict() if isinstance(interface, StatefulInterface) else {}
        return self._engines[role].save_state(directory, extra=numbers, on_progress=on_progress)

    def describe(self, role: str) -> ModelConfigReply:
        """The shape of a role's model; no parameters are counted before it is loaded."""
        config = json.loads((self._roles[role].model.path / "config.json").read_text())
        engine = self._engines.get(role)
        return ModelConfigReply(
            architecture=str(config.get("model_type", "")),
            num_parameters=engine.num_parameters if engine else 0,
            num_layers=int(config.get("num_hidden_layers", 0)),
            hidden_size=int(config.get("hidden_size", 0)),
            vocab_size=int(config.get("vocab_size", 0)),
        )

    def _make_interface(self, role: ModelRoleSpec) -> ModelInterface:
        return _make_interface(role, temperature=self._spec.temperature, seed=self._seed)

    def _make_engine(self, role: ModelRoleSpec, directory: Path, *, seed: int) -> FSDPEngine:
        n_minibatches = role.ppo.n_minibatches if role.ppo is not None else 1
        return FSDPEngine(
            directory,
            context=self._parallel,
            optimizer=role.optimizer,
            total_steps=self._spec.total_steps * n_minibatches,
            micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=role.model.max_tokens_per_micro_batch),
            seed=seed,
            compute_dtype=_DTYPES[role.model.dtype],
        )

    def _inputs(self, call: ModelFunctionCall, request: Inference | TrainStep) -> SequenceSample:
        if request.uids:
            return self._store.gather(request.uids, call.input_keys).remap_keys(call.input_key_remap)
        # A rank without samples still takes part in every collective, with no rows of the same keys.
        empty = {key: np.empty(0, key_spec(key).dtype) for key in call.input_keys}
        return SequenceSample([], {key: [] for key in empty}, dict(empty)).remap_keys(call.input_key_remap)


def _trained_role(spec: ModelWorkerSpec) -> ModelRoleSpec:
    for role in spec.roles:
        if role.optimizer is not None:
            return role
    raise BadConfigurationError("the plan gives this model worker no role with an optimizer")


def _make_interface(role: ModelRoleSpec, *, temperature: float, seed: int) -> ModelInterface:
    if role.interface == "sft":
        return SFTInterface()
    if role.ppo is None:
        raise BadConfigurationError(f"role {role.role!r} runs ppo_actor, but the plan has no PPO settings for it")
    return PPOActorInterface(role.ppo, temperature=temperature, seed=seed)


def _make_evaluator(spec: ModelWorkerSpec, trained: ModelRoleSpec, parallel: ParallelContext) -> Evaluator | None:
    if spec.evaluation is None:
        return None
    try:
        return Evaluator(spec.evaluation, trained.model.path, reward=spec.reward, context=parallel)
    except ValueError as error:
        raise BadConfigurationError(str(error)) from error
