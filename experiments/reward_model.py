"""Training of a reward model: one score per answer, such that preferred answers have the higher one.

    preferences ──input_ids──► reward_train

A model without a score layer gets one that is 0. What is exported is a sequence classifier of Hugging Face, and a
reward model for PPO.
"""

from corral.experiments.config.data import RowKind
from corral.experiments.config.model import TrainedModelConfig
from corral.experiments.row_experiment import RowExperiment
from corral.scheduling.model_function_call import ModelFunctionCall


class RewardModelExperiment(RowExperiment):
    """Bradley-Terry likelihood of the preferences in a dataset."""

    experiment: str = "reward_model"
    """A reward model, learned from preferences."""
    allocation: str = "fsdp:d1"
    """Who trains, on how many GPUs or processes: fsdp:d4."""
    reward: TrainedModelConfig
    """The model that learns to give scores; usually the one whose answers it will judge."""

    @property
    def row_kind(self) -> RowKind:
        return "preferences"

    def calls(self) -> list[ModelFunctionCall]:
        return [self.train_call("paired_reward", input_keys=("input_ids",))]
