"""How far the generator's log-probabilities are from the trainer's, and when the difference is an alarm.

    tokens of the trainer's version   ComparedTokens ──sums, maxima over ranks──► LogprobGap: exact, token by token
    tokens of older versions          MeanSize of their differences                   ┐
    answers before and after updates  MeanSize of what each update changed (Drift)    ┴──evidence──► Alarm

Tokens of the trainer's version: nothing but arithmetic is left between the two sides, so that a difference beyond
rounding is a mistake of one of them. Its shape says of which kind. A temperature other than the trainer's shows itself
to first order (derivative of log softmax(b z) in b, b = 1 / T):

    recorded - recomputed = (T / T_generator - 1) * (recomputed + entropy)

A fit of that one number over all tokens gives the generator's temperature, and how much of the squared differences it
explains says whether it was the temperature.

Tokens of older versions differ by what was learned since. The same updates moved other answers, which are scored before
and after. The logarithm of the ratio of the two means, less a tolerance, over its variance is the evidence of a step.
Evidence adds up over steps, at most half of an alarm in each: an alarm takes two steps or more, and so does its end.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from corral.experiments.config.algorithm import LEAST_PROMPTS, LEAST_TOKENS
from corral.workers.algorithms.functional.kl import approximate_kl

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_DIFFERENCE, _NEGATIVE = "difference", "negative"
_FEW_PROMPTS: Final = 12.0  # with so many, a variance is taken to be twice what it seems
_TOLERANCE: Final = 0.2  # of a log ratio: new answers may move more than those that were trained on
_LEAST_VARIANCE: Final = 0.02  # of a log ratio: the two kinds of answers are never quite alike
_NEEDED: Final = 12.0  # evidence of an alarm; benchmarks/logprob_alarm.py has the rates that follow
_ROUNDING: Final = 1e-9  # of evidence that was added up
_MAX_KEPT: Final = 64  # updates; answers that began before that many of them are not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTokens:
    """Log-probabilities of the same n tokens by generator and trainer, answer after answer."""

    recorded: Floats
    """[n] log-probabilities from the generator."""
    recomputed: Floats
    """[n] the trainer's."""
    entropy: Floats
    """[n] nats of the trainer's distribution that each token came from."""
    answer: Integers
    """[n] which answer each belongs to; never falls."""

    @property
    def difference(self) -> Floats:
        """[n] nats, above 0 where the generator thought the token likelier."""
        return self.recorded - self.recomputed

    def kl(self) -> Floats:
        """[n] k3 estimates of the divergence of the trainer from the generator, which sampled."""
        recorded, recomputed = torch.from_numpy(self.recorded), torch.from_numpy(self.recomputed)
        return np.asarray(approximate_kl(recorded, recomputed, estimator="k3").numpy(), dtype=np.float64)

    def totals(self, *, threshold: float) -> tuple[dict[str, float], dict[str, float]]:
        """What adds up over ranks, and what the largest over ranks is of interest of.

        Args:
            threshold: nats that a token may differ by.
        """
        difference = self.difference
        size, effect = np.abs(difference), self.recomputed + self.entropy
        sums = {
            "tokens": len(size),
            "unequal": np.count_nonzero(size),
            "difference": size.sum(),
            "kl": self.kl().sum(),
            "answers": len(np.unique(self.answer)),
            "answers_beyond": len(np.unique(self.answer[size > threshold])),
            "squares": np.square(difference).sum(),
            "effect_squares": np.square(effect).sum(),
            "effect_products": (effect * difference).sum(),
        }
        maxima = {_DIFFERENCE: size.max(initial=0.0), _NEGATIVE: (-difference).max(initial=0.0)}
        return {key: float(n) for key, n in sums.items()}, {key: float(n) for key, n in maxima.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGap:
    """The differences of all ranks' tokens."""

    num_tokens: int
    num_unequal: int
    """Tokens whose two numbers are not the same, bit for bit."""
    largest: float
    """Nats."""
    most_negative: float
    """How far the generator's number falls short of the trainer's at most, in nats; 0 if nowhere."""
    mean: float
    """Of the differences without their signs, in nats."""
    kl: float
    """Mean of k3, in nats per token."""
    num_answers: int
    num_answers_beyond: int
    """Answers with a token that differs by more than the threshold."""
    temperature_ratio: float
    """The trainer's temperature divided by the one that would explain the differences best."""
    explained_by_temperature: float
    """Fraction of the squared differences that it explains, in [0, 1]."""

    @classmethod
    def of(cls, sums: dict[str, float], maxima: dict[str, float]) -> "LogprobGap":
        """From what all ranks' `ComparedTokens` add up to."""
        num_tokens = max(sums["tokens"], 1.0)
        effect, squares, products = sums["effect_squares"], sums["squares"], sums["effect_products"]
        return cls(
            num_tokens=int(sums["tokens"]),
            num_unequal=int(sums["unequal"]),
            largest=maxima[_DIFFERENCE],
            most_negative=maxima[_NEGATIVE],
            mean=sums["difference"] / num_tokens,
            kl=sums["kl"] / num_tokens,
            num_answers=int(sums["answers"]),
            num_answers_beyond=int(sums["answers_beyond"]),
            temperature_ratio=1.0 + products / effect if effect > 0.0 else 1.0,
            explained_by_temperature=products**2 / (effect * squares) if effect * squares > 0.0 else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanSize:
    """The mean over tokens of a difference without its sign, with its sampling error between prompts."""

    mean: float
    """Nats."""
    variance: float
    """Of the logarithm of the mean."""
    num_tokens: int
    num_prompts: int

    @staticmethod
    def sums(differences: Floats, prompts: Integers) -> dict[str, float]:
        """What adds up over ranks.

        Args:
            differences: [n] nats.
            prompts: [n] the number of each token's prompt.
        """
        _, number, tokens = np.unique(prompts, return_inverse=True, return_counts=True)
        sizes = np.zeros(len(tokens))
        np.add.at(sizes, number, np.abs(differences))
        return {
            "prompts": float(len(tokens)),
            "tokens": float(tokens.sum()),
            "sizes": float(sizes.sum()),
            "tokens_tokens": float((tokens * tokens).sum()),
            "sizes_tokens": float((sizes * tokens).sum()),
            "sizes_sizes": float((sizes * sizes).sum()),
        }

    @classmethod
    def of(cls, sums: Mapping[str, float]) -> "MeanSize":
        """From what all ranks' `sums` add up to.

        The variance is that of a ratio of sums, linearised (Cochran, Sampling Techniques, ch. 6), and larger the fewer
        the prompts are: the sizes have heavy tails, which a few prompts seldom show.
        """
        count, tokens, sizes = sums["prompts"], sums["tokens"], sums["sizes"]
        variance = 0.0 if count > 1.0 else math.inf
        if count > 1.0 and sizes**2 > 0.0:
            mean = sizes / tokens
            residual = sums["sizes_sizes"] - 2 * mean * sums["sizes_tokens"] + mean**2 * sums["tokens_tokens"]
            variance = count / (count - 1.0) * max(residual, 0.0) / sizes**2 * (1.0 + (_FEW_PROMPTS / count) ** 2)
        return cls(mean=sizes / max(tokens, 1.0), variance=variance, num_tokens=int(tokens), num_prompts=int(count))

    def evidence(self, allowed: float, variance: float) -> float | None:
        """In [-1/2, 1/2]: above 0 if these differences are larger than updates explain, 1 is an alarm.

        None if there are too few prompts or tokens for a verdict.

        Args:
            allowed: nats that updates and rounding explain.
            variance: of its logarithm.
        """
        variance += self.variance + _LEAST_VARIANCE
        if self.num_prompts < LEAST_PROMPTS or self.num_tokens < LEAST_TOKENS or not math.isfinite(variance):
            return None
        excess = math.log(max(self.mean, 1e-30) / allowed) - _TOLERANCE
        return min(max(excess / variance / _NEEDED, -0.5), 0.5)


@dataclass(frozen=True, slots=True)
class Drift:
    """How far each update has moved log-probabilities, as far as it was measured."""

    moved: Mapping[int, tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))
    """By the version that the update began with: nats, a mean over tokens; the variance of its logarithm."""

    def after(self, version: int, moved: float, variance: float) -> "Drift":
        """With one more update; one that is made again, after a resume, counts as it was made last."""
        newest = sorted({**self.moved, version: (moved, variance)}.items())[-_MAX_KEPT:]
        return Drift(MappingProxyType(dict(newest)))

    def since(self, made: int, *, version: int) -> tuple[float, float]:
        """(nats that the updates since version `made` have moved in all, the largest of their variances).

        NaN and infinity where one of them was not measured, or the version is none that the trainer has had.
        """
        unknown = (math.nan, math.inf)
        updates = [self.moved.get(update, unknown) for update in range(made, version)] or [unknown]
        return sum(moved for moved, _ in updates), max(variance for _, variance in updates)


@dataclass(frozen=True, slots=True)
class Alarm:
    """Whether generator and trainer disagree, as far as it was looked."""

    is_raised: bool | None = None
    """None before there was a verdict."""
    evidence: float = 0.0
    """Of a disagreement, in [0, 1]: it is raised at 1, and ends at 0."""
    num_tokens: int = 0
    """Compared in the largest look that raised it."""
    size: float = math.inf
    """Nats that these differed by on average, if they were of the trainer's version."""

    def after(
        self, gap: LogprobGap, *, threshold: float, older: MeanSize, allowed: float, evidence: float | None
    ) -> "Alarm":
        """Having looked once more.

        As many tokens of the trainer's version have to agree as raised it. Older tokens lower the evidence if they
        would have shown half of what was found.

        Args:
            gap: of tokens of the trainer's version.
            threshold: nats that one of these may differ by.
            older: of tokens of older versions.
            allowed: nats that updates and rounding explain of it.
            evidence: of these, where there is a verdict.
        """
        if gap.largest > threshold:
            return Alarm(True, 1.0, max(self.num_tokens, gap.num_tokens), gap.mean)
        if evidence is None and not gap.num_tokens:
            return self
        added = evidence or 0.0
        if not self.is_raised:
            total = max(self.evidence + added, 0.0)
            return Alarm(True, 1.0, older.num_tokens) if total >= 1.0 else Alarm(False, total)
        if added < 0.0 and 2.0 * allowed > self.size:
            added = 0.0
        total = min(self.evidence + added - gap.num_tokens / self.num_tokens, 1.0)
        return Alarm(True, total, self.num_tokens, self.size) if total > _ROUNDING else Alarm(False)
