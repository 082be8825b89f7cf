"""What a training backend offers to the algorithms, and nothing about how it does it.

    model ──head──► scores of a micro-batch        lm: TokenScores   value: [T] values   scalar: [n] scores

    algorithm ── sample, loss_fn(scores, micro-batch) ──► train_batch ──► statistics      the same on every rank
    algorithm ── sample ────────────────────────────────► forward ──────► arrays          this rank's sample only

The engine makes the scores and a loss reads them: no loss ever sees logits, so that a head which is cut over the
vocabulary, computed in chunks, or on the last of several pipeline stages changes no algorithm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample

ScoresT = TypeVar("ScoresT")
ScoresT_co = TypeVar("ScoresT_co", covariant=True)
"""What the engine's head makes of a micro-batch: TokenScores of a language model, a Tensor of the other heads."""

LOSS_MASK = "loss_mask"


# What the engine makes of a language model's output, and losses read: nothing of it is as long as the vocabulary.


@dataclass(frozen=True, slots=True)
class TokenScores:
    """A language model's scores of the tokens that came next in one micro-batch."""

    logprobs: Tensor
    """[T - n] float32, aligned with `MicroBatch.labels`; with gradient in training."""
    entropy: Tensor
    """[T - n] float32 of the distribution that each token came from; without gradient."""
    asked: Tensor | None = None
    """[T - n, k] float32: log-probabilities of `MicroBatch.asked`; with gradient in training."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Sums over one micro-batch: over the True entries of the key that is counted, which is the loss mask."""

    loss_sum: Tensor
    """Scalar with gradient."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Scalar sums without gradient; reported divided by the number of counted entries of the global batch."""
    denominators: tuple[Tensor, Tensor] | None = None
    """Scalars that, added up over the global batch, the loss and the statistics are divided by in the place of the
    number of counted entries: what a loss knows only once it has the scores."""


Numbers: TypeAlias = dict[str, float | list[float]]
"""What belongs to a role and to none of its parameters: a value normaliser's moments, a KL controller's coefficient."""

LossFunction: TypeAlias = Callable[[ScoresT, MicroBatch], LossOutput]
"""(scores, micro-batch) -> sums over it. For a language model, entry t of the scores is that of
`micro_batch.labels[t]`; values are one per token of the row, scalar scores one per answer."""

StepCondition: TypeAlias = Callable[[Mapping[str, float]], bool]
"""Statistics of the global batch, `loss` among them -> whether the optimizer may step on its gradient."""


class TrainEngine(Protocol[ScoresT_co]):
    """One rank's shard of a model, as algorithms see it; the rest of it is `mesh_engine.MeshEngine`.

    All ranks of the model's mesh call the same methods in the same order.
    """

    context: ParallelContext
    """This rank's place in the model's mesh."""
    micro_batches: MicroBatchSpec
    """How the samples of the present call are cut; set before each call."""
    step: int
    """Optimizer steps made so far; skipped ones do not count."""

    def train_batch(
        self,
        sample: SequenceSample,
        *,
        loss_fn: LossFunction[ScoresT_co],
        temperature: float = 1.0,
        counted: str = LOSS_MASK,
        keeps_groups: bool = False,
        may_step: StepCondition | None = None,
    ) -> dict[str, float]:
        """One optimizer step on the mean loss over all True entries of `counted`, over all ranks' samples.

        The mean is that of the global batch, whatever micro-batches and ranks it is cut into. A loss or a gradient that
        is not finite changes no weight: `train/skipped_nonfinite` is then 1. Returns the same numbers on every rank.

        Args:
            temperature: that the answers were sampled with, where the sample has no `temperatures`; logits are divided
                by it.
            counted: a boolean key of the sample.
            keeps_groups: whether all answers of a prompt must be in one micro-batch, as a loss over pairs needs.
            may_step: None steps whenever all is finite; where it says no, no weight changes and
                `train/skipped_early_stop` is 1.
        """

    def forward(
        self, sample: SequenceSample, *, temperature: float = 1.0, top_k: int = 0
    ) -> dict[str, npt.NDArray[np.float32]]:
        """The head's scores of every answer, packed in the sample's order; no gradient.

        lm: `logprobs` and `entropy` per shifted token. value: `values` per token. scalar: `scores` per answer.

        Args:
            temperature: as in `train_batch`.
            top_k: above 0 the `top_k` likeliest tokens in the place of each one that came next, in place of its scores:
                lm: `topk_ids` (whole numbers) and `topk_logprobs`, so many per shifted token, the likeliest first.
        """


AnyEngine: TypeAlias = TrainEngine[Any]
"""An engine whose head is known to its interface only."""
