"""Preferences: what is learned from pairs of answers, each the preferred one and then the other, and what is learned.

    0:a  chosen rejected              is_chosen  True False
    0:b  chosen rejected chosen rejected         True False True False

RewardInterface          inference    input_ids ─► rewards

PairedRewardInterface    train_step   pairs ─► score(chosen) above score(rejected) ─► one optimizer step
                         evaluate     pairs ─► loss, accuracy, margin

DPOInterface             inference    input_ids ─► logprobs             (of the reference; renamed to ref_logprobs)
                         train_step   pairs, ref_logprobs ─► margins ─► one optimizer step
                         evaluate     pairs, ref_logprobs ─► loss, accuracy, margin

What is made of a pair is in `pair_losses.py`. kto judges each answer by itself, against a point that the batch has in
common: the divergence of the policy from the reference, measured before the step.

A loss over pairs needs both in one micro-batch, so the engine keeps the answers to a prompt together; it counts pairs.
Reward models run on an engine with a scalar head. Scores are given as they are: scale, bias and clip of rewards are the
actor's and the critic's settings, whichever reward judged. Direct preference optimisation has the policy's own
log-ratio to a reference as the reward of an answer.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.experiments.config.algorithm import DPOConfig
from corral.scheduling.keys import Key, built_in
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.base import CallKeys, ModelInterface, compute_logprobs, merge_stats, response_mask
from corral.workers.algorithms.functional.losses import bradley_terry_loss
from corral.workers.algorithms.functional.packed import sum_per_answer
from corral.workers.algorithms.pair_losses import PairScores, pair_loss_of
from corral.workers.backends.base import LossOutput, TokenScores, TrainEngine
from corral.workers.backends.micro_batches import MicroBatch
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

    def prepare(self, engine: TrainEngine[Any], sample: SequenceSample) -> SequenceSample:
        """The pairs with what `judge` reads besides, before anything is learned from them."""
        return mark_pairs(sample)

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
        pairs = self.prepare(engine, sample)
        stats = engine.train_batch(pairs, loss_fn=self._loss, counted=IS_CHOSEN, keeps_groups=True)
        return merge_stats([stats], loss_name=f"{self.name}/loss")

    def evaluate(self, engine: TrainEngine[Any], sample: SequenceSample) -> dict[str, float]:
        """Means of `loss`, `accuracy` and `margin` over the pairs of all ranks, and their `count`."""
        pairs = self.prepare(engine, sample)
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


_REFERENCE_POINT = Key("kto_reference_point", "per_answer", "float32")


class DPOInterface(PairInterface):
    """Policy and reference alike; see `DPOConfig` for the settings."""

    name, read = "dpo", "logprobs"
    outputs = {CallType.INFERENCE: built_in("logprobs")}

    def __init__(self, config: DPOConfig) -> None:
        self._config = config
        self._pair_loss = pair_loss_of(config)

    @property
    def inputs(self) -> CallKeys:
        rows = built_in("input_ids", "prompt_mask")
        compared = (*rows, *built_in("ref_logprobs")) if self._config.reads_reference else rows
        learned = dict.fromkeys((CallType.TRAIN_STEP, CallType.EVALUATE), compared)
        return {CallType.INFERENCE: rows, **learned}

    def inference(self, engine: TrainEngine[TokenScores], sample: SequenceSample) -> dict[str, npt.NDArray[np.float32]]:
        """`logprobs` of the responses under the engine's weights, per token."""
        return {"logprobs": compute_logprobs(engine, sample)}

    def prepare(self, engine: TrainEngine[Any], sample: SequenceSample) -> SequenceSample:
        """With kto, also the divergence: the mean over the answers of all ranks of their log-ratios, at least 0.

        The paper estimates it from answers to other prompts; here it is that of the answers themselves, for one forward
        pass more and no further rows.
        """
        pairs = mark_pairs(sample)
        if self._config.loss != "kto":
            return pairs
        log_ratios = (compute_logprobs(engine, sample) - sample.data["ref_logprobs"])[pairs.data["loss_mask"]]
        count = sum(sample.num_answers_per_sample())
        total = engine.context.sum_over_ranks({"nats": float(log_ratios.sum(dtype=float)), "answers": float(count)})
        point = self._config.beta * max(total["nats"] / max(total["answers"], 1.0), 0.0)
        return pairs.with_key(_REFERENCE_POINT, np.full(count, point, np.float32))

    def judge(self, values: Tensor, keys: Mapping[str, Tensor], answer_lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        config, mask = self._config, keys["loss_mask"]
        compared = values - keys["ref_logprobs"] if config.reads_reference else values
        lengths = [length - 1 for length in answer_lengths]
        chosen, rejected = split_pairs(sum_per_answer(torch.where(mask, compared, 0.0), lengths), keys[IS_CHOSEN])
        chosen_tokens, rejected_tokens = split_pairs(sum_per_answer(mask.to(compared.dtype), lengths), keys[IS_CHOSEN])
        point = keys.get(_REFERENCE_POINT.name)
        pairs = PairScores(
            chosen=chosen,
            rejected=rejected,
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
            reference_point=None if point is None else split_pairs(point, keys[IS_CHOSEN])[0],
        )
        return self._pair_loss(pairs, config)


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
