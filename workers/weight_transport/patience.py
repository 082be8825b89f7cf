"""Patience: how long a staging may still take, and whether anybody still wants it.

every piece that was read ──check──► goes on      another's lock ──wait_for──► looks again
                              `──► StagingError: past its deadline, or given up
"""

import threading
import time
from dataclasses import dataclass

from corral.workers.weight_transport.transport import StagingError


@dataclass(frozen=True, slots=True)
class Patience:
    """Of one staging; a thread cannot be cancelled, so its work asks again and again."""

    what: str
    """That is staged, for messages."""
    timeout_s: float
    deadline: float
    """On the clock of `time.monotonic`."""
    given_up: threading.Event

    @classmethod
    def of(cls, what: str, *, timeout_s: float, given_up: threading.Event) -> "Patience":
        return cls(what, timeout_s, time.monotonic() + timeout_s, given_up)

    def check(self) -> None:
        """StagingError once it is over."""
        self._check("the shared file system is too slow for it, or hangs")

    def wait_for(self, whom: str, *, seconds: float) -> None:
        """A pause between two looks at what somebody else does; StagingError, naming him, once patience is over."""
        self.given_up.wait(seconds)
        self._check(f"it waited for {whom or 'another worker of this host'}, which stages a version")

    def _check(self, reason: str) -> None:
        if self.given_up.is_set():
            raise StagingError(f"the staging of {self.what} was given up: the worker leaves")
        if time.monotonic() > self.deadline:
            raise StagingError(
                f"{self.what} was not staged within {self.timeout_s:g} s (rollout.request_timeout_s): {reason}"
            )
