"""Supervised fine-tuning: one model function call, fed by a dataset.

    dataset ──input_ids, prompt_mask──► actor_train

Workers: the master and the model workers; the latter read the rows themselves.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from corral.experiments.checks import check_model
from corral.experiments.config.model import TrainedModelConfig
from corral.experiments.errors import ConfigProblem
from corral.experiments.experiment import Experiment, ExperimentConfig
from corral.experiments.inputs.tokens import LengthLimits
from corral.experiments.worker_specs import ModelRoleSpec, RewardSpec
from corral.scheduling.dataflow import build_dataflow
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, PublishWeightsHook
from corral.scheduling.packing import MicroBatchSpec

ROW_KEYS = ("input_ids", "prompt_mask")


class SFTExperiment(Experiment):
    """Maximum likelihood of the answers in a dataset."""

    experiment: Literal["sft"] = "sft"
    """Supervised fine-tuning."""
    allocation: str = "fsdp:d1"
    """Who trains, on how many GPUs or processes: fsdp:d4."""
    model: TrainedModelConfig
    """The model that is trained."""

    generates: ClassVar[bool] = False

    @property
    def roles(self) -> tuple[str, ...]:
        return ("actor",)

    @property
    def trained(self) -> TrainedModelConfig:
        return self.model

    @property
    def needs_answers(self) -> bool:
        return True

    def calls(self) -> list[ModelFunctionCall]:
        """The one model function call."""
        return [
            ModelFunctionCall(
                name="actor_train",
                model_name=ModelName("actor"),
                call_type=CallType.TRAIN_STEP,
                implementation="sft",
                n_seqs=self.train_batch_size,
                input_keys=ROW_KEYS,
                micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=self.model.max_tokens_per_micro_batch),
                post_hooks=(PublishWeightsHook(),),
            )
        ]

    def initial_setup(self) -> ExperimentConfig:
        dataset = self.read_dataset()
        graph = build_dataflow([*self.calls(), *self.evaluate_calls()], ROW_KEYS)
        role = ModelRoleSpec(role="actor", model=self.model.without_optimizer(), optimizer=self.model.optimizer)
        workers = self.trainer_specs(dataset, graph, [role], reward=RewardSpec())
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
