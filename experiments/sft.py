"""Supervised fine-tuning: one model function call, fed by a dataset.

dataset ──input_ids, prompt_mask──► actor_train
"""

from corral.experiments.config.data import RowKind
from corral.experiments.config.model import TrainedModelConfig
from corral.experiments.row_experiment import ROW_KEYS, RowExperiment
from corral.scheduling.model_function_call import ModelFunctionCall


class SFTExperiment(RowExperiment):
    """Maximum likelihood of the answers in a dataset."""

    experiment: str = "sft"
    """Supervised fine-tuning."""
    allocation: str = "fsdp:d1"
    """Who trains, on how many GPUs or processes: fsdp:d4."""
    model: TrainedModelConfig
    """The model that is trained."""

    @property
    def row_kind(self) -> RowKind:
        return "conversations"

    @property
    def held_out_kind(self) -> RowKind:
        # Problems are answered by the model, and their answers compared; of conversations the loss alone is told.
        return "answers" if self.answers_held_out else "conversations"

    def calls(self) -> list[ModelFunctionCall]:
        return [self.train_call("sft", input_keys=ROW_KEYS)]
