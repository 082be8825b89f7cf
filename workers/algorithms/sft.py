"""Supervised fine-tuning: the mean cross entropy of response tokens.

inference    input_ids, prompt_mask ─► logprobs
train_step   input_ids, prompt_mask ─► one optimizer step
evaluate     input_ids, prompt_mask ─► loss, perplexity
"""

import math

import numpy as np
import numpy.typing as npt

from corral.scheduling.keys import built_in
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.base import (
    ModelInterface,
    compute_logprobs,
    merge_stats,
    response_mask,
    sum_over_mask,
)
from corral.workers.algorithms.functional.losses import sft_loss
from corral.workers.backends.base import LossOutput, TokenScores, TrainEngine
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.data.sequence_sample import SequenceSample


class SFTInterface(ModelInterface):
    """Maximum likelihood of the responses."""

    inputs = dict.fromkeys(
        (CallType.INFERENCE, CallType.TRAIN_STEP, CallType.EVALUATE), built_in("input_ids", "prompt_mask")
    )
    outputs = {CallType.INFERENCE: built_in("logprobs")}

    def inference(self, engine: TrainEngine[TokenScores], sample: SequenceSample) -> dict[str, npt.NDArray[np.float32]]:
        """`logprobs` of the responses under the engine's weights."""
        return {"logprobs": compute_logprobs(engine, sample)}

    def train_step(self, engine: TrainEngine[TokenScores], sample: SequenceSample, *, version: int) -> dict[str, float]:
        """One optimizer step; `version` decides nothing here, since nothing is drawn at random."""
        stats = engine.train_batch(sample.with_key("loss_mask", response_mask(sample)), loss_fn=_loss)
        return merge_stats([stats], loss_name="sft/loss")

    def evaluate(self, engine: TrainEngine[TokenScores], sample: SequenceSample) -> dict[str, float]:
        """Loss and perplexity per response token of the ranks' samples together."""
        logprobs = compute_logprobs(engine, sample)
        total = engine.context.sum_over_ranks(
            {"loss": -float(logprobs.sum(dtype=np.float64)), "tokens": float(response_mask(sample).sum())}
        )
        loss = total["loss"] / max(total["tokens"], 1.0)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "count": total["tokens"]}


def _loss(scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
    return sum_over_mask(sft_loss(scores.logprobs), micro_batch.tensors["loss_mask"])
