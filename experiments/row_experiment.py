"""RowExperiment: what experiments share that learn from rows of a dataset and generate nothing.

    rows ──► calls of a step, on the roles' models ──► new weights
    held-out rows ──► the same interface, by the same keys ──► loss and what else it says

Workers: the master and the model workers; the latter read the rows themselves.
"""

from abc import abstractmethod
from collections.abc import Iterator

from corral.experiments.checks.data import check_model
from corral.experiments.errors import ConfigProblem
from corral.experiments.experiment import Experiment
from corral.experiments.experiment_config import ExperimentConfig
from corral.experiments.inputs.model_directory import context_length
from corral.experiments.inputs.tokens import LengthLimits
from corral.experiments.worker_specs import RewardSpec
from corral.scheduling.dataflow import build_dataflow
from corral.scheduling.model_function_call import CallType, ModelFunctionCall

ROW_KEYS = ("input_ids", "prompt_mask")


class RowExperiment(Experiment):
    """Learns from rows: problems with their answers, or preferences."""

    @abstractmethod
    def calls(self) -> list[ModelFunctionCall]:
        """The model function calls of one step; the last one trains."""

    def key_of(self, role: str) -> str:
        """The key of the file that describes the model of a role: the field that holds it."""
        model = self.models[role]
        return next((name for name in type(self).model_fields if getattr(self, name) is model), role)

    def initial_setup(self) -> ExperimentConfig:
        dataset = self.read_dataset()
        graph = build_dataflow([*self.calls(), *self.evaluate_calls()], ROW_KEYS)
        workers = self.trainer_specs(dataset, graph, self.role_specs(), reward=RewardSpec())
        return ExperimentConfig(graph=graph, workers=tuple(workers))

    def evaluate_calls(self) -> list[ModelFunctionCall]:
        """Held-out rows go through what trains, but that nothing is learned from them."""
        if self.evaluation is None:
            return []
        trains = self.calls()[-1]
        on_rows = ModelFunctionCall(
            name="evaluate_rows",
            model_name=trains.model_name,
            call_type=CallType.EVALUATE,
            implementation=trains.implementation,
            n_seqs=self.evaluation.batch_size,
            input_keys=trains.input_keys,
            micro_batches=self.trained.micro_batches,
        )
        return [on_rows, *super().evaluate_calls()]

    def length_limits(self) -> LengthLimits:
        contexts = [context_length(model.path) for model in self.models.values()]
        return LengthLimits(
            self.trained.path,
            max_prompt_tokens=self.dataset.max_prompt_tokens,
            max_row_tokens=min(model.max_tokens_per_micro_batch for model in self.models.values()),
            max_sequence_tokens=min((length for length in contexts if length is not None), default=None),
        )

    def find_own_problems(self, *, num_rows: int | None) -> Iterator[ConfigProblem]:
        found = {role: check_model(model, (self.key_of(role),)) for role, model in self.models.items()}
        for _, problems in found.values():
            yield from problems
        yield from self.check_training(found[self.roles[0]][0], num_rows=num_rows)
