"""GapWatch: the generator's log-probabilities beside the trainer's own, in every train step, of any age.

    first mini-batch ──► FirstPass ──► the loss, as ever
                             └──► logprobs, entropy ──► GapWatch.look ──► gap/..., drift/... in metrics.jsonl
                                                            ├──► TrainNotice ──► log, events.jsonl, rl-status
    some of its answers, scored again after the updates ──► GapWatch.measure ──► what older tokens may differ by

The forward pass of a train step's first mini-batch computes what is wanted, under the weights that the step begins
with, in every algorithm and at no cost; an inference call would be a second forward pass, and exists with the decoupled
loss only. What later mini-batches compute belongs to newer weights already.

What the numbers say is decided in `functional/logprob_gap.py`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.worker_specs import BehaviourSpec
from corral.scheduling.keys import KeyLayout
from corral.workers.algorithms.base import generated, response_mask
from corral.workers.algorithms.functional.logprob_gap import Alarm, ComparedTokens, Drift, LogprobGap, MeanSize
from corral.workers.backends.base import LossFunction, LossOutput, Numbers, TokenScores
from corral.workers.backends.micro_batches import MicroBatch, scatter_to_answers
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
from corral.workers.requests.messages import TrainNotice

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

TOPIC = "logprob_gap"
_MOST_SCORED: Final = 64  # answers of a rank that are scored again
_MOVED: Final = "moved/"  # and the version that the update began with, in a checkpoint


# Why generator and trainer disagree: the shape of the differences, and what is configured ──► causes, likeliest first.
#
#     agreed before ──► the weights of this version   follows temperature ──► temperature   never negative ──► top_p
#     types differ, or small without a pattern ──► arithmetic      some answers only ──► where to look
#
# Pure. Every sentence rests on something that was measured or configured; where nothing stands out, it says what is
# left.

_EXACT_NATS = 1e-3
"""float32 on both sides: other shapes of the same products move a log-probability by 1e-5 on tiny models (measured)
and by some 1e-4 through tens of layers. A mistake moves it by more than that on some token of a batch."""
_COARSE_NATS = 0.5
"""bfloat16 keeps 8 bits: logits between 16 and 32 lie 1/8 apart, and a rare token collects several such steps. Rounded
weights are as coarse, and so may keys and values, or experts, be that are a version older than the token."""
_COARSE_MEAN_NATS = 0.1  # the mean in bfloat16 is 0.03 (measured), and less with weights that are rounded to 8 bits
_TEMPERATURE_FRACTION = (
    0.5  # of the squared differences: 0.5 to 1 for temperatures up to 2.5 times off, 0.0 for rounding
)
_MOST_ROUNDING_NATS = 0.05  # mean over tokens: 0.03 was measured in bfloat16, and wrong weights give more than 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSides:
    """The configuration of generator and trainer."""

    behaviour: BehaviourSpec
    """The generator."""
    dtype: str
    """Type of the trainer's matrix products."""
    ppo: PPOConfig

    @property
    def threshold(self) -> float:
        """Nats above which a single token's difference is an alarm."""
        if self.ppo.gap_alarm is not None:
            return self.ppo.gap_alarm
        return _EXACT_NATS if self.behaviour.is_exact and self.dtype == "float32" else _COARSE_NATS

    @property
    def mean_threshold(self) -> float:
        """Nats that the average of many tokens may differ by for want of precision."""
        return self.threshold if self.ppo.gap_alarm is not None else min(self.threshold, _COARSE_MEAN_NATS)


def likely_causes(gap: LogprobGap, sides: TwoSides, *, version: int, agreed_until: int | None) -> list[str]:
    """Sentences, likeliest first.

    Args:
        version: of the weights that both sides should have used.
        agreed_until: the newest version before it at which both sides agreed in this attempt; what does not change
            with the weights cannot be the cause then.
    """
    if agreed_until is not None:
        main = [
            f"weights: both sides agreed until version {agreed_until}, so those of version {version} have not reached "
            "the generator, or not whole"
        ]
    else:
        main = list(_standing_causes(gap, sides, version=version))
    return [*main, *_whereabouts(gap), *_remedy(sides)]


