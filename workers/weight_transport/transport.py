"""What a staging is asked for, what it says, and how long it may take.

version, directory, digest of its manifest ──WeightStaging──► StagedVersion: verified files
                                                         `──► CorruptCheckpointError: they are not what was published

every piece that was read ──check──► goes on      another's lock ──wait_for──► looks again
                              `──► StagingError: past its deadline, or given up
"""

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path


class StagingError(RuntimeError):
    """The files of a version could not be staged in time; says what it waited for, or what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What a worker has fetched of a version, and from where."""

    bytes_read: int = 0
    """Of the shared file system."""
    bytes_received: int = 0
    """From other hosts."""
    failed_sources: tuple[str, ...] = ()
    """Control URLs of the workers that did not give what they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedVersion(Arrived):
    """Files that are what was published, ready to be read; all else is 0 if another worker of the host staged them."""

    path: Path
    """Where the server reads them; they stay there until it has taken over another version."""
    seconds: float
    """How long that took, waits for other workers included."""

    def after(self, earlier: "StagedVersion") -> "StagedVersion":
        """The same, with what an earlier staging of this version has cost as well."""
        return replace(
            self,
            bytes_read=earlier.bytes_read + self.bytes_read,
            bytes_received=earlier.bytes_received + self.bytes_received,
            seconds=earlier.seconds + self.seconds,
        )


@dataclass(frozen=True, slots=True)
class Patience:
    """Of one staging: how long it may still take, and whether anybody still wants it.

    A thread cannot be cancelled, so its work asks again and again.
    """

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
