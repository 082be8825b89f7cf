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
from corral.experiments.worker_specs import ModelRoleSpec, ModelWorkerSpec, RewardSpec
from corral.scheduling.dataflow import (
    CallType,
    DataTransferHook,
    EvaluateHook,
    ModelFunctionCall,
    ModelName,
    PostHook,
    SaveHook,
)
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
        evaluate: tuple[PostHook, ...] = (EvaluateHook(),) if self.evaluation is not None else ()
        return [
            ModelFunctionCall(
                name="actor_train",
                model_name=ModelName("actor"),
                call_type=CallType.TRAIN_STEP,
                implementation="sft",
                n_seqs=self.train_batch_size,
                input_keys=ROW_KEYS,
                micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=self.model.max_tokens_per_micro_batch),
                pre_hooks=(DataTransferHook(),),
                post_hooks=(*evaluate, SaveHook()),
            )
        ]

    def initial_setup(self) -> ExperimentConfig:
        dataset = self.read_dataset()
        calls = self.calls()
        master = self.master_spec(dataset, calls, models={"actor": self.model}, max_head_offpolicyness=0)
        role = ModelRoleSpec(
            role="actor", model=self.model.without_optimizer(), interface="sft", optimizer=self.model.optimizer
        )
        ranks = [
            ModelWorkerSpec(
                index=rank,
                world_size=self.num_training_ranks,
                roles=[role],
                calls=calls,
                dataset=dataset,
                evaluation=self.evaluation,
                reward=RewardSpec(),
                total_steps=self.control.total_steps(num_rows=dataset.num_rows, batch_size=self.train_batch_size),
            )
            for rank in range(self.num_training_ranks)
        ]
        return ExperimentConfig.build(calls=calls, dataset_keys=ROW_KEYS, workers=[master, *ranks])

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
