"""Supervised fine-tuning: one model function call, fed by a dataset.

    dataset ──input_ids, prompt_mask──► actor_train

Workers: the master and the model workers; the latter read the rows themselves.
"""

from collections.abc import Iterator

from corral.experiments.checks import check_model
from corral.experiments.config.model import ModelConfig, TrainedModelConfig
from corral.experiments.errors import ConfigProblem
from corral.experiments.experiment import Experiment
from corral.experiments.experiment_config import ExperimentConfig
from corral.experiments.inputs.tokens import LengthLimits
from corral.experiments.worker_specs import RewardSpec
from corral.scheduling.dataflow import build_dataflow
from corral.scheduling.model_function_call import ModelFunctionCall

ROW_KEYS = ("input_ids", "prompt_mask")


class SFTExperiment(Experiment):
    """Maximum likelihood of the answers in a dataset."""

    experiment: str = "sft"
    """Supervised fine-tuning."""
    allocation: str = "fsdp:d1"
    """Who trains, on how many GPUs or processes: fsdp:d4."""
    model: TrainedModelConfig
    """The model that is trained."""

    @property
    def models(self) -> dict[str, ModelConfig]:
        return {"actor": self.model}

    @property
    def needs_answers(self) -> bool:
        return True

    def calls(self) -> list[ModelFunctionCall]:
        """The model function calls of a train step."""
        return [self.train_call("sft", input_keys=ROW_KEYS)]

    def initial_setup(self) -> ExperimentConfig:
        dataset = self.read_dataset()
        graph = build_dataflow([*self.calls(), *self.evaluate_calls()], ROW_KEYS)
        workers = self.trainer_specs(dataset, graph, self.role_specs(), reward=RewardSpec())
        return ExperimentConfig(graph=graph, workers=tuple(workers))

    def length_limits(self) -> LengthLimits:
        return LengthLimits(
            self.model.path,
            max_prompt_tokens=self.dataset.max_prompt_tokens,
            max_row_tokens=self.model.max_tokens_per_micro_batch,
        )

    def find_own_problems(self, *, num_rows: int | None) -> Iterator[ConfigProblem]:
        facts, problems = check_model(self.model, ("model",))
        yield from problems
        yield from self.check_training(facts, num_rows=num_rows)
