"""Leases: a record that lives as long as its owner keeps saying so.

    lease() --takes it over--> HELD --update(value)--> HELD        value published at once, or by the next good beat
                                |  every ttl/3: put if absent or ours
                                |    record vanished (Redis restarted, expired, deleted) -> registered again
                                |    service unreachable -> tried again every half second, age_s grows
                                |--another owner's record is met--> LOST      final: never refreshed, never overwritten
                                `--release() / close()-----------> RELEASED  deleted only if still ours

One background thread per name service beats for all its leases, in one batch. It survives every error, because a worker
whose keepalive died would look dead while it works. Whether a lease is *safe to act on* is the owner's decision: it
compares `age_s` with its TTL (self-fencing), since nobody can tell a paused process that its lease has passed.

That no beat overwrites another owner's record rests on the store alone, which compares and writes in one step; that the
loser hears of it and leaves only spares two of a kind at work. What must be decided right is not decided by a lease.
"""

import logging
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


def lease_clock_s() -> float:
    """Seconds that never step back and include suspended time, which CLOCK_MONOTONIC leaves out on Linux."""
    boot_time: int | None = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_time is None else time.clock_gettime(boot_time)


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
    def _remove(self, name: str, *, owner: str | None, patience_s: float | None = None) -> bool:
        """Delete `name`, with `owner` only if the record is that owner's; answer whether it was deleted."""


