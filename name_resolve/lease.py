"""Leases: a record that lives as long as its owner keeps saying so.

    lease() --takes it over--> HELD --update(value)--> HELD        value published at once, or by the next good beat
                                |  every ttl/3: put if absent or ours
                                |    record vanished (Redis restarted, expired, deleted) -> registered again
                                |    service unreachable -> tried again every half second
                                |--another owner's record is met--> LOST      final: never refreshed, never overwritten
                                `--release() / close()-----------> RELEASED  deleted only if still ours

One background thread per name service beats for all its leases, in one batch, as often as the shortest-lived of them
needs it. It survives every error, because a worker whose keepalive died would look dead while it works.

That no beat overwrites another owner's record rests on the store alone, which compares and writes in one step; that the
loser hears of it and leaves only spares two of a kind at work. What must be decided right is not decided by a lease.
"""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from corral.name_resolve.errors import NameExistsError, NameServiceError, NameServiceUnavailableError

logger = logging.getLogger(__name__)

_MAX_BEAT_INTERVAL_S = 5.0  # however long the TTL, a Redis that lost everything has each lease back within 10 s
_RETRY_INTERVAL_S = 0.5  # while unreachable: soon enough to be back before watchers' patience ends
_RELEASE_PATIENCE_S = 2.0  # a record that cannot be deleted expires anyway; leaving must not take long


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Store `value` under `name` if the name is free or already `owner`'s; with `replace`, in any case."""

    name: str
    value: str
    owner: str
    ttl_s: float | None
    """None: until it is deleted."""
    replace: bool = False


class LeaseStore(ABC):
    """The two atomic operations that leases need. `patience_s` bounds the retries while the backend is unreachable."""

    @abstractmethod
    def _put(self, puts: Sequence[Put], *, patience_s: float | None = None) -> list[str]:
        """Perform each put; answer "" where it was stored, and the owner in possession where it was not."""

    @abstractmethod
    def _remove(self, name: str, *, owner: str | None, patience_s: float | None = None) -> None:
        """Delete `name` if it is there, with `owner` only if the record is that owner's."""


class Lease:
    """A record of its owner under a name, refreshed in the background until it is released or lost."""

    def __init__(self, keepalive: "Keepalive", put: Put) -> None:
        self._keepalive = keepalive
        self._put = put
        self._lost_to: str | None = None
        self._released = False

    @property
    def name(self) -> str:
        return self._put.name

    @property
    def lost(self) -> bool:
        """Another owner's record was met under our name. Final: stop acting, then register again under a new owner."""
        return self._lost_to is not None

    def update(self, value: str) -> None:
        """Publish a new value at once.

        While the service is unreachable this does not fail: the value is kept and published by the first beat that
        gets through.

        Raises:
            NameExistsError: if the lease is lost.
            NameServiceError: if it was released.
        """
        with self._keepalive.turn:
            if self._released:
                raise NameServiceError(f"cannot update {self.name!r}: this lease was released")
            self._put = replace(self._put, value=value)
            if not self.lost:
                self._keepalive.exchange([self])
            if self.lost:
                raise NameExistsError(f"cannot update {self.name!r}: owner {self._lost_to!r} has taken it")

    def release(self, *, patience_s: float = _RELEASE_PATIENCE_S) -> None:
        """Stop refreshing and delete the record if it is still ours; unreachable, it is left to its TTL. Idempotent."""
        with self._keepalive.turn:
            is_held = not (self._released or self.lost)
            self._released = True  # even if its record cannot be deleted
            if is_held:
                self._keepalive.drop(self, patience_s=patience_s)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class Keepalive:
    """Beats for the leases of one name service.

    `turn` is held over each exchange with the store, so that a beat with an old value can never land after an update,
    nor a beat after a release.
    """

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self.turn = threading.Condition()
        self._leases: dict[str, Lease] = {}  # those that are held, by name
        self._due_at_s = math.inf
        self._closed = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="name-service-keepalive", daemon=True)

    def acquire(self, put: Put) -> Lease:
        """Put the first record; raises NameExistsError if another lease of ours has the name."""
        with self.turn:
            if self._closed:
                raise NameServiceError(f"cannot lease {put.name!r}: the name service is closed")
            if put.name in self._leases:
                raise NameExistsError(f"{put.name!r} is already leased through this name service; release it first")
            self._store._put([put])
            # Taking a name over is done once: the beats must meet the next owner's record and give way to it.
            lease = self._leases[put.name] = Lease(self, replace(put, replace=False))
            self._due_at_s = min(self._due_at_s, time.monotonic() + _beat_interval_s(lease))
            if self._thread.ident is None:
                self._thread.start()
            self.turn.notify()
        return lease

    def drop(self, lease: Lease, *, patience_s: float) -> None:
        """Beats for it no more, and deletes its record."""
        del self._leases[lease.name]
        try:
            self._store._remove(lease.name, owner=lease._put.owner, patience_s=patience_s)
        except NameServiceUnavailableError as error:
            logger.warning("%s is left to expire after %s s: %s", lease.name, lease._put.ttl_s, error)

    def close(self) -> None:
        """Stop beating, then release what is still held, without waiting for a service that is away. Idempotent."""
        with self.turn:
            self._closed = True
            self.turn.notify()
        if self._thread.ident is not None:
            self._thread.join()
        for lease in list(self._leases.values()):
            lease.release(patience_s=0.0)

    def _run(self) -> None:
        with self.turn:
            while not self._closed:
                if (left_s := self._due_at_s - time.monotonic()) > 0.0:
                    self.turn.wait(left_s)
                else:
                    self._beat()

    def _beat(self) -> None:
        leases = list(self._leases.values())
        try:
            self.exchange(leases)
        except Exception as error:  # whatever went wrong, a worker whose keepalive died would look dead while it works
            self._note_failure(leases, error)
        longest_s = _RETRY_INTERVAL_S if self._is_failing else _MAX_BEAT_INTERVAL_S
        self._due_at_s = time.monotonic() + min([longest_s, *map(_beat_interval_s, self._leases.values())])

    def exchange(self, leases: Sequence[Lease]) -> None:
        """One put for each lease, in one batch; outcomes go into the leases."""
        try:
            holders = self._store._put([lease._put for lease in leases], patience_s=0.0)
        except NameServiceUnavailableError as error:
            self._note_failure(leases, error)
            return
        if self._is_failing:
            logger.info("keepalive refreshes again")
        self._is_failing = False
        for lease, holder in zip(leases, holders, strict=True):
            if holder:
                logger.warning("lease %s of owner %s is lost to owner %s", lease.name, lease._put.owner, holder)
                lease._lost_to = holder
                del self._leases[lease.name]

    def _note_failure(self, leases: Sequence[Lease], error: Exception) -> None:
        if not self._is_failing:  # say it once for an outage, not twice a second
            names = ", ".join(lease.name for lease in leases[:3])
            more = f" and {len(leases) - 3} more" if len(leases) > 3 else ""
            is_bug = not isinstance(error, NameServiceError)
            logger.warning("keepalive cannot refresh %s%s, trying on: %s", names, more, error, exc_info=is_bug)
        self._is_failing = True


def _beat_interval_s(lease: Lease) -> float:
    return min(_MAX_BEAT_INTERVAL_S, (lease._put.ttl_s or math.inf) / 3)
