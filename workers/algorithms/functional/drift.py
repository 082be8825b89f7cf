"""How far updates have moved log-probabilities, what tokens of older weights may differ by, and when an alarm ends.

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
    is_beyond: bool
    mean: float
    """Nats that the tokens differ by."""
    shows: float
    """The smallest mean difference that would have been beyond."""


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
