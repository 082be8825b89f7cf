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

import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Self

from corral.name_resolve.errors import (
    NameNotFoundError,
    NameServiceUnavailableError,
    NameTimeoutError,
)
from corral.name_resolve.lease import Keepalive, Lease, LeaseStore, Put
from corral.name_resolve.names import check_name, check_ttl

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 0.5  # of wait(): soon for one that is almost there, rare for a gang of hundreds
_NOBODY = "nobody"  # owns what was added


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
        """Delete a name, whoever owns it, if it is there.

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

        What changed while nobody waited is told at once, and so is whatever comes back to a service that had lost
        everything. That a record expired is not told.

        Args:
            seen: by root ("" for names without a slash), the mark of its last change that the caller knows; "" for
                none.
            timeout_s: may be over later while the backend is unreachable.

        Returns:
            The marks of those roots that have changed.
        """

    def lease(self, name: str, value: str, *, ttl_s: float, owner: str) -> Lease:
        """Register a value that stays while this process lives and reaches the service; see `lease.py`.

        Whoever else has the name finds its lease lost: who registers was started because the earlier owner died, and
        need not wait for the dead one's record to expire.

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
