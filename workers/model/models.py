"""The models of one rank, and the calls that run on them.

    Initialize ──► weights, optimizer state ──► RoleModel of each role that this rank holds
    Generate   ──► prompts of this rank ──► Generator on the model of the call ──► answers, into the store
    Inference  ──► inputs of this rank ──► RoleModel ──► output keys, into the store
    TrainStep  ──► inputs of this rank ──► RoleModel ──► statistics
    Reallocate ──► weights of one model into another           Offload ──► one model to the host
    Evaluate   ──► RoleModel on inputs of this rank, or Evaluator on its own problems ──► statistics
    SaveWeights, SaveCheckpoint ◄── engines
    ModelConfig ◄── config.json, engine of a model

All of them but ModelConfig contain collectives of a mesh and are the main thread's; the ranks of a mesh run them in the
same order.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from corral.experiments.config.data import HELD_OUT_ANSWERS
from corral.experiments.worker_specs import ModelRoleSpec, ModelWorkerSpec
from corral.scheduling.model_function_call import ModelFunctionCall, ModelName, parse_model_name
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.evaluation.held_out import Evaluator
from corral.workers.lifecycle.worker import BadConfigurationError
from corral.workers.model.data_store import DataStore
from corral.workers.model.generator import Generated, Generator
from corral.workers.model.reallocation import group_name, reallocate
from corral.workers.model.role_model import RoleModel
from corral.workers.model.saves_behind import RoleSave
from corral.workers.requests.messages import (
    Evaluate,
    Generate,
    Inference,
    Initialize,
    ModelConfigReply,
    Reallocate,
    SampleMetadata,
    TrainReply,
    TrainStep,
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
    ) -> None:
        """
        Args:
            contexts: this rank's place in the mesh of each model, and of each reallocation, by name.
        """
        self._contexts = contexts
        self._store = store
        self._calls = {call.name: call for call in spec.calls}
        self._models = {
            role.model_name: RoleModel(
                role,
                spec.calls,
                _place(contexts, role),
                behaviour=spec.behaviour,
                total_steps=spec.total_steps,
                seed=seed,
            )
            for role in spec.roles
        }
        self._generator = _generator(spec, seed=seed)
        self._evaluators = {
            call.name: _make_evaluator(spec, self._models[call.model_name])
            for call in spec.calls
            if call.implementation == HELD_OUT_ANSWERS and call.model_name in self._models
        }

    def initialize(self, request: Initialize, *, on_progress: Callable[[], None]) -> None:
        """Load weights and optimizer state; a model that is not trained keeps its weights, once it has them.

        Args:
            on_progress: called for every piece of optimizer state that was read.
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

    def generate(self, request: Generate) -> list[SampleMetadata]:
        """Answer prompts, and keep what a data-parallel head has made of its share."""
        call = self._calls[request.mfc]
        model = self._models[call.model_name]
        if self._generator is None:
            raise ValueError(f"call {call.name} generates, and the plan does not say how")
        made = self._generator.generate(model.engine.model, request.uids, request.orders, version=request.version)
        if not model.context.is_dp_head:
            return []
        for generated in made:
            if generated.sample is not None:
                self._store.put(generated.sample)
        return [_described(generated, request.version) for generated in made]

    def inference(self, request: Inference) -> None:
        """Compute a call's output keys and keep them beside its inputs."""
        call = self._calls[request.mfc]
        model = self._models[call.model_name]
        sample = self._inputs(call, request.uids)
        for key, values in model.inference(call, sample).items():
            if sample.uids and model.context.is_dp_head:
                self._store.put(sample.select_keys(["input_ids"]).with_key(key, values).select_keys([key]))

    def train_step(self, request: TrainStep) -> TrainReply:
        """Update a call's model on this rank's share of the batch; what that did is equal on all ranks."""
        call = self._calls[request.mfc]
        sample = self._inputs(call, request.uids)
        return self._models[call.model_name].train_step(call, sample, version=request.version)

    def evaluate(self, request: Evaluate) -> dict[str, float]:
        """What the call's model makes of held-out rows, of those named or of problems of its own."""
        call = self._calls[request.mfc]
        model = self._models[call.model_name]
        if call.name in self._evaluators:
            return self._evaluators[call.name].evaluate(model.engine.model, batch_size=call.n_seqs)
        return model.evaluate(call, self._inputs(call, request.uids))

    def reallocate(self, request: Reallocate) -> None:
        """Let one model take over another one's weights; this rank may hold either, or both."""
        source, target = (parse_model_name(name) for name in (request.source, request.target))
        group = self._contexts.get(group_name(source, target))
        reallocate(self._models.get(source), self._models.get(target), group, eta=request.eta)

    def offload(self, call_name: str) -> None:
        """Move the model of a call to host memory."""
        self._models[self._calls[call_name].model_name].engine.offload()

    def save_weights(
        self, role: str, directory: Path, *, base: Path | None = None, on_progress: Callable[[], None]
    ) -> dict[str, FileEntry]:
        """Write this rank's files of a role's weights in Hugging Face format, and what leads to them from `base`."""
        return self._of_role(role).engine.save_weights(directory, base=base, on_progress=on_progress)

    def role_save(self, role: str, *, with_weights: bool) -> RoleSave:
        """This rank's share of what a commit has of a role, as it is until the role's next step."""
        model = self._of_role(role)
        weights = model.engine.weight_share() if with_weights else None
        return RoleSave(state=model.state_shard(), weights=weights)

    def describe(self, model: str) -> ModelConfigReply:
        """The shape of a model; no parameters are counted before it is loaded."""
        return self._models[parse_model_name(model)].describe()

    def _of_role(self, role: str) -> RoleModel:
        return self._models[ModelName(role)]

    def _inputs(self, call: ModelFunctionCall, uids: list[str]) -> SequenceSample:
        # A rank without samples still takes part in every collective, with no rows of the same keys.
        return self._store.gather(uids, call.input_keys).remap_keys(call.input_key_remap)


def _generator(spec: ModelWorkerSpec, *, seed: int) -> Generator | None:
    if spec.generation is None:
        return None
    try:
        return Generator(spec, spec.generation, seed=seed)
    except ValueError as error:
        raise BadConfigurationError(str(error)) from error


def _described(generated: Generated, version: str) -> SampleMetadata:
    sample = generated.sample
    return SampleMetadata(
        uid=generated.uid,
        keys=() if sample is None else tuple(sample.seqlens),
        num_tokens=[] if sample is None else sample.answer_lengths(),
        versions=(version,),
        order=generated.order,
        dropped_because=generated.dropped_because,
    )


def _place(contexts: Mapping[str, ParallelContext | None], role: ModelRoleSpec) -> ParallelContext:
    context = contexts.get(str(role.model_name))
    if context is None:
        raise BadConfigurationError(f"the plan gives this rank model {role.model_name}, whose mesh does not have it")
    return context


def _make_evaluator(spec: ModelWorkerSpec, model: RoleModel) -> Evaluator:
    if spec.evaluation is None:
        raise BadConfigurationError("the plan has a call that evaluates, and no held-out problems")
    try:
        return Evaluator(spec.evaluation, spec.tokenizer, reward=spec.reward, context=model.context)
    except ValueError as error:
        raise BadConfigurationError(str(error)) from error
