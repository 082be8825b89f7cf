"""Direct preference optimisation: the policy's own log-ratio to a reference as the reward of an answer.

inference    input_ids ─► logprobs             (of the reference; renamed to ref_logprobs by the call)

train_step   pairs, ref_logprobs ─► margins ─► one optimizer step
evaluate     pairs, ref_logprobs ─► loss, accuracy, margin
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.experiments.config.algorithm import DPOConfig
from corral.scheduling.keys import built_in
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.base import ModelInterface, compute_logprobs, response_mask
from corral.workers.algorithms.functional.losses import dpo_loss, dpo_margins
from corral.workers.algorithms.functional.packed import sum_per_answer
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
from corral.workers.backends.token_scores import TokenScores
from corral.workers.data.sequence_sample import SequenceSample


class DPOInterface(ModelInterface):
    """Policy and reference alike; see `DPOConfig` for the settings."""

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

    def train_step(self, engine: TrainEngine[TokenScores], sample: SequenceSample, *, version: int) -> dict[str, float]:
        """One optimizer step on the mean over all ranks' pairs; `version` decides nothing, nothing is drawn."""
        pairs = mark_pairs(sample.with_key("loss_mask", response_mask(sample)))
        stats = engine.train_batch(pairs, loss_fn=self._loss, counted=IS_CHOSEN, keeps_groups=True)
        return merge_stats([stats], loss_name="dpo/loss")

    def evaluate(self, engine: TrainEngine[TokenScores], sample: SequenceSample) -> dict[str, float]:
        """Loss, accuracy and margin of the ranks' pairs together."""
        pairs = mark_pairs(sample)
        logprobs, reference = (
            torch.as_tensor(values).double() for values in (compute_logprobs(engine, pairs), pairs.data["ref_logprobs"])
        )
        losses, margins = self._of_pairs(
            logprobs,
            reference,
            mask=torch.from_numpy(response_mask(sample)),
            lengths=[length - 1 for length in pairs.answer_lengths()],
            is_chosen=torch.as_tensor(pairs.data[IS_CHOSEN]),
        )
        return mean_over_pairs(engine.context, losses, margins)

    def _loss(self, scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
        keys = micro_batch.tensors
        losses, margins = self._of_pairs(
            scores.logprobs,
            keys["ref_logprobs"],
            mask=keys["loss_mask"],
            lengths=[length - 1 for length in micro_batch.segment_lengths],
            is_chosen=keys[IS_CHOSEN],
        )
        seen = margins.detach()
        return LossOutput(losses.sum(), {"dpo/accuracy": num_right(seen), "dpo/margin": seen.sum()})

    def _of_pairs(
        self, logprobs: Tensor, reference: Tensor, *, mask: Tensor, lengths: Sequence[int], is_chosen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(losses, margins), each [pairs], from what policy and reference say of each token."""
        (chosen, rejected), (ref_chosen, ref_rejected) = (
            split_pairs(sum_per_answer(torch.where(mask, values, 0.0), lengths), is_chosen)
            for values in (logprobs, reference)
        )
        margins = dpo_margins(
            chosen,
            rejected,
            ref_chosen_logprobs=ref_chosen,
            ref_rejected_logprobs=ref_rejected,
            beta=self._config.beta,
        )
        return dpo_loss(margins, label_smoothing=self._config.label_smoothing), margins
