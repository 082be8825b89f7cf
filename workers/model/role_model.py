"""One model of this rank: its engine, the interfaces of the calls that run on it, and what a call does with them.

    inputs ──► interface.inference  ──► output keys, as the graph names them
    inputs ──► interface.train_step ──► TrainReply
    inputs ──► interface.evaluate   ──► statistics

Everything here but `describe` contains collectives of the model's mesh: its ranks run the same in the same order.
"""

import gc
import json
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from corral.experiments.config.data import HELD_OUT_ANSWERS
from corral.experiments.worker_specs import BehaviourSpec, ModelRoleSpec
from corral.scheduling.model_function_call import CallType, ModelFunctionCall
from corral.workers.algorithms.base import ModelInterface, check_call
from corral.workers.algorithms.interfaces import InterfaceSettings, make_interface
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.mesh_engine import MeshEngine
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.train_state import Numbers, StateShard
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.lifecycle.worker import BadConfigurationError
from corral.workers.requests.messages import ModelConfigReply, TrainReply

if TYPE_CHECKING:
    from corral.workers.backends.megatron.engine import MegatronEngine


class RoleModel:
    """A model, as far as this rank holds it.

    Raises:
        BadConfigurationError: if a call's interface cannot be made.
    """

    def __init__(
        self,
        spec: ModelRoleSpec,
        calls: Iterable[ModelFunctionCall],
        context: ParallelContext,
        *,
        behaviour: BehaviourSpec,
        total_steps: int,
        seed: int,
    ) -> None:
        self.spec = spec
        self.context = context
        self._total_steps = total_steps
        self._engine: MeshEngine | None = None
        self._behaviour = behaviour
        self._seed = seed
        self._calls = [
            call
            for call in calls
            if call.model_name == spec.model_name
            and call.call_type is not CallType.GENERATE
            and call.implementation != HELD_OUT_ANSWERS
        ]
        self._interfaces = self._make_interfaces()

    @property
    def engine(self) -> MeshEngine:
        """The engine.

        Raises:
            ValueError: if `initialize` has not made it yet.
        """
        if self._engine is None:
            raise ValueError(f"model {self.spec.model_name} was asked to work before Initialize has loaded it")
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
            try:
                self._engine = self._make_engine(directory)
            except ValueError as error:
                raise BadConfigurationError(f"model {self.spec.model_name} of {directory}: {error}") from error
        if state is not None:
            numbers = self._engine.load_state(state, on_progress=on_progress)
            for name, interface in self._interfaces.items():
                own = {key.removeprefix(f"{name}/"): n for key, n in numbers.items() if key.startswith(f"{name}/")}
                interface.load_state_dict(own)

    def state_shard(self) -> StateShard:
        """This rank's pieces of what training resumes from, as they are until the next step."""
        numbers: Numbers = {
            f"{name}/{key}": number
            for name, interface in self._interfaces.items()
            for key, number in interface.state_dict().items()
        }
        return self.engine.state_shard(extra=numbers)

    def inference(self, call: ModelFunctionCall, sample: SequenceSample) -> dict[str, npt.NDArray[Any]]:
        """A call's output keys, packed in the sample's order."""
        outputs = self._interface(call).inference(self._ready_engine(call), sample)
        named = {call.output_key_remap.get(name, name): values for name, values in outputs.items()}
        return {name: named[name] for name in call.output_keys}

    def train_step(self, call: ModelFunctionCall, sample: SequenceSample, *, version: int) -> TrainReply:
        """Update the model on this rank's share of the batch; what that did is equal on all ranks."""
        engine = self._ready_engine(call)
        steps_before, nonfinite_before = engine.step, engine.num_nonfinite
        interface = self._interface(call)
        stats = interface.train_step(engine, sample, version=version)
        return TrainReply(
            stats=stats,
            num_updates=engine.step - steps_before,
            num_nonfinite=engine.num_nonfinite - nonfinite_before,
            is_damaged=engine.is_damaged,
            notices=interface.take_notices(),
        )

    def evaluate(self, call: ModelFunctionCall, sample: SequenceSample) -> dict[str, float]:
        """Statistics of held-out rows, of all ranks together."""
        return self._interface(call).evaluate(self._ready_engine(call), sample)

    def describe(self) -> ModelConfigReply:
        """The model's shape; no parameters are counted before it is loaded."""
        config = json.loads((self.spec.model.path / "config.json").read_text())
        return ModelConfigReply(
            architecture=str(config.get("model_type", "")),
            num_parameters=self._engine.num_parameters if self._engine is not None else 0,
            num_layers=int(config.get("num_hidden_layers", 0)),
            hidden_size=int(config.get("hidden_size", 0)),
            vocab_size=int(config.get("vocab_size", 0)),
        )

    def _ready_engine(self, call: ModelFunctionCall) -> MeshEngine:
        self.engine.micro_batches = call.micro_batches
        return self.engine

    def _interface(self, call: ModelFunctionCall) -> ModelInterface:
        return self._interfaces[call.implementation]

    def _make_interfaces(self) -> dict[str, ModelInterface]:
        spec = self.spec
        settings = InterfaceSettings(
            ppo=spec.ppo,
            critic=spec.critic,
            dpo=spec.dpo,
            behaviour=self._behaviour,
            dtype=spec.model.dtype,
            seed=self._seed,
        )
        interfaces: dict[str, ModelInterface] = {}
        for call in self._calls:
            name = call.implementation
            try:
                if name not in interfaces:
                    interfaces[name] = make_interface(name, settings)
                check_call(interfaces[name], call)
            except (ValueError, ImportError) as error:
                raise BadConfigurationError(f"model {self.spec.model_name} cannot run {name}: {error}") from error
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
            total_steps=self._total_steps * updates_per_step,
            seed=self._seed,
            compute_dtype=torch.bfloat16 if spec.model.dtype == "bfloat16" else torch.float32,
            takes_tf32=spec.model.dtype == "tf32",
        )


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
