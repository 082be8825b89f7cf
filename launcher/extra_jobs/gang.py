"""The gang guard of layout `jobs`: a trial never holds half of its nodes for long while it waits for the other half.

    EMPTY --first job runs--> FORMING --all run--> ASSEMBLED --one was lost--> FORMING
      ^                          |
      +-- gang_timeout_s over: all are given back, and asked for again after a random pause

    one is HOPELESS, which no waiting cures, for gang_timeout_s: it is given up, and the trial with it

Two trials that each hold what the other one needs would wait for ever. Both give back, and as their pauses differ, one
of them finds everything free. Each failure in a row doubles the pause. Pure: who runs, and the clock, come in.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from corral.scheduling.restarts import growing_pause

_MIN_BACKOFF_S = 2.0  # several times what a cluster takes to start the jobs of the trial that comes first
_MAX_BACKOFF_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """All jobs of the gang have to go."""

    waited_s: float
    """Time since the first of them ran."""
    pause_s: float
    """Before they are asked for again."""
    missing: tuple[str, ...]
    """Those that did not run."""


@dataclass(slots=True)
class GangGuard:
    """Watches the jobs that a trial needs all of."""

    names: Sequence[str]
    _: KW_ONLY
    timeout_s: float
    """The longest time from the first to the last of them."""
    chance: random.Random
    """Of the pauses; each trial needs its own."""
    is_assembled: bool = False
    """Whether all have been there since they were last given back: steps may be started."""
    _forming_since: float | None = None
    _hopeless_since: float | None = None
    _failures: int = 0

    def look(
        self, running: Collection[str], now: float, *, hopeless: Collection[str] = ()
    ) -> GiveBack | Literal["give up"] | None:
        """What to do about it that just these run, and these cannot start whatever others do.

        Returns:
            "give up" if the gang will never be complete.
        """
        missing = tuple(name for name in self.names if name not in running)
        if not hopeless:
            self._hopeless_since = None
        elif self._hopeless_since is None:
            self._hopeless_since = now
        elif now - self._hopeless_since >= self.timeout_s:
            return "give up"
        if not missing:
            self.is_assembled = True
            self._failures = 0
        if not missing or len(missing) == len(self.names):
            self._forming_since = None
            return None
        if self._forming_since is None:
            self._forming_since = now
        waited_s = now - self._forming_since
        if waited_s < self.timeout_s or hopeless:  # to ask again for what cannot start helps nobody
            return None
        self._forming_since = None
        self.is_assembled = False
        self._failures += 1
        return GiveBack(waited_s=waited_s, pause_s=self._pause_s(), missing=missing)

    def _pause_s(self) -> float:
        first = max(_MIN_BACKOFF_S, self.timeout_s / 10.0)
        backoff_s = growing_pause(self._failures, first_s=first, longest_s=_MAX_BACKOFF_S)
        return backoff_s * self.chance.uniform(0.5, 1.5)
