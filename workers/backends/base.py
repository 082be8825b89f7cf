"""What a training backend offers to the algorithms, and nothing about how it does it.

algorithm ── sample, loss_fn ──► train_batch ──► statistics         the same on every rank
algorithm ── sample, post_fn ──► forward     ──► one array          this rank's sample only
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Sums over the tokens of one micro-batch's loss mask."""

    loss_sum: Tensor
    """Scalar with gradient."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Scalar sums without gradient; reported divided by the number of loss tokens of the global batch."""


LossFunction: TypeAlias = Callable[[Tensor, MicroBatch], LossOutput]
"""(logits [T - n, V], micro-batch) -> sums over its loss mask; row t of the logits predicts `micro_batch.labels[t]`."""

PostFunction: TypeAlias = Callable[[Tensor, MicroBatch], Tensor]
"""(logits [T - n, V], micro-batch) -> [T - n] values."""


class TrainEngine(Protocol):
    """One rank's share of a model. All ranks of the gang call the same methods in the same order."""

    context: ParallelContext
    """This rank's place in the gang."""
    step: int
    """Optimizer steps made so far; skipped ones do not count."""
    num_nonfinite: int
    """Optimizer steps of this engine's life that were skipped because loss or gradient was not finite."""
    is_damaged: bool
    """Whether a step has made weights that are not finite: what was finite must be loaded again."""

    def train_batch(self, sample: SequenceSample, *, loss_fn: LossFunction) -> dict[str, float]:
        """One optimizer step on the mean loss over all True entries of `loss_mask`, over all ranks' samples.

        The mean is over the tokens of the global batch, whatever micro-batches and ranks it is cut into. A loss or a
        gradient that is not finite changes no weight: `train/skipped_nonfinite` is then 1. Returns the same numbers on
        every rank.
        """

    def forward(self, sample: SequenceSample, *, post_fn: PostFunction) -> npt.NDArray[np.float32]:
        """`post_fn` of every answer, packed per shifted token in the sample's order; no gradient."""

    def save_weights(self, directory: Path) -> None:
        """Write the weights in Hugging Face's format: safetensors, config and tokenizer files."""

    def save_state(self, directory: Path) -> None:
        """Write what training resumes from, bit for bit: full-precision weights, optimizer, step count, seed."""

    def load_state(self, directory: Path, *, on_progress: Callable[[], None] = lambda: None) -> None:
        """Continue from what `save_state` wrote, possibly with another number of ranks.

        `on_progress` is called for every parameter, since a large state takes longer than any deadline that is useful.
        """