class Lease:
    """A record of `owner` under `name`, refreshed in the background until it is released or lost."""

    def __init__(self, keepalive: "Keepalive", *, put: Put, refreshed_at_s: float) -> None:
        self._keepalive = keepalive
        self._put = put
        self._refreshed_at_s = refreshed_at_s
        self._due_at_s = refreshed_at_s
        self._lost_to: str | None = None
        self._released = False

    @property
    def name(self) -> str:
        return self._put.name

    @property
    def owner(self) -> str:
        return self._put.owner

    @property
    def lost(self) -> bool:
        """Another owner's record was met under our name. Final: stop acting, then register again under a new owner."""
        return self._lost_to is not None

    @property
    def age_s(self) -> float:
        """Seconds since the last refresh that succeeded *was sent*; past the TTL others may consider us gone."""
        return lease_clock_s() - self._refreshed_at_s

    def update(self, value: str) -> None:
        """Publish a new value at once.

        While the service is unreachable this does not fail: the value is kept and published by the first beat that
        gets through (`age_s` tells how long it has been).

        Raises:
            NameExistsError: if the lease is lost.
            NameServiceError: if it was released.
        """
        self._keepalive.update(self, value)

    def release(self) -> None:
        """Stop refreshing and delete the record if it is still ours; unreachable, it is left to its TTL. Idempotent."""
        self._keepalive.release(self)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class Keepalive:
    """Beats for the leases of one name service.

    Two locks: `_publishing` is held over each exchange with the store, so that a beat with an old value can never land
    after an update, nor a beat after a release; `_wake` guards the schedule and is never held over I/O.
    """

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self._publishing = threading.Lock()
        self._wake = threading.Condition()
        self._leases: dict[str, Lease] = {}  # those that are held, by name
        self._closed = False
        self._is_failing = False
        self._thread: threading.Thread | None = None

    def acquire(self, put: Put) -> Lease:
        """Put the first record; raises NameExistsError if another lease of ours has the name."""
        with self._publishing:
            with self._wake:
                if self._closed:
                    raise NameServiceError(f"cannot lease {put.name!r}: the name service is closed")
                if put.name in self._leases:
                    raise NameExistsError(f"{put.name!r} is already leased through this name service; release it first")
            sent_at_s = lease_clock_s()
            self._store._put([put])
            # Taking a name over is done once: the beats must meet the next owner's record and give way to it.
            lease = Lease(self, put=replace(put, replace=False), refreshed_at_s=sent_at_s)
            self._schedule(lease, sent_at_s + _beat_interval_s(lease))
        return lease

    def update(self, lease: Lease, value: str) -> None:
        """Remember the value, then try once to publish it; the beats do the rest."""
        with self._publishing:
            if lease._released:
                raise NameServiceError(f"cannot update {lease.name!r}: this lease was released")
            lease._put = Put(name=lease.name, value=value, owner=lease.owner, ttl_s=lease._put.ttl_s)
            if not lease.lost:
                self._exchange([lease])
            if lease.lost:
                raise NameExistsError(f"cannot update {lease.name!r}: owner {lease._lost_to!r} has taken it")

    def release(self, lease: Lease, *, patience_s: float = _RELEASE_PATIENCE_S) -> None:
        with self._publishing:
            if lease._released:
                return
            lease._released = True
            if lease.lost:
                return
            with self._wake:
                del self._leases[lease.name]
            try:
                self._store._remove(lease.name, owner=lease.owner, patience_s=patience_s)
            except NameServiceUnavailableError as error:
                logger.warning("%s is left to expire after %s s: %s", lease.name, lease._put.ttl_s, error)

    def close(self) -> None:
        """Stop beating, then release what is still held, without waiting for a service that is away."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            leases = list(self._leases.values())
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()  # returns within one exchange, which the socket timeouts of the store bound
        for lease in leases:
            self.release(lease, patience_s=0.0)

    def _schedule(self, lease: Lease, due_at_s: float) -> None:
        with self._wake:
            lease._due_at_s = due_at_s
            self._leases[lease.name] = lease
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="name-service-keepalive", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                if self._closed:
                    return
                now_s = lease_clock_s()
                due_at_s = min(
                    (lease._due_at_s for lease in self._leases.values()), default=now_s + _MAX_BEAT_INTERVAL_S
                )
                if due_at_s > now_s:
                    self._wake.wait(due_at_s - now_s)
                    continue
            self._beat(now_s)

    def _beat(self, now_s: float) -> None:
        with self._publishing:
            with self._wake:
                due = [lease for lease in self._leases.values() if lease._due_at_s <= now_s]
            if not due:  # released while we waited for the lock
                return
            try:
                self._exchange(due)
            except NameServiceError as error:
                self._retry_soon(due, error)
            except Exception:  # whatever went wrong, a worker whose keepalive died would look dead while it works
                logger.exception("keepalive failed; it goes on")
                self._retry_soon(due, None)

    def _exchange(self, leases: Sequence[Lease]) -> None:
        """One put for each lease, in one batch; outcomes go into the leases and the schedule."""
        sent_at_s = lease_clock_s()
        try:
            holders = self._store._put([lease._put for lease in leases], patience_s=0.0)
        except NameServiceUnavailableError as error:
            self._retry_soon(leases, error)
            return
        if self._is_failing:
            logger.info("keepalive refreshes again")
        self._is_failing = False
        for lease, holder in zip(leases, holders, strict=True):
            if holder:
                self._lose(lease, holder)
            else:
                lease._refreshed_at_s = sent_at_s
                self._schedule(lease, sent_at_s + _beat_interval_s(lease))

    def _retry_soon(self, leases: Sequence[Lease], error: NameServiceError | None) -> None:
        if error is not None and not self._is_failing:  # say it once for an outage, not twice a second
            logger.warning("keepalive cannot refresh %s, trying on: %s", _some_names(leases), error)
        self._is_failing = True
        for lease in leases:
            self._schedule(lease, lease_clock_s() + min(_RETRY_INTERVAL_S, _beat_interval_s(lease)))

    def _lose(self, lease: Lease, holder: str) -> None:
        logger.warning("lease %s of owner %s is lost to owner %s", lease.name, lease.owner, holder)
        lease._lost_to = holder
        with self._wake:
            del self._leases[lease.name]


def _beat_interval_s(lease: Lease) -> float:
    ttl_s = lease._put.ttl_s
    return _MAX_BEAT_INTERVAL_S if ttl_s is None else min(ttl_s / 3, _MAX_BEAT_INTERVAL_S)


def _some_names(leases: Sequence[Lease]) -> str:
    names = ", ".join(lease.name for lease in leases[:3])
    return names if len(leases) <= 3 else f"{names} and {len(leases) - 3} more"
