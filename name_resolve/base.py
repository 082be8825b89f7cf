"""The name service: workers publish where they are, and find each other.

    worker A: lease("workers/model_worker/0", address) --> backend: Redis, in `redis.py`
    worker B: wait("workers/model_worker/0")           <-- its address, as soon as it is there
    master:   get_subtree("workers")                   <-- who is alive
    worker C: changes({"generation/servers": ""})      <-- as soon as one appears, moves or is taken away

Liveness only: a name service may lose everything at any moment, and nothing but addresses and beats may depend on it.
What must not be lost (epochs, commits, decisions) is in the trial log on the file system.

Each record is a value and an owner: a lease says its owner, what is plainly added is nobody's. Who registers takes the
name over; who only refreshes gives way to another owner.
"""

import logging
import math
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

_FIRST_PAUSE_S, _MAX_PAUSE_S = (
    0.02,
    0.5,
)  # of wait(): soon for one that is almost there, rare for a trainer group of hundreds
_NOBODY = "nobody"  # owns what was added


# What a name service can answer other than a value.
#
#     NameServiceError
#     +-- NameExistsError               a lease met a record of somebody else
#     +-- NameNotFoundError             no such name (never added, deleted, or expired)
#     +-- NameTimeoutError              wait() ran into its deadline; also a TimeoutError
#     +-- NameServiceUnavailableError   the backend itself could not be reached for a bounded time
#
# Malformed names, prefixes and durations are `ValueError`: they are what a caller wrote, not what the service answered.


class NameServiceError(Exception):
    """The name service refused or failed; the subclasses say which case a caller can answer."""


class NameExistsError(NameServiceError):
    """The name is taken by a record that is not ours."""


class NameNotFoundError(NameServiceError):
    """The name does not exist, or its time to live has passed."""


class NameTimeoutError(NameServiceError, TimeoutError):
    """A name did not appear before the deadline of the wait."""


class NameServiceUnavailableError(NameServiceError):
    """The backend could not be reached; nothing is known about the name."""


# Leases: a record that lives as long as its owner keeps saying so.
#
#     lease() --takes it over--> HELD --update(value)--> HELD        value published at once, or by the next good beat
#                                 |  every ttl/3: put if absent or ours
#                                 |    record vanished (Redis restarted, expired, deleted) -> registered again
#                                 |    service unreachable -> tried again every half second
#                                 |--another owner's record is met--> LOST      final: not refreshed, not overwritten
#                                 `--release() / close()-----------> RELEASED  deleted only if still ours
#
# One background thread per name service beats for all its leases, in one batch, as often as the shortest-lived of them
# needs it. It survives every error, because a worker whose keepalive died would look dead while it works.
#
# That no beat overwrites another owner's record rests on the store alone, which compares and writes in one step; that
# the loser hears of it and leaves only spares two of a kind at work. What must be decided right is not decided by a
# lease.

logger = logging.getLogger(__name__)

MAX_BEAT_INTERVAL_S = 5.0  # however long the TTL, a Redis that lost everything has each lease back within 10 s
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
        longest_s = _RETRY_INTERVAL_S if self._is_failing else MAX_BEAT_INTERVAL_S
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
    return min(MAX_BEAT_INTERVAL_S, (lease._put.ttl_s or math.inf) / 3)


# Names: '/'-separated segments, and what lies in a subtree. Pure.
#
#     "workers/rollout_worker/0"     a name
#     "workers"                      a root: contains "workers" and "workers/...", never "workers2"
#     ""                             the root of everything
#
# The alphabet has no glob character, no quote, no blank and no '~', so a name means the same in a Redis key and in an
# ACL rule, and the service can keep its own keys where no name can reach.

_SEGMENT = re.compile(r"[A-Za-z0-9._:-]+")
_MAX_NAME_LENGTH = 240
_ALPHABET_RULE = "segments of [A-Za-z0-9._:-]+ joined by single '/', without a leading or trailing '/'"


def check_name(name: str) -> str:
    """Return `name` unchanged, or raise ValueError that says which rule it breaks."""
    if len(name) > _MAX_NAME_LENGTH:
        raise ValueError(f"name {name[:40]!r}... has {len(name)} characters; names have at most {_MAX_NAME_LENGTH}")
    for segment in name.split("/"):
        if not segment:
            raise ValueError(f"name {name!r} has an empty segment; names are {_ALPHABET_RULE}")
        if segment in (".", ".."):
            raise ValueError(f"name {name!r} has the segment {segment!r}, which is a path; choose another word")
        if not _SEGMENT.fullmatch(segment):
            raise ValueError(f"name {name!r} has the segment {segment!r}; names are {_ALPHABET_RULE}")
    return name


def check_root(root: str) -> str:
    """Like `check_name`, but "" is allowed and stands for all names."""
    return check_name(root) if root else root


