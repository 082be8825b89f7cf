"""Why generator and trainer disagree: the shape of the differences, and what is configured ──► causes, likeliest first.

    agreed before ──► the weights of this version      follows temperature ──► temperature      never negative ──► top_p
    types differ, or small without a pattern ──► arithmetic      some answers only ──► where to look

Pure. Every sentence rests on something that was measured or configured; where nothing stands out, it says what is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.worker_specs import BehaviourSpec
from corral.workers.algorithms.functional.logprob_gap import LogprobGap

_EXACT_NATS = 1e-3
"""float32 on both sides: other shapes of the same products move a log-probability by 1e-5 on tiny models (measured)
and by some 1e-4 through tens of layers. A mistake moves it by more than that on some token of a batch."""
_COARSE_NATS = 0.5
"""bfloat16 keeps 8 bits: logits between 16 and 32 lie 1/8 apart, and a rare token collects several such steps. Rounded
weights are as coarse, and so may keys and values, or experts, be that are a version older than the token."""
_COARSE_MEAN_NATS = 0.1  # the mean in bfloat16 is 0.03 (measured), and less with weights that are rounded to 8 bits
_TEMPERATURE_SHARE = 0.5  # of the squared differences: 0.5 to 1 for temperatures up to 2.5 times off, 0.0 for rounding
_MOST_ROUNDING_NATS = 0.05  # mean over tokens: 0.03 was measured in bfloat16, and wrong weights give more than 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSides:
    """What is configured of generator and trainer."""

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
    """What holds from the first version on."""
    sampling, behaviour = sides.behaviour.sampling, sides.behaviour
    if gap.explained_by_temperature > _TEMPERATURE_SHARE and gap.temperature_ratio > 0.0:
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
            "experts: the trainer chooses those of each token anew, and rounding has it choose others here and there "
            "(ppo.router_replay)"
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
