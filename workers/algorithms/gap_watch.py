"""GapWatch: the generator's log-probabilities beside the trainer's own, in every train step.

    first mini-batch ──► FirstPass ──► the loss, as ever
                             └──► logprobs, entropy ──► GapWatch.look ──► gap/..., drift/... in metrics.jsonl
                                                            └──► TrainNotice ──► log, events.jsonl, rl-status

The forward pass of a train step's first mini-batch computes what is wanted, under the weights that the step begins
with, in every algorithm and at no cost; an inference call would be a second forward pass, and exists with the decoupled
loss only. What later mini-batches compute belongs to newer weights already.

Tokens of the version that the trainer holds are the gap: both sides have computed the same thing. Tokens of older ones
are apart, as drift, since their difference is what was learned meanwhile.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.scheduling.keys import KeyLayout
from corral.workers.algorithms.base import response_mask
from corral.workers.algorithms.functional.logprob_gap import ComparedTokens, LogprobGap, comparable
from corral.workers.algorithms.gap_causes import TwoSides, likely_causes
from corral.workers.backends.base import LossFunction, LossOutput
from corral.workers.backends.micro_batches import MicroBatch, scatter_to_answers
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.token_scores import TokenScores
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
from corral.workers.requests.messages import TrainNotice

Floats = npt.NDArray[np.float32]

TOPIC = "logprob_gap"


class FirstPass:
    """A loss function that keeps the scores that it is called with, where they were computed.

    A copy to the host waits for all that the device has been given: one between a forward and its backward pass would
    leave it idle in every micro-batch, so there is one for the whole mini-batch, after the last of them.
    """

    def __init__(self, loss: LossFunction[TokenScores]) -> None:
        self._loss = loss
        self._kept: list[tuple[MicroBatch, Tensor]] = []
        """With [2, T - n]: log-probabilities, entropies."""

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
        if not micro_batch.is_padding:
            self._kept.append((micro_batch, torch.stack([scores.logprobs.detach(), scores.entropy.detach()])))
        return self._loss(scores, micro_batch)

    def scores_of(self, sample: SequenceSample) -> tuple[Floats, Floats]:
        """Log-probabilities and entropies, packed as the sample that the engine was given."""
        logprobs: list[tuple[MicroBatch, Tensor]] = []
        entropy: list[tuple[MicroBatch, Tensor]] = []
        if self._kept:
            on_host = torch.cat([values for _, values in self._kept], dim=1).cpu()
            pieces = torch.split(on_host, [values.shape[1] for _, values in self._kept], dim=1)
            for (micro_batch, _), piece in zip(self._kept, pieces, strict=True):
                logprobs.append((micro_batch, piece[0]))
                entropy.append((micro_batch, piece[1]))
        layout = KeyLayout.PER_SHIFTED_TOKEN
        return scatter_to_answers(sample, logprobs, layout), scatter_to_answers(sample, entropy, layout)


class GapWatch:
    """Compares, step by step, and tells the first finding of the attempt, alarms, and their end."""

    def __init__(self, sides: TwoSides) -> None:
        self._sides = sides
        self._agreed_until: int | None = None
        self._is_alarmed: bool | None = None
        """None before anything was compared."""
        self._notices: list[TrainNotice] = []

    def take_notices(self) -> list[TrainNotice]:
        """What there is to tell since the last time; equal on all ranks."""
        taken, self._notices = self._notices, []
        return taken

    def look(
        self, sample: SequenceSample, first: FirstPass, *, version: int, context: ParallelContext
    ) -> dict[str, float]:
        """Statistics of the global batch's first mini-batch; every rank calls it, also without samples.

        Args:
            sample: the mini-batch that the engine was given.
            version: policy version of the weights that it was computed with.
        """
        if "versions" not in sample.data:
            return {}
        logprobs, entropy = first.scores_of(sample)
        versions = np.asarray(sample.data["versions"])
        told = response_mask(sample) & comparable(sample.data["old_logprobs"], logprobs)
        chosen = np.flatnonzero(told & (versions == version))
        tokens = _compared(sample, logprobs, entropy, chosen)
        threshold = self._sides.threshold
        gap = LogprobGap.of(
            context.sum_over_ranks(tokens.sums(threshold=threshold)),
            context.max_over_ranks(tokens.maxima(threshold=threshold)),
        )
        drift = _drift(_compared(sample, logprobs, entropy, np.flatnonzero(told & (versions != version))), context)
        if not gap.num_tokens:
            return {"gap/tokens": 0.0} | drift
        place = _place_of_largest(sample, tokens, chosen, gap, context)
        self._note(gap, place, version=version, context=context)
        return {
            "gap/tokens": float(gap.num_tokens),
            "gap/max": gap.largest,
            "gap/mean": gap.mean,
            "gap/kl": gap.kl,
            "gap/unequal_fraction": gap.num_unequal / gap.num_tokens,
            "gap/position": float(place.position),
            "gap/alarm": float(gap.largest > threshold),
        } | drift

    def _note(self, gap: LogprobGap, place: "_Place", *, version: int, context: ParallelContext) -> None:
        is_beyond = gap.largest > self._sides.threshold
        if is_beyond != self._is_alarmed:
            where = context.text_from(place.dp_rank, place.uid)
            causes = likely_causes(gap, self._sides, version=version, agreed_until=self._agreed_until)
            self._notices.append(
                TrainNotice(
                    topic=TOPIC,
                    is_alarm=is_beyond,
                    text=_headline(gap, version=version, is_beyond=is_beyond),
                    details=_details(gap, f"token {place.position} of {where}", threshold=self._sides.threshold),
                    causes=causes if is_beyond else [],
                )
            )
        self._is_alarmed = is_beyond
        if not is_beyond:
            self._agreed_until = version


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the largest difference is."""

    dp_rank: int
    position: int
    """Response tokens of its answer before it."""
    uid: str
    """Its answer; known on that rank only."""