def check_prefix(prefix: str) -> str:
    """A prefix is a name followed by '/': `corral/3f2a.../`."""
    if not prefix.endswith("/"):
        raise ValueError(f"prefix {prefix!r} must end in '/', so that it cannot be the start of another trial's prefix")
    check_name(prefix[:-1])
    return prefix


def check_ttl(ttl_s: float) -> float:
    """A time to live is at least one millisecond, the resolution of Redis."""
    if not 0.001 <= ttl_s < float("inf"):
        raise ValueError(f"ttl_s must be a finite number of seconds >= 0.001, got {ttl_s}")
    return ttl_s


class NameService(LeaseStore):
    """A shared mapping from names to short strings. All methods may be called from any thread.

    Args:
        described: what error messages call this service: its kind and where it is, no secret.
    """

    def __init__(self, *, described: str) -> None:
        self._described = described
        self._keepalive = Keepalive(self)

    def add(self, name: str, value: str) -> None:
        """Store a value until it is deleted, over whatever was there: a lease is then lost to its owner."""
        self._put([Put(name=check_name(name), value=value, owner=_NOBODY, ttl_s=None, replace=True)])

    def get(self, name: str) -> str:
        """The value of a name; raises NameNotFoundError."""
        value = self._fetch(check_name(name))
        if value is None:
            raise NameNotFoundError(f"{name!r} is not registered in {self._described}")
        return value

    @abstractmethod
    def get_subtree(self, root: str) -> dict[str, str]:
        """Values by name, sorted by name, of `root` itself and all names below `root/`; "" is all names."""

    def delete(self, name: str) -> None:
        """Delete a name of any owner, if it exists.

        The owner of a living lease registers it again at its next beat: deleting makes a stale record go away, it does
        not evict anybody.
        """
        self._remove(check_name(name), owner=None)

    @abstractmethod
    def clock(self) -> float:
        """Seconds by the service's own clock, the same for all who ask: what one wrote and another reads is compared
        by it, since the clocks of two machines may be apart. It may step.
        """

    def wait(self, name: str, *, timeout_s: float, waiting_for: str = "") -> str:
        """The value of a name, waiting until it exists. Outages of the backend are waited through.

        Args:
            waiting_for: whom the caller expects there ("rollout_worker/0"), for the error.

        Raises:
            NameTimeoutError: a TimeoutError, if it did not appear within `timeout_s`.
        """
        check_name(name)
        deadline_s = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        outage: NameServiceUnavailableError | None = None
        while True:
            try:
                value, outage = self._fetch(name, patience_s=max(deadline_s - time.monotonic(), 0.0)), None
            except NameServiceUnavailableError as error:
                value, outage = None, error
            if value is not None:
                return value
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                break
            time.sleep(min(remaining_s, pause_s))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        whom = f"{waiting_for} did not register {name!r}" if waiting_for else f"{name!r} was not registered"
        reason = f"; at the end {outage}" if outage else ""
        raise NameTimeoutError(f"{whom} within {timeout_s:g} s in {self._described}{reason}") from outage

    @abstractmethod
    def changes(self, seen: Mapping[str, str], *, timeout_s: float) -> dict[str, str]:
        """Wait until something has changed directly below a root, or the time is over.

        A change while no caller waited is returned at once, and so is a record that returns to a service that had lost
        everything. The expiry of a record is not a change.

        Args:
            seen: by root ("" for names without a slash), the mark of its last change that the caller knows; "" for
                none.
            timeout_s: may be over later while the backend is unreachable.

        Returns:
            The marks of those roots that have changed.
        """

    def lease(self, name: str, value: str, *, ttl_s: float, owner: str) -> Lease:
        """Register a value that stays while this process lives and reaches the service; see `lease.py`.

        Another owner of the name loses its lease: the caller was started because the earlier owner died, and need not
        wait for the record of the dead owner to expire.

        Args:
            owner: identifies one incarnation ("rollout_worker/0 epoch 3 pid 4711"); the same owner may register again.

        Raises:
            NameExistsError: if the name is leased through this service.
        """
        if owner in ("", _NOBODY):
            raise ValueError(f"owner {owner!r} of lease {name!r} must be non-empty and not {_NOBODY!r}")
        put = Put(name=check_name(name), value=value, owner=owner, ttl_s=check_ttl(ttl_s), replace=True)
        return self._keepalive.acquire(put)

    def close(self) -> None:
        """Release the leases; a backend gives back what it holds, too. Idempotent."""
        self._keepalive.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # What a backend provides besides LeaseStore. The name is checked by now. `patience_s` bounds the retries while the
    # backend is unreachable (None: the limit that the backend has itself).

    @abstractmethod
    def _fetch(self, name: str, *, patience_s: float | None = None) -> str | None: ...
