"""What a model function call runs: an interface, which knows an algorithm, on an engine, which knows a model.

    INFERENCE    sample ─► interface.inference(engine, sample)            ─► new keys, one packed array each
    TRAIN_STEP   sample ─► interface.train_step(engine, sample, version=) ─► statistics

What a checkpoint must keep lives in the engine, or in numbers that a `StatefulInterface` gives and takes.
"""

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.workers.algorithms.functional.token_losses import TokenLosses
from corral.workers.backends.base import AnyEngine, LossOutput, TrainEngine
from corral.workers.backends.token_scores import TokenScores
from corral.workers.backends.train_state import Numbers
from corral.workers.data.sequence_sample import SequenceSample


class ModelInterface(Protocol):
    """An algorithm's side of the model function calls of one role. All ranks of the role call it together."""

    def inference(self, engine: AnyEngine, sample: SequenceSample) -> dict[str, npt.NDArray[Any]]:
        """Keys computed from the sample without changing the model; the call's `output_key_remap` names them."""

    def train_step(self, engine: AnyEngine, sample: SequenceSample, *, version: int) -> dict[str, float]:
        """Update the model on this rank's share of a global batch.

        Args:
            sample: numpy arrays of the call's input keys.
            version: policy version before this step; with the seed, it decides the step's random numbers.

        Returns:
            Statistics of the global batch, equal on all ranks.
        """


@runtime_checkable
class StatefulInterface(ModelInterface, Protocol):
    """An interface that learns numbers of its own, such as a value normaliser's moments: they are in every commit.

    It begins as it was made, and goes on from the commit that its epoch continues.
    """

    def state_dict(self) -> Numbers:
        """The numbers, equal on all ranks."""

    def load_state_dict(self, state: Numbers) -> None:
        """Go on from what `state_dict` gave."""


def response_mask(sample: SequenceSample) -> npt.NDArray[np.bool_]:
    """`loss_mask` of all response tokens: False where the predicted token belongs to the prompt."""
    is_first = np.zeros(sample.total_length("input_ids"), dtype=np.bool_)
    ends = np.cumsum(sample.answer_lengths("input_ids"), dtype=np.int64)
    is_first[np.concatenate([[0], ends[:-1]]) if len(ends) else []] = True
    prompt_mask: npt.NDArray[np.bool_] = np.asarray(sample.data["prompt_mask"], dtype=np.bool_)
    return ~prompt_mask[~is_first]


def compute_logprobs(
    engine: TrainEngine[TokenScores], sample: SequenceSample, *, temperature: float = 1.0
) -> npt.NDArray[np.float32]:
    """Log-probability of every response token under the engine's weights, packed; 0 on prompt tokens."""

    logprobs = engine.forward(sample.select_keys(["input_ids"]), temperature=temperature)["logprobs"]
    return np.where(response_mask(sample), logprobs, np.float32(0.0))


def sum_over_mask(losses: TokenLosses, loss_mask: Tensor, *, weights: Tensor | None = None) -> LossOutput:
    """Sums of a micro-batch over the True entries of the mask; the loss of each token times its weight."""
    weighted = losses.losses if weights is None else losses.losses * weights
    stats = {
        name: torch.where(loss_mask, values.detach().to(torch.float32), 0.0).sum()
        for name, values in losses.stats.items()
    }
    return LossOutput(torch.where(loss_mask, weighted, 0.0).sum(), stats)
