"""Reward models: one score per answer, learned from pairs, given as rewards.

RewardInterface          inference    input_ids ─► rewards

PairedRewardInterface    train_step   pairs ─► score(chosen) above score(rejected) ─► one optimizer step
                         evaluate     pairs ─► loss, accuracy, margin

Both run on an engine with a scalar head. Scores are given as they are: scale, bias and clip of rewards are the actor's
and the critic's settings, whoever judged.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.scheduling.keys import built_in
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.base import ModelInterface
from corral.workers.algorithms.functional.losses import bradley_terry_loss
from corral.workers.algorithms.mini_batches import merge_stats
from corral.workers.algorithms.pairs import (
    IS_CHOSEN,
    mark_pairs,
    mean_over_pairs,
    num_right,
    split_pairs,
)
from corral.workers.backends.base import LossOutput, TrainEngine
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.data.sequence_sample import SequenceSample


class RewardInterface(ModelInterface):
    """A reward model as a call of the graph."""

    inputs = {CallType.INFERENCE: built_in("input_ids")}
    outputs = {CallType.INFERENCE: built_in("rewards")}

    def inference(self, engine: TrainEngine[Tensor], sample: SequenceSample) -> dict[str, npt.NDArray[np.float32]]:
        """`rewards`, the score of each answer."""
        return {"rewards": engine.forward(sample.select_keys(["input_ids"]))["scores"]}


class PairedRewardInterface(ModelInterface):
    """Training of a reward model on preferences."""

    inputs = dict.fromkeys((CallType.TRAIN_STEP, CallType.EVALUATE), built_in("input_ids"))

    def train_step(self, engine: TrainEngine[Tensor], sample: SequenceSample, *, version: int) -> dict[str, float]:
        """One optimizer step on the mean over all ranks' pairs; `version` decides nothing, nothing is drawn."""
        pairs = mark_pairs(sample.select_keys(["input_ids"]))
        stats = engine.train_batch(pairs, loss_fn=_loss, counted=IS_CHOSEN, keeps_groups=True)
        return merge_stats([stats], loss_name="reward_model/loss")

    def evaluate(self, engine: TrainEngine[Tensor], sample: SequenceSample) -> dict[str, float]:
        """Loss, accuracy and margin of the ranks' pairs together."""
        pairs = mark_pairs(sample.select_keys(["input_ids"]))
        scores = torch.as_tensor(engine.forward(pairs)["scores"]).double()
        chosen, rejected = split_pairs(scores, torch.as_tensor(pairs.data[IS_CHOSEN]))
        return mean_over_pairs(engine.context, bradley_terry_loss(chosen, rejected), chosen - rejected)


def _loss(scores: Tensor, micro_batch: MicroBatch) -> LossOutput:
    chosen, rejected = split_pairs(scores, micro_batch.tensors[IS_CHOSEN])
    margin = (chosen - rejected).detach()
    return LossOutput(
        bradley_terry_loss(chosen, rejected).sum(),
        {"reward_model/accuracy": num_right(margin), "reward_model/margin": margin.sum()},
    )
