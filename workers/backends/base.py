"""What a training backend offers to the algorithms, and nothing about how it does it.

    model ──head──► scores of a micro-batch        lm: TokenScores   value: [T] values   scalar: [n] scores

    algorithm ── sample, loss_fn(scores, micro-batch) ──► train_batch ──► statistics      the same on every rank
    algorithm ── sample ────────────────────────────────► forward ──────► arrays          this rank's sample only

The engine makes the scores and a loss reads them: no loss ever sees logits, so that a head which is cut over the
vocabulary, computed in chunks, or on the last of several pipeline stages changes no algorithm.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends.files.share import WeightShare
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.train_state import Numbers, StateShard
from corral.workers.checkpoint.durable_file import FileEntry, no_progress
from corral.workers.data.sequence_sample import SequenceSample

ScoresT = TypeVar("ScoresT")
ScoresT_co = TypeVar("ScoresT_co", covariant=True)
"""What the engine's head makes of a micro-batch: TokenScores of a language model, a Tensor of the other heads."""

LOSS_MASK = "loss_mask"


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


LossFunction: TypeAlias = Callable[[ScoresT, MicroBatch], LossOutput]
"""(scores, micro-batch) -> sums over it. For a language model, entry t of the scores is that of
`micro_batch.labels[t]`; values are one per token of the row, scalar scores one per answer."""

StepCondition: TypeAlias = Callable[[Mapping[str, float]], bool]
"""Statistics of the global batch, `loss` among them -> whether the optimizer may step on its gradient."""


class TrainEngine(Protocol[ScoresT_co]):
    """One rank's share of a model. All ranks of the model's mesh call the same methods in the same order."""

    context: ParallelContext
    """This rank's place in the model's mesh."""
    micro_batches: MicroBatchSpec
    """How the samples of the present call are cut; set before each call."""

    @property
    def model(self) -> nn.Module:
        """The model as transformers has it, for generation: it may be cut over ranks, or a copy made for the asker.

        A collective of the mesh, and so is each use of a model that is cut.
        """

    num_parameters: int
    """Of the whole model, as it is exported."""
    num_trained: int
    """Those that a step changes: all of them, or adapters and a new score layer."""
    step: int
    """Optimizer steps made so far; skipped ones do not count."""
    num_nonfinite: int
    """Optimizer steps of this engine's life that were skipped because loss or gradient was not finite."""
    is_damaged: bool
    """Whether a step has made weights that are not finite: what was finite must be loaded again."""

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
            temperature: that the answers were sampled with; logits are divided by it.
            counted: a boolean key of the sample.
            keeps_groups: whether all answers of a prompt must be in one micro-batch, as a loss over pairs needs.
            may_step: None steps whenever all is finite; where it says no, no weight changes and
                `train/skipped_early_stop` is 1.
        """

    def forward(self, sample: SequenceSample, *, temperature: float = 1.0) -> dict[str, npt.NDArray[np.float32]]:
        """The head's scores of every answer, packed in the sample's order; no gradient.

        lm: `logprobs` and `entropy` per shifted token. value: `values` per token. scalar: `scores` per answer.
        """

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by their names in Hugging Face's format, one after the other, on this rank's device.

        With adapters: the model that it and they amount to, made anew.

        Every rank of the mesh must read to the end: making a tensor whole may be a collective. A tensor may be the
        engine's own: copy what must outlive the next step, and write to none.
        """

    def import_weights(self, weights: Iterable[tuple[str, Tensor]], *, eta: float = 1.0) -> None:
        """Take over weights of the same names and shapes: own = eta * given + (1 - eta) * own.

        Every rank of the mesh is given the same whole tensors and keeps its part; the optimizer's state stays.

        Raises:
            ValueError: if a weight is missing, unknown, given twice or of another shape, `eta` is outside [0, 1], or
                adapters are trained beside weights that stay.
        """

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory, until `onload` or the next use.

        Tensors that `export_weights` gave must not be read meanwhile.
        """

    def onload(self) -> None:
        """Bring back what `offload` moved; nothing happens if it is here."""

    def save_weights(
        self, directory: Path, *, base: Path | None = None, on_progress: Callable[[], None] = no_progress
    ) -> dict[str, FileEntry]:
        """Write the weights in Hugging Face's format: safetensors, config and tokenizer files.

        Every rank writes some of the files; all of them together are the model. What is returned is on disk. With
        adapters, the folder `adapter` has them in peft's format besides.

        Args:
            base: an earlier version that `save_weights` wrote, under a manifest: each weight file that differs little
                from the same one there has a delta beside it.

        Returns:
            The files that this rank wrote, by name.
        """

    def weight_share(self) -> WeightShare:
        """What `save_weights` writes on this rank, to be written, or copied and written later; a collective."""

    def state_shard(self, *, extra: Numbers | None = None) -> StateShard:
        """What training resumes from, bit for bit: full-precision trained weights, optimizer, step count, seed.

        The tensors are the engine's own: write them, or copy them, before the next step.

        Args:
            extra: numbers that belong to the role and to none of its parameters; the same on every rank.
        """

    def load_state(self, directory: Path, *, on_progress: Callable[[], None] = no_progress) -> Numbers:
        """Continue from what all ranks' `state_shard` wrote, possibly with another number of ranks.

        `on_progress` is called for every part that is read, since a large state takes longer than any useful deadline.

        Returns:
            The extra numbers that were saved.
        """


AnyEngine: TypeAlias = TrainEngine[Any]
"""An engine whose head is known to its interface only."""