def _standing_causes(gap: LogprobGap, sides: TwoSides, *, version: int) -> Iterator[str]:
    """Causes that exist from the first version on."""
    sampling, behaviour = sides.behaviour.sampling, sides.behaviour
    if gap.explained_by_temperature > _TEMPERATURE_FRACTION and gap.temperature_ratio > 0.0:
        about = (
            f"{1.0 / gap.temperature_ratio:.2g} times what the trainer computes with, as rows say it "
            "(dataset.columns.temperature)"
            if behaviour.has_row_temperatures
            else f"{sampling.temperature / gap.temperature_ratio:.2g}, the trainer computes with "
            f"rollout.sampling.temperature {sampling.temperature:g}"
        )
        yield (
            f"temperature: another one explains {gap.explained_by_temperature:.0%} of the differences; the generator's "
            f"numbers are those of about {about}"
        )
        return
    is_truncated = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
    if is_truncated and gap.most_negative < gap.mean * 1e-3:
        yield (
            f"top_p, top_k, min_p: no token is less likely to the generator than to the trainer, as if it reported "
            f"what is left after top_p {sampling.top_p:g}, top_k {sampling.top_k} and min_p {sampling.min_p:g}; "
            "it has to report the whole distribution's"
        )
        return
    if behaviour.rounded_by:
        yield f"arithmetic: the generator's weights are rounded ({', '.join(behaviour.rounded_by)})"
    if behaviour.keeps_cache:
        yield "weights.update_mode: answers under way keep the keys and values of older weights (in_place)"
    if behaviour.keeps_experts:
        yield "experts: answers that newer weights continue keep those that older ones chose for their first tokens"
    if behaviour.routes_anew:
        yield (
            "experts: the trainer chooses those of each token anew, and rounding has it choose others here and there"
        )
    if behaviour.dtype != sides.dtype:
        yield f"arithmetic: the generator computes in {behaviour.dtype}, the trainer in {sides.dtype} (actor.dtype)"
    elif behaviour.is_exact and gap.mean <= _MOST_ROUNDING_NATS:
        yield (
            f"arithmetic: the differences are small and follow no pattern, as rounding does; both sides are set to "
            f"{sides.dtype}: does the generator compute in it (dtype, fused or quantised weights)?"
        )
    if gap.mean > _MOST_ROUNDING_NATS:
        yield (
            f"too large for rounding, and not a temperature: other weights than version {version} in the generator, "
            "another prompt than the one that is trained on (template, first token), or another model's arithmetic"
        )


def _whereabouts(gap: LogprobGap) -> Iterator[str]:
    if 0 < gap.num_answers_beyond < gap.num_answers:
        yield f"in {gap.num_answers_beyond} of {gap.num_answers} answers only: compare their servers and their prompts"


