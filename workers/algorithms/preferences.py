"""Preferences: what is learned from pairs of answers, each the preferred one and then the other, and what is learned.

    0:a  chosen rejected              is_chosen  True False
    0:b  chosen rejected chosen rejected         True False True False

RewardInterface          inference    input_ids ─► rewards

PairedRewardInterface    train_step   pairs ─► score(chosen) above score(rejected) ─► one optimizer step
                         evaluate     pairs ─► loss, accuracy, margin

DPOInterface             inference    input_ids ─► logprobs             (of the reference; renamed to ref_logprobs)
                         train_step   pairs, ref_logprobs ─► margins ─► one optimizer step
                         evaluate     pairs, ref_logprobs ─► loss, accuracy, margin

A loss over pairs needs both in one micro-batch, so the engine keeps the answers to a prompt together; it counts pairs.
Reward models run on an engine with a scalar head. Scores are given as they are: scale, bias and clip of rewards are the
actor's and the critic's settings, whoever judged. Direct preference optimisation has the policy's own log-ratio to a
reference as the reward of an answer.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.experiments.config.algorithm import DPOConfig
from corral.scheduling.keys import built_in
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.base import ModelInterface, compute_logprobs, response_mask
from corral.workers.algorithms.functional.losses import bradley_terry_loss, dpo_loss
from corral.workers.algorithms.functional.packed import sum_per_answer
from corral.workers.algorithms.mini_batches import merge_stats
from corral.workers.backends.base import LossOutput, TrainEngine
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.token_scores import TokenScores
from corral.workers.data.sequence_sample import SequenceSample

IS_CHOSEN = "is_chosen"


class RewardInterface(ModelInterface):
    """A reward model as a call of the graph."""

    inputs = {CallType.INFERENCE: built_in("input_ids")}
    outputs = {CallType.INFERENCE: built_in("rewards")}

    def inference(self, engine: TrainEngine[Tensor], sample: SequenceSample) -> dict[str, npt.NDArray[np.float32]]:
        """`rewards`, the score of each answer."""
        return {"rewards": engine.forward(sample.select_keys(["input_ids"]))["scores"]}


class PairInterface(ModelInterface):
    """What is learned from pairs; a subclass judges them."""

    name: ClassVar[str]
    """Of its statistics: name/loss, name/accuracy, name/margin."""
    read: ClassVar[str]
    """What it reads of an engine's forward pass."""

    @abstractmethod
    def judge(self, values: Tensor, keys: Mapping[str, Tensor], answer_lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(losses, margins), each [pairs]; a margin is above 0 where the chosen answer is ahead.

        Args:
            values: of each answer, or of each token that was predicted, as the engine's head gives them.
            keys: of the same answers.
            answer_lengths: tokens of each.
        """

    def train_step(self, engine: TrainEngine[Any], sample: SequenceSample, *, version: int) -> dict[str, float]:
        """One optimizer step on the mean over all ranks' pairs; `version` decides nothing, nothing is drawn."""
        stats = engine.train_batch(mark_pairs(sample), loss_fn=self._loss, counted=IS_CHOSEN, keeps_groups=True)
        return merge_stats([stats], loss_name=f"{self.name}/loss")

    def evaluate(self, engine: TrainEngine[Any], sample: SequenceSample) -> dict[str, float]:
        """Means of `loss`, `accuracy` and `margin` over the pairs of all ranks, and their `count`."""
        pairs = mark_pairs(sample)
        values = torch.as_tensor(engine.forward(pairs.select_keys(["input_ids"]))[self.read]).double()
        keys = {key: torch.as_tensor(array) for key, array in pairs.data.items()}
        losses, margins = self.judge(values, keys, pairs.answer_lengths())
        sums = {"loss": losses.sum(), "accuracy": num_right(margins), "margin": margins.sum()}
        local = {name: float(value) for name, value in sums.items()} | {"count": float(len(margins))}
        total = engine.context.sum_over_ranks(local)
        count = total.pop("count")
        return {name: value / max(count, 1.0) for name, value in total.items()} | {"count": count}

    def _loss(self, scores: Tensor | TokenScores, micro_batch: MicroBatch) -> LossOutput:
        values = scores.logprobs if isinstance(scores, TokenScores) else scores
        losses, margins = self.judge(values, micro_batch.tensors, micro_batch.segment_lengths)
        seen = margins.detach()
        return LossOutput(losses.sum(), {f"{self.name}/accuracy": num_right(seen), f"{self.name}/margin": seen.sum()})


class PairedRewardInterface(PairInterface):
    """Training of a reward model on preferences."""

    name, read = "reward_model", "scores"
    inputs = dict.fromkeys((CallType.TRAIN_STEP, CallType.EVALUATE), built_in("input_ids"))

    def judge(self, values: Tensor, keys: Mapping[str, Tensor], answer_lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen, rejected = split_pairs(values, keys[IS_CHOSEN])
        return bradley_terry_loss(chosen, rejected), chosen - rejected


class DPOInterface(PairInterface):
    """Policy and reference alike; see `DPOConfig` for the settings."""

    name, read = "dpo", "logprobs"
    inputs = {
        CallType.INFERENCE: built_in("input_ids", "prompt_mask"),
        **dict.fromkeys((CallType.TRAIN_STEP, CallType.EVALUATE), built_in("input_ids", "prompt_mask", "ref_logprobs")),
    }
    outputs = {CallType.INFERENCE: built_in("logprobs")}

    def __init__(self, config: DPOConfig) -> None:
        self._config = config

    def inference(self, engine: TrainEngine[TokenScores], sample: SequenceSample) -> dict[str, npt.NDArray[np.float32]]:
        """`logprobs` of the responses under the engine's weights, per token."""
        return {"logprobs": compute_logprobs(engine, sample)}

    def judge(self, values: Tensor, keys: Mapping[str, Tensor], answer_lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        log_ratios = torch.where(keys["loss_mask"], values - keys["ref_logprobs"], 0.0)
        per_answer = sum_per_answer(log_ratios, [length - 1 for length in answer_lengths])
        chosen, rejected = split_pairs(per_answer, keys[IS_CHOSEN])
        margins = self._config.beta * (chosen - rejected)
        return dpo_loss(margins, label_smoothing=self._config.label_smoothing), margins


def mark_pairs(sample: SequenceSample) -> SequenceSample:
    """The sample with `is_chosen`, and where it says what is prompt, with `loss_mask`.

    Raises:
        ValueError: if a prompt has an odd number of answers.
    """
    for uid, count in zip(sample.uids, sample.num_answers_per_sample(), strict=True):
        if count % 2:
            raise ValueError(
                f"sample {uid!r} has {count} answers; pairs are a chosen and a rejected answer, one after the other"
            )
    if "prompt_mask" in sample.data:
        sample = sample.with_key("loss_mask", response_mask(sample))
    return sample.with_key(IS_CHOSEN, np.arange(sum(sample.num_answers_per_sample())) % 2 == 0)


def split_pairs(per_answer: Tensor, is_chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(chosen, rejected), each [pairs], of something per answer; the padding of a micro-batch has no pairs."""
    chosen = is_chosen.nonzero().squeeze(1)
    return per_answer[chosen], per_answer[chosen + 1]


def num_right(margins: Tensor) -> Tensor:
    """How many pairs are ranked as they should be; one whose answers are equal is half right, as a guess would be."""
    return (margins > 0).sum() + 0.5 * (margins == 0).sum()
