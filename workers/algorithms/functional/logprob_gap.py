"""How far the generator's log-probabilities are from the trainer's: token by token, then as sums that ranks add up.

    recorded, recomputed, entropy [n] ──► ComparedTokens ──sums, maxima──► over all ranks ──► LogprobGap

The n tokens were made by the weights that the trainer computes with. Nothing but arithmetic is left between the two
sides then, so that a difference beyond rounding is a mistake of one of them, and its shape says of which kind.

A temperature other than the trainer's shows itself to first order (derivative of log softmax(b z) in b, b = 1 / T):

    recorded - recomputed = (T / T_generator - 1) * (recomputed + entropy)

A fit of that one number over all tokens gives the generator's temperature, and how much of the squared differences it
explains says whether it was the temperature.

What tokens of older weights may differ by follows from how far updates have moved log-probabilities (`Drift`), and
when an alarm ends from what was compared (`Alarm`).

update of version v ── the same answers scored before and after ──► moved[v], nats
token of version v - a at version v ──► may differ by what a step's arithmetic may, and by what a updates have moved

agree ── a comparison beyond its bound ──► alarm, owing its tokens ── as many that would have shown it ──► agree

Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from corral.workers.algorithms.functional.kl import approximate_kl

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_DIFFERENCE, _ONSET, _NEGATIVE = "difference", "minus_onset", "negative"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTokens:
    """What both sides say of the same n tokens, answer after answer."""

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

    def totals(self, *, threshold: float | Floats) -> tuple[dict[str, float], dict[str, float]]:
        """What adds up over ranks, and what the largest over ranks is of interest of; a minimum is that of negatives.

        Args:
            threshold: nats that tokens may differ by, all alike or [n] each by its own.
        """
        difference = self.difference
        size, effect = np.abs(difference), self.recomputed + self.entropy
        beyond = np.flatnonzero(size > threshold)
        answers, first = np.unique(self.answer[beyond], return_index=True)  # those with such a token, the first of each
        first = beyond[first]
        onsets = first - np.searchsorted(self.answer, answers)
        sums = {
            "tokens": len(size),
            "unequal": np.count_nonzero(size),
            "difference": size.sum(),
            "kl": self.kl().sum(),
            "answers": np.count_nonzero(np.diff(self.answer, prepend=-1)),
            "answers_beyond": len(answers),
            "beyond": len(beyond),
            "from_onset": (np.searchsorted(self.answer, answers, side="right") - first).sum(),
            "squares": np.square(difference).sum(),
            "effect_squares": np.square(effect).sum(),
            "effect_products": (effect * difference).sum(),
        }
        maxima = {
            _DIFFERENCE: size.max(initial=0.0),
            _NEGATIVE: (-difference).max(initial=0.0),
            _ONSET: -onsets.min(initial=np.iinfo(np.int32).max),
        }
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
    onset: int
    """Compared tokens of an answer before the first such token; the fewest over those answers."""
    share_from_onset: float
    """Share of such tokens among those that come after the first of their answer, with it; 0 without any."""
    temperature_ratio: float
    """The trainer's temperature divided by the one that would explain the differences best."""
    explained_by_temperature: float
    """Share of the squared differences that it explains, in [0, 1]."""

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
            onset=int(-maxima[_ONSET]),
            share_from_onset=sums["beyond"] / max(sums["from_onset"], 1.0),
            temperature_ratio=1.0 + products / effect if effect > 0.0 else 1.0,
            explained_by_temperature=products**2 / (effect * squares) if effect * squares > 0.0 else 0.0,
        )


def comparable(recorded: npt.ArrayLike, recomputed: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """[n] whether both numbers are finite; a step with others trains nothing, and says so."""
    finite: npt.NDArray[np.bool_] = np.logical_and(np.isfinite(recorded), np.isfinite(recomputed))
    return finite


_MAX_KEPT: Final = 64  # updates; answers that began before that many of them are not compared


@dataclass(frozen=True, slots=True)
class Drift:
    """How far each update has moved log-probabilities, as far as it was measured."""

    moved: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Nats, a root of the mean of squares over tokens, by the version that the update began with."""

    def after(self, version: int, moved: float) -> "Drift":
        """With one more update; one that is made again, after a resume, counts as it was made last."""
        newest = sorted({**self.moved, version: moved}.items())[-_MAX_KEPT:]
        return Drift(MappingProxyType(dict(newest)))

    def since(self, versions: npt.NDArray[np.int64], *, version: int) -> npt.NDArray[np.float64]:
        """[n] nats that the updates since each version have moved in all; NaN where one of them was not measured."""
        sums = {
            made: sum((self.moved.get(update, np.nan) for update in range(made, version)), 0.0)
            for made in np.unique(versions).tolist()
        }
        return np.array([sums[made] for made in versions.tolist()], np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What comparing some tokens has shown, over all ranks."""

    num_tokens: int
    of_allowed: float
    """What was found, of what may be."""
    mean: float
    """Nats that the tokens differ by."""
    shows: float
    """The smallest mean difference that would have been beyond."""

    @property
    def is_beyond(self) -> bool:
        return self.num_tokens > 0 and self.of_allowed > 1.0


@dataclass(frozen=True, slots=True)
class Alarm:
    """Whether generator and trainer disagree, as far as it was looked."""

    is_raised: bool | None = None
    """None before anything was compared."""
    owed: int = 0
    """Tokens that have to agree before it ends."""
    mean: float = 0.0
    """Nats that the tokens differed by which raised it last."""

    def after(self, comparisons: Iterable[Comparison]) -> "Alarm":
        """Having looked once more.

        Guarantee: an alarm ends no earlier than as many tokens agree as the largest look that raised it had, of those
        that would have shown half of what was found then. Tokens that were not compared say nothing.
        """
        known = [one for one in comparisons if one.num_tokens]
        if beyond := [one for one in known if one.is_beyond]:
            num_tokens = sum(one.num_tokens for one in beyond)
            mean = sum(one.mean * one.num_tokens for one in beyond) / num_tokens
            return Alarm(True, max(self.owed, num_tokens), mean)
        if not self.is_raised:
            return Alarm(False) if known else self
        owed = self.owed - sum(one.num_tokens for one in known if one.shows <= self.mean / 2)
        return Alarm(True, owed, self.mean) if owed > 0 else Alarm(False)