def _compared(
    sample: SequenceSample, logprobs: Floats, entropy: Floats, chosen: npt.NDArray[np.int64]
) -> ComparedTokens:
    """The chosen entries of the packed arrays."""
    lengths = sample.answer_lengths("old_logprobs")
    answer = np.repeat(np.arange(len(lengths)), lengths)
    return ComparedTokens(
        recorded=np.asarray(sample.data["old_logprobs"])[chosen].astype(np.float64),
        recomputed=logprobs[chosen].astype(np.float64),
        entropy=entropy[chosen].astype(np.float64),
        answer=answer[chosen],
    )


def _place_of_largest(
    sample: SequenceSample,
    tokens: ComparedTokens,
    chosen: npt.NDArray[np.int64],
    gap: LogprobGap,
    context: ParallelContext,
) -> _Place:
    """One maximum over ranks; of several ranks that have the largest, the first one's counts."""
    index = tokens.place_of_largest
    is_here = index is not None and bool(np.abs(tokens.difference[index]) == gap.largest)
    first = context.max_over_ranks({"minus_rank": -float(context.dp_rank) if is_here else -float(context.dp_size)})
    dp_rank = int(-first["minus_rank"])
    position, uid = -1, ""
    if index is not None and context.dp_rank == dp_rank:
        answer = int(tokens.answer[index])
        start = answer_slices(sample.answer_lengths("old_logprobs"))[answer].start
        position = int(np.count_nonzero(response_mask(sample)[start : chosen[index]]))
        uid = sample.answer_names()[answer]
    position = int(context.max_over_ranks({"position": float(position)})["position"])
    return _Place(dp_rank=dp_rank, position=position, uid=uid)


def _drift(older: ComparedTokens, context: ParallelContext) -> dict[str, float]:
    """What was learned since the tokens were made, as far as they show it; nothing where all are of this version."""
    total = context.sum_over_ranks(
        {
            "tokens": float(len(older.answer)),
            "size": float(np.abs(older.difference).sum()),
            "kl": float(older.kl().sum()),
        }
    )
    if not total["tokens"]:
        return {}
    return {"drift/mean": total["size"] / total["tokens"], "drift/kl": total["kl"] / total["tokens"]}


def _headline(gap: LogprobGap, *, version: int, is_beyond: bool) -> str:
    if is_beyond:
        return f"generator and trainer differ by {gap.largest:.2g} nats at version {version}"
    if not gap.num_unequal:
        return f"generator and trainer agree at version {version}, bit for bit"
    return f"generator and trainer agree at version {version} to {gap.largest:.2g} nats"


def _details(gap: LogprobGap, place: str, *, threshold: float) -> str:
    where = f", the largest at {place}" if gap.num_unequal else ""
    return (
        f"{gap.num_tokens} tokens, {gap.num_tokens - gap.num_unequal} of them equal bit for bit, mean difference "
        f"{gap.mean:.2g} nats{where}; the alarm is at {threshold:g}"
    )