def _remedy(sides: TwoSides) -> Iterator[str]:
    if not sides.ppo.use_decoupled_loss:
        yield (
            "it counts as learning in ppo.eps_clip: with ppo.use_decoupled_loss the clip is around the trainer's own "
            "numbers, and each token is weighed by trainer / generator"
        )


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
        return {f"{_MOVED}{version}": list(moved) for version, moved in self._drift.moved.items()}

    def load_state_dict(self, state: Numbers) -> None:
        """Go on from what `state_dict` said; other numbers are left alone."""
        for key, moved in state.items():
            if key.startswith(_MOVED) and isinstance(moved, list):
                self._drift = self._drift.after(int(key.removeprefix(_MOVED)), *moved)

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
        recorded, versions = np.asarray(sample.data["old_logprobs"]), np.asarray(sample.data["versions"], np.int64)
        # With numbers that are not finite the step trains nothing, and reports that.
        compared = generated(sample.data, response_mask(sample)) & np.isfinite(recorded) & np.isfinite(logprobs)
        now, before = np.flatnonzero(compared & (versions == version)), np.flatnonzero(compared & (versions != version))
        answers = _numbers(sample.answer_lengths("old_logprobs"))
        tokens = ComparedTokens(
            recorded=recorded[now].astype(np.float64),
            recomputed=logprobs[now].astype(np.float64),
            entropy=entropy[now].astype(np.float64),
            answer=answers[now],
        )
        sums, maxima = tokens.totals(threshold=self._sides.threshold)
        gap = LogprobGap.of(context.sum_over_ranks(sums), context.max_over_ranks(maxima))

        explained, variance = self._explained(versions[before], version=version)
        is_known = np.isfinite(explained)
        before, explained, variance = before[is_known], explained[is_known], variance[is_known]
        prompts = _numbers(sample.num_answers_per_sample())[answers[before]]
        differences = (recorded[before] - logprobs[before]).astype(np.float64)
        local = {"step": response_mask(of).sum(), "allowed": explained.sum(), "variance": variance.sum()}
        local |= {"older": len(is_known)} | MeanSize.sums(differences, prompts)
        total = context.sum_over_ranks({name: float(number) for name, number in local.items()})
        older = MeanSize.of(total)
        allowed, variance_of_allowed = (total[name] / max(older.num_tokens, 1) for name in ("allowed", "variance"))

        self._has_older = self._has_older or total["older"] > 0.0
        if self._has_older or self._is_first:
            self._scored = _some_answers(sample, logprobs)
        self._is_first = False
        evidence = older.evidence(allowed, variance_of_allowed)
        was_raised, threshold = self._alarm.is_raised, self._sides.threshold
        self._alarm = self._alarm.after(gap, threshold=threshold, older=older, allowed=allowed, evidence=evidence)
        is_raised = self._alarm.is_raised
        coverage = (gap.num_tokens + (0 if evidence is None else older.num_tokens)) / max(total["step"], 1.0)
        stats = {"gap/tokens": float(gap.num_tokens), "gap/coverage": coverage}
        if older.num_tokens:
            found = {"mean": older.mean, "allowed": allowed, "prompts": older.num_prompts}
            stats |= {f"drift/{name}": float(number) for name, number in found.items()}
        if is_raised is not None:
            stats |= {"gap/alarm": float(is_raised)}
            stats |= {"gap/of_allowed": max(gap.largest / threshold, self._alarm.evidence)}

        is_exact = gap.largest > threshold if is_raised else gap.num_tokens > 0
        where = ""
        if gap.num_tokens:
            position, where = _position_of_largest(sample, tokens, now, gap, context)
            stats |= {
                "gap/max": gap.largest,
                "gap/mean": gap.mean,
                "gap/kl": gap.kl,
                "gap/unequal_fraction": gap.num_unequal / gap.num_tokens,
                "gap/position": float(position),
            }
        if is_raised != was_raised:
            text, details = (
                (_text(gap, version, is_alarm=bool(is_raised)), _details(gap, where, threshold))
                if is_exact
                else (_text_of_older(older, allowed, version, is_alarm=bool(is_raised)), _details_of_older(older))
            )
            causes: list[str] = []
            if is_raised and is_exact:
                causes = likely_causes(gap, self._sides, version=version, agreed_until=self._agreed_until)
            self._notices.append(
                TrainNotice(
                    topic=TOPIC,
                    is_alarm=bool(is_raised),
                    text=f"logprob check: {text}",
                    details=f"{details}; {coverage:.0%} of the step's tokens were compared",
                    causes=causes,
                )
            )
        if gap.num_tokens and not is_raised:
            self._agreed_until = version
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

        Costs a forward pass over 64 answers of a rank at most, and two of each prompt, in the first step of an attempt
        and in all from the first tokens of older weights on; none where nothing moved.
        """
        scored, self._scored = self._scored, None
        if scored is None:
            return {}
        sample, before = scored
        after = logprobs_of(sample) if has_moved else before
        compared = response_mask(sample) & np.isfinite(before) & np.isfinite(after)
        answers = _numbers(sample.answer_lengths("old_logprobs"))[compared]
        prompts = _numbers(sample.num_answers_per_sample())[answers]
        differences = (after - before)[compared].astype(np.float64)
        moved = MeanSize.of(context.sum_over_ranks(MeanSize.sums(differences, prompts)))
        if not math.isfinite(moved.variance):  # of fewer than two prompts
            return {}
        self._drift = self._drift.after(version, moved.mean, moved.variance)
        return {"drift/moved": moved.mean}

    def _explained(
        self, versions: Integers, *, version: int
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """([n] nats that rounding and the updates since each version explain, [n] variances of its logarithm)."""
        made, number = np.unique(versions, return_inverse=True)
        since = np.array([self._drift.since(one, version=version) for one in made.tolist()]).reshape(-1, 2)
        return self._sides.mean_threshold + since[:, 0][number], since[:, 1][number]


def _text(gap: LogprobGap, version: int, *, is_alarm: bool) -> str:
    if is_alarm:
        return f"generator and trainer differ by {gap.largest:.2g} nats (version {version})"
    return f"OK, max difference {gap.largest:.2g} nats (version {version})"


def _details(gap: LogprobGap, where: str, threshold: float) -> str:
    place = f", the largest {where}" if gap.num_unequal else ""
    return (
        f"{gap.num_tokens} tokens, {gap.num_tokens - gap.num_unequal} of them equal bit for bit, mean difference "
        f"{gap.mean:.2g} nats{place}; the alarm is at {threshold:g}"
    )


def _text_of_older(older: MeanSize, allowed: float, version: int, *, is_alarm: bool) -> str:
    known = f"{older.mean:.2g} nats, updates explain {allowed:.2g} (weights before version {version})"
    return f"generator and trainer differ by {known}" if is_alarm else f"OK, mean difference {known}"


def _details_of_older(older: MeanSize) -> str:
    return f"{older.num_tokens} tokens of {older.num_prompts} prompts, means over these"


def _numbers(lengths: Sequence[int]) -> Integers:
    """[sum of lengths]: which of the pieces each entry is of."""
    return np.repeat(np.arange(len(lengths)), np.array(lengths, np.int64))


def _position_of_largest(
    sample: SequenceSample, tokens: ComparedTokens, chosen: Integers, gap: LogprobGap, context: ParallelContext
) -> tuple[int, str]:
    """(position in its answer, words with the answer's name); of ranks that have the largest, the first one counts."""
    index = int(np.abs(tokens.difference).argmax()) if len(tokens.answer) else None
    is_here = index is not None and bool(np.abs(tokens.difference[index]) == gap.largest)
    first = context.max_over_ranks({"minus_rank": -float(context.dp_rank) if is_here else -float(context.mesh.dims.dp)})
    dp_rank = int(-first["minus_rank"])
    position, name = -1, ""
    if index is not None and context.dp_rank == dp_rank:
        answer = int(tokens.answer[index])
        start = answer_slices(sample.answer_lengths("old_logprobs"))[answer].start
        position = int(np.count_nonzero(response_mask(sample)[start : chosen[index]]))
        name = sample.answer_names()[answer]
    position = int(context.max_over_ranks({"position": float(position)})["position"])
    return position, f"at token {position} of {context.text_from(dp_rank, name)}"


def _some_answers(sample: SequenceSample, logprobs: Floats) -> tuple[SequenceSample, Floats]:
    """Answers of many prompts, and their log-probabilities: two of each, and one where a group has fewer than eight."""
    sizes = sample.num_answers_per_sample()
    starts = np.cumsum([0, *sizes])
    prompts = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), _MOST_SCORED // 2)).astype(int)).tolist()
    chosen = [int(starts[at]) + place for at in prompts for place in range(2 if sizes[at] >= 8 else 1)]
    slices = answer_slices(sample.answer_lengths("old_logprobs"))
    kept = [logprobs[slices[answer]] for answer in chosen]
    return sample.select_answers(chosen), np.concatenate([logprobs[:0], *kept])
