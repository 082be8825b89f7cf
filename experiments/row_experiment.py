"""Experiments that learn from rows of a dataset and generate nothing: sft, dpo, reward_model, and what they share.

    rows ──► calls of a step, on the roles' models ──► new weights
    held-out rows ──► the same interface, by the same keys ──► loss and what else it says

Workers: the master and the model workers; the latter read the rows themselves.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from corral.experiments.config.algorithm import DPOConfig
from corral.experiments.config.data import RowKind
from corral.experiments.config.model import ModelConfig, TrainedModelConfig
from corral.experiments.errors import ConfigProblem
from corral.experiments.experiment import Experiment
from corral.experiments.inputs.model_directory import context_length
from corral.experiments.prompts.length_limits import LengthLimits
from corral.scheduling.model_function_call import CallType, ModelFunctionCall

ROW_KEYS = ("input_ids", "prompt_mask")


class RowExperiment(Experiment):
    """Learns from rows: problems with their answers, or preferences."""

    @property
    def sample_keys(self) -> tuple[str, ...]:
        return ROW_KEYS

    def evaluate_calls(self) -> list[ModelFunctionCall]:
        """Held-out rows go through what trains, but that nothing is learned from them."""
        if self.evaluation is None:
            return []
        trains = self.calls()[-1]  # the last one does
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
            template_arguments=self.dataset.chat_template_kwargs,
            max_row_tokens=min(model.max_tokens_per_micro_batch for model in self.models.values()),
            max_sequence_tokens=min((length for length in contexts if length is not None), default=None),
        )


# Supervised fine-tuning: one model function call, fed by a dataset.
#
# dataset ──input_ids, prompt_mask──► actor_train


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
        # The model answers problems, and the answers are compared; conversations have a loss only.
        return "answers" if self.answers_held_out else "conversations"

    def calls(self) -> list[ModelFunctionCall]:
        return [self.train_call("sft", input_keys=ROW_KEYS)]


# Direct preference optimisation: a policy that learns from preferences what a reward model would have said.
#
#     preferences ──input_ids, prompt_mask──┬──► ref_inf ──ref_logprobs──┐
#                                           └────────────────────────────┴──► actor_train
#
# The reference may have ranks of its own: actor=fsdp:d1,ref=fsdp:d1. It is the same model for held-out rows. A loss
# that reads no reference (simpo) has none.


class DPOExperiment(RowExperiment):
    """Direct preference optimisation, or IPO, SimPO, KTO, on the preferences in a dataset."""

    experiment: str = "dpo"
    """Direct preference optimisation."""
    allocation: str = "fsdp:d1"
    """Who trains, on how many GPUs or processes: fsdp:d4, or actor=fsdp:d2,ref=fsdp:d1."""
    actor: TrainedModelConfig
    """The policy."""
    ref: ModelConfig | None = None
    """The reference model, usually what the policy starts from; None with dpo.loss: simpo, which reads none."""
    dpo: DPOConfig = DPOConfig()
    """The algorithm."""

    beside_first: ClassVar[frozenset[str]] = frozenset({"ref"})

    @property
    def row_kind(self) -> RowKind:
        return "preferences"

    def calls(self) -> list[ModelFunctionCall]:
        if self.ref is None:
            return [self.train_call("dpo", input_keys=ROW_KEYS)]
        outputs = {"logprobs": "ref_logprobs"}
        return [
            self.inference_call("ref_inf", "ref", "dpo", input_keys=ROW_KEYS, outputs=outputs),
            self.train_call("dpo", input_keys=(*ROW_KEYS, "ref_logprobs")),
        ]

    def find_own_problems(self) -> Iterator[ConfigProblem]:
        yield from super().find_own_problems()
        if self.ref is None and self.dpo.reads_reference:
            yield ConfigProblem(
                f"dpo.loss {self.dpo.loss} compares with a reference model, and there is none",
                "give ref.path (the model that the actor starts from), or set dpo.loss: simpo",
                path=("ref",),
            )
        if self.ref is not None and not self.dpo.reads_reference:
            yield ConfigProblem(f"dpo.loss {self.dpo.loss} reads no reference model", "remove ref", path=("ref",))

    def role_settings(self, role: str) -> Mapping[str, Any]:
        return {"dpo": self.dpo}


# Training of a reward model: one score per answer, such that preferred answers have the higher one.
#
#     preferences ──input_ids──► reward_train
#
# A model without a score layer gets one that is 0. What is exported is a sequence classifier of Hugging Face, and a
# reward model for PPO.


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
