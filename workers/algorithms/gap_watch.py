"""GapWatch: the generator's log-probabilities beside the trainer's own, in every train step, of any age.

    first mini-batch ──► FirstPass ──► the loss, as ever
                             └──► logprobs, entropy ──► GapWatch.look ──► gap/..., drift/... in metrics.jsonl
                                                            ├──► TrainNotice ──► log, events.jsonl, rl-status
    some of its answers, scored again after the updates ──► GapWatch.measure ──► what tokens of this age may differ by

The forward pass of a train step's first mini-batch computes what is wanted, under the weights that the step begins
with, in every algorithm and at no cost; an inference call would be a second forward pass, and exists with the decoupled
loss only. What later mini-batches compute belongs to newer weights already.

Tokens of the version that the trainer holds are the gap: both sides have computed the same thing, and each token
counts. Those of older ones are apart by what was learned meanwhile, too: by about as much as the updates since have
moved other answers, which is measured on a few (functional/drift.py). What their mean is apart beyond was not learned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.scheduling.keys import KeyLayout
from corral.workers.algorithms.base import response_mask
from corral.workers.algorithms.functional.logprob_gap import (
    Alarm,
    ComparedTokens,
    Comparison,
    Drift,
    LogprobGap,
    comparable,
)
from corral.workers.algorithms.gap_causes import TwoSides, likely_causes
from corral.workers.backends.base import LossFunction, LossOutput, Numbers
from corral.workers.backends.micro_batches import MicroBatch, scatter_to_answers
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.token_scores import TokenScores
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
from corral.workers.requests.messages import TrainNotice

Floats = npt.NDArray[np.float32]

TOPIC = "logprob_gap"
_LEARNED: Final = 2.0
"""Times what the updates have moved the answers that were scored again, as a root of the mean of squares, which is
above the mean of sizes by itself: new answers may move more than those that were trained on."""
_ONE_IN, _AT_MOST = 16, 64  # answers that are scored again, of those of a rank
_NEIGHBOURS: Final = 4  # answers that are taken together: they may share their prompt
_MOVED: Final = "moved/"  # and the version that the update began with, in a checkpoint


class FirstPass:
    """A loss function that keeps the scores that it is called with, where they were computed.

    A copy to the host waits for all that the device has been given: one between a forward and its backward pass would
    leave it idle in every micro-batch, so there is one for the whole mini-batch, after the last of them.
    """

    def __init__(self, loss: LossFunction[TokenScores]) -> None:
        self._loss = loss
        self._kept: list[tuple[MicroBatch, Tensor]] = []
        """With [2, T - n]: log-probabilities, entropies."""
        self._scores: tuple[Floats, Floats] | None = None

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
        if not micro_batch.is_padding:
            self._kept.append((micro_batch, torch.stack([scores.logprobs.detach(), scores.entropy.detach()])))
        return self._loss(scores, micro_batch)

    def scores_of(self, sample: SequenceSample) -> tuple[Floats, Floats]:
        """Log-probabilities and entropies, packed as the sample that the engine was given; all that was kept."""
        if self._scores is not None:
            return self._scores
        pieces: Sequence[Tensor] = ()
        if self._kept:
            on_host = torch.cat([values for _, values in self._kept], dim=1).cpu()
            pieces = torch.split(on_host, [values.shape[1] for _, values in self._kept], dim=1)
        logprobs, entropy = (
            scatter_to_answers(
                sample,
                [(micro_batch, piece[row]) for (micro_batch, _), piece in zip(self._kept, pieces, strict=True)],
                KeyLayout.PER_SHIFTED_TOKEN,
            )
            for row in (0, 1)
        )
        self._scores = logprobs, entropy
        return self._scores


class GapWatch:
    """Compares, step by step, and tells the first finding of the attempt, alarms, and their end."""

    def __init__(self, sides: TwoSides) -> None:
        self._sides = sides
        self._agreed_until: int | None = None
        self._alarm = Alarm()
        self._drift = Drift()
        self._is_first, self._has_older = True, False
        self._scored: tuple[SequenceSample, Floats] | None = None
        """Answers of the present step that are to be scored again, and what was said of them before its updates."""
        self._notices: list[TrainNotice] = []

    def take_notices(self) -> list[TrainNotice]:
        """What there is to tell since the last time; equal on all ranks."""
        taken, self._notices = self._notices, []
        return taken

    def state_dict(self) -> Numbers:
        """What tokens that are under way will be compared by."""
        return {f"{_MOVED}{version}": moved for version, moved in self._drift.moved.items()}

    def load_state_dict(self, state: Numbers) -> None:
        """Go on from what `state_dict` said; other numbers are left alone."""
        for key, moved in state.items():
            if key.startswith(_MOVED) and isinstance(moved, float | int):
                self._drift = self._drift.after(int(key.removeprefix(_MOVED)), moved)

    def look(
        self, sample: SequenceSample, first: FirstPass, *, of: SequenceSample, version: int, context: ParallelContext
    ) -> dict[str, float]:
        """Statistics of the global batch's first mini-batch; every rank calls it, also without samples.

        Args:
            sample: the mini-batch that the engine was given.
            of: all that the step trains on.
            version: policy version of the weights that it was computed with.
        """
        if "versions" not in sample.data:
            return {}
        logprobs, entropy = first.scores_of(sample)
        versions = np.asarray(sample.data["versions"], dtype=np.int64)
        told = response_mask(sample) & comparable(sample.data["old_logprobs"], logprobs) & (versions >= 0)  # none shown
        older = np.flatnonzero(told & (versions != version))
        drift = _drift(_compared(sample, logprobs, entropy, older), context)
        allowed = self._sides.mean_threshold + _LEARNED * self._drift.since(versions[older], version=version)
        is_known = np.isfinite(allowed)
        now = np.flatnonzero(told & (versions == version))
        present, since = (
            _Look.at(_compared(sample, logprobs, entropy, chosen), chosen, sample, bound, context, is_older=is_older)
            for chosen, bound, is_older in (
                (now, self._sides.threshold, False),
                (older[is_known], allowed[is_known], True),
            )
        )
        num_tokens = context.sum_over_ranks({"tokens": float(response_mask(of).sum())})["tokens"]
        coverage = (present.gap.num_tokens + since.gap.num_tokens) / max(num_tokens, 1.0)
        self._has_older = self._has_older or bool(drift)
        if self._has_older or self._is_first:
            self._scored = _some_answers(sample, logprobs)
        self._is_first = False
        self._note(present, since, version=version, coverage=coverage, context=context)
        stats = {"gap/tokens": float(present.gap.num_tokens), "gap/coverage": coverage} | drift
        if since.gap.num_tokens:
            stats["drift/allowed"] = since.allowed
        if known := [one.of_allowed for one in (present, since) if one.num_tokens]:
            stats["gap/of_allowed"] = max(known)
        if self._alarm.is_raised is not None:
            stats["gap/alarm"] = float(self._alarm.is_raised)
        if present.gap.num_tokens:
            stats |= {
                "gap/max": present.gap.largest,
                "gap/mean": present.gap.mean,
                "gap/kl": present.gap.kl,
                "gap/unequal_fraction": present.gap.num_unequal / present.gap.num_tokens,
                "gap/position": float(present.position),
            }
        return stats

    def measure(
        self,
        logprobs_of: Callable[[SequenceSample], Floats],
        *,
        version: int,
        has_moved: bool,
        context: ParallelContext,
    ) -> dict[str, float]:
        """How far the step's updates have moved some of its answers; every rank calls it once it has made them.

        Costs a forward pass over a sixteenth of the first mini-batch, and over no more than 64 answers of a rank, in
        the first step of an attempt and in all from the first tokens of older weights on; none where nothing moved.
        """
        scored, self._scored = self._scored, None
        if scored is None:
            return {}
        sample, before = scored
        after = logprobs_of(sample) if has_moved else before
        told = response_mask(sample) & comparable(before, after)
        difference = (after - before)[told].astype(np.float64)
        total = context.sum_over_ranks(
            {"tokens": float(len(difference)), "squares": float(np.square(difference).sum())}
        )
        if not total["tokens"]:
            return {}
        moved = (total["squares"] / total["tokens"]) ** 0.5
        self._drift = self._drift.after(version, moved)
        return {"drift/moved": moved}

    def _note(
        self, present: "_Look", older: "_Look", *, version: int, coverage: float, context: ParallelContext
    ) -> None:
        """Tell what has changed; of two findings that of the present weights, which says more."""
        before, self._alarm = self._alarm, self._alarm.after([present, older])
        is_alarm = bool(self._alarm.is_raised)
        if self._alarm.is_raised != before.is_raised:
            told = present if (present.is_beyond if is_alarm else present.num_tokens) else older
            where = context.text_from(told.dp_rank, told.uid)
            causes = likely_causes(
                told.gap, self._sides, version=version, agreed_until=None if told.is_older else self._agreed_until
            )
            self._notices.append(
                TrainNotice(
                    topic=TOPIC,
                    is_alarm=is_alarm,
                    text=told.headline(version=version, is_beyond=is_alarm),
                    details=told.details(where, coverage=coverage),
                    causes=causes if is_alarm else [],
                )
            )
        if present.num_tokens and not is_alarm:
            self._agreed_until = version


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look(Comparison):
    """What some of the tokens of all ranks show, beside what they may differ by."""

    is_older: bool
    """Whether earlier weights made them; then the mean alone may be too much, and no single token."""
    gap: LogprobGap
    dp_rank: int
    """Where the largest difference is."""
    position: int
    """Response tokens of its answer before it."""
    uid: str
    """Its answer; known on that rank only."""
    allowed: float
    """Nats: of the one that differs most, or the mean of what each of them may."""

    @classmethod
    def at(
        cls,
        tokens: ComparedTokens,
        chosen: npt.NDArray[np.int64],
        sample: SequenceSample,
        allowed: float | npt.NDArray[np.float64],
        context: ParallelContext,
        *,
        is_older: bool,
    ) -> "_Look":
        """A sum and a maximum over the ranks."""
        sums, maxima = tokens.totals(threshold=allowed)
        total = context.sum_over_ranks(sums | {"allowed": float(np.broadcast_to(allowed, chosen.shape).sum())})
        gap = LogprobGap.of(total, context.max_over_ranks(maxima))
        dp_rank, position, uid = _place_of_largest(sample, tokens, chosen, gap, context)
        mean = total["allowed"] / max(gap.num_tokens, 1)
        return cls(
            num_tokens=gap.num_tokens,
            of_allowed=(gap.mean if is_older else gap.largest) / mean if gap.num_tokens else 0.0,
            mean=gap.mean,
            shows=mean if is_older else 0.0,
            is_older=is_older,
            gap=gap,
            dp_rank=dp_rank,
            position=position,
            uid=uid,
            allowed=mean,
        )

    def headline(self, *, version: int, is_beyond: bool) -> str:
        """The finding in a line."""
        gap = self.gap
        if self.is_older and is_beyond:
            return (
                f"generator and trainer differ by {gap.mean:.2g} nats on the average token of weights before version "
                f"{version}"
            )
        if self.is_older:
            return f"generator and trainer differ by no more than was learned until version {version}"
        if is_beyond:
            return f"generator and trainer differ by {gap.largest:.2g} nats at version {version}"
        if not gap.num_unequal:
            return f"generator and trainer agree at version {version}, bit for bit"
        return f"generator and trainer agree at version {version} to {gap.largest:.2g} nats"

    def details(self, where: str, *, coverage: float) -> str:
        """The numbers that it rests on."""
        gap = self.gap
        place = f", the largest at token {self.position} of {where}" if gap.num_unequal else ""
        bound = (
            f"and what was learned since explains {self.allowed:.2g}"
            if self.is_older
            else f"the alarm is at {self.allowed:g}"
        )
        return (
            f"{gap.num_tokens} tokens, {gap.num_tokens - gap.num_unequal} of them equal bit for bit, mean difference "
            f"{gap.mean:.2g} nats{place}; {bound}; {coverage:.0%} of the step's tokens were compared"
        )


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
) -> tuple[int, int, str]:
    """(rank, position, answer); of several ranks that have the largest, the first one counts."""
    index = int(np.abs(tokens.difference).argmax()) if len(tokens.answer) else None
    is_here = index is not None and bool(np.abs(tokens.difference[index]) == gap.largest)
    first = context.max_over_ranks({"minus_rank": -float(context.dp_rank) if is_here else -float(context.mesh.dims.dp)})
    dp_rank = int(-first["minus_rank"])
    position, uid = -1, ""
    if index is not None and context.dp_rank == dp_rank:
        answer = int(tokens.answer[index])
        start = answer_slices(sample.answer_lengths("old_logprobs"))[answer].start
        position = int(np.count_nonzero(response_mask(sample)[start : chosen[index]]))
        uid = sample.answer_names()[answer]
    position = int(context.max_over_ranks({"position": float(position)})["position"])
    return dp_rank, position, uid


def _drift(older: ComparedTokens, context: ParallelContext) -> dict[str, float]:
    """What was learned since the tokens were made, as far as they show it; nothing where all are of this version."""
    total = context.sum_over_ranks(older.totals(threshold=np.inf)[0])
    if not total["tokens"]:
        return {}
    return {"drift/mean": total["difference"] / total["tokens"], "drift/kl": total["kl"] / total["tokens"]}


def _some_answers(sample: SequenceSample, logprobs: Floats) -> tuple[SequenceSample, Floats]:
    """Answers from all over a sample, four or more if it has them, and their log-probabilities."""
    slices = answer_slices(sample.answer_lengths("old_logprobs"))
    count = -(-min(len(slices), _ONE_IN * _AT_MOST) // (_ONE_IN * _NEIGHBOURS))
    starts = np.linspace(0, max(0, len(slices) - _NEIGHBOURS), count).astype(int).tolist()
    chosen = sorted({start + place for start in starts for place in range(_NEIGHBOURS)} & set(range(len(slices))))
    kept = [logprobs[slices[answer]] for answer in chosen]
    return sample.select_answers(chosen), np.concatenate([logprobs[:0], *kept])
