"""How far the generator's log-probabilities are from the trainer's: token by token, then as sums that ranks add up.

    recorded, recomputed, entropy [n] ──► ComparedTokens ──sums, maxima──► over all ranks ──► LogprobGap

The n tokens were made by the weights that the trainer computes with. Nothing but arithmetic is left between the two
sides then, so that a difference beyond rounding is a mistake of one of them, and its shape says of which kind.

A temperature other than the trainer's shows itself to first order (derivative of log softmax(b z) in b, b = 1 / T):

    recorded - recomputed = (T / T_generator - 1) * (recomputed + entropy)

A fit of that one number over all tokens gives the generator's temperature, and how much of the squared differences it
explains says whether it was the temperature.
"""

from dataclasses import dataclass

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

    @property
    def place_of_largest(self) -> int | None:
        """Which of the n tokens differs most; None without any."""
        return int(np.abs(self.difference).argmax()) if len(self.answer) else None

    def kl(self) -> Floats:
        """[n] k3 estimates of the divergence of the trainer from the generator, which sampled."""
        recorded, recomputed = torch.from_numpy(self.recorded), torch.from_numpy(self.recomputed)
        return np.asarray(approximate_kl(recorded, recomputed, estimator="k3").numpy(), dtype=np.float64)

    def sums(self, *, threshold: float | Floats) -> dict[str, float]:
        """What adds up over ranks.

        Args:
            threshold: nats that tokens may differ by, all alike or [n] each by its own.
        """
        difference = self.difference
        size, effect = np.abs(difference), self.recomputed + self.entropy
        is_beyond = size > threshold
        answers, first = self._first_beyond(is_beyond)
        ends = np.searchsorted(self.answer, answers, side="right")
        return {
            "tokens": float(len(size)),
            "unequal": float(np.count_nonzero(size)),
            "difference": float(size.sum()),
            "kl": float(self.kl().sum()),
            "answers": float(np.count_nonzero(np.diff(self.answer, prepend=-1))),
            "answers_beyond": float(len(answers)),
            "beyond": float(np.count_nonzero(is_beyond)),
            "from_onset": float((ends - first).sum()),
            "squares": float(np.square(difference).sum()),
            "effect_squares": float(np.square(effect).sum()),
            "effect_products": float((effect * difference).sum()),
        }

    def maxima(self, *, threshold: float | Floats) -> dict[str, float]:
        """What the largest over ranks is of interest of; a minimum is the largest of its negative."""
        difference = self.difference
        size = np.abs(difference)
        answers, first = self._first_beyond(size > threshold)
        onsets = first - np.searchsorted(self.answer, answers)
        return {
            _DIFFERENCE: float(size.max(initial=0.0)),
            _NEGATIVE: float((-difference).max(initial=0.0)),
            _ONSET: -float(onsets.min(initial=np.iinfo(np.int32).max)),
        }

    def _first_beyond(self, is_beyond: npt.NDArray[np.bool_]) -> tuple[Integers, Integers]:
        """The answers with such a token, and the place of the first one of each."""
        places = np.flatnonzero(is_beyond)
        answers, first = np.unique(self.answer[places], return_index=True)
        return answers, places[first]


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
