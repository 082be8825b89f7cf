"""KnownWorker: what the master's end of the request stream knows of one worker, and has yet to tell it.

RequestClient ──riders, passengers──► KnownWorker ──take_...()──► the next message to this worker
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from corral.workers.requests.messages import Hello, Passenger, Rider
from corral.workers.requests.pending_replies import PendingReplies
from corral.workers.streams.errors import PeerDeadError


@dataclass(slots=True)
class Boarding:
    """A request that goes to each worker with the next message to it."""

    replies: PendingReplies
    deadline_s: float
    untold: set[str] = field(default_factory=set)
    """Workers that no message has gone to yet. While there are any, no deadline runs."""


@dataclass(slots=True)
class KnownWorker:
    """Belongs to the client's loop."""

    hello: Hello
    identity: bytes | None
    """None while it is not connected."""
    is_dead: bool = False
    grace_timer: asyncio.TimerHandle | None = None
    riders: list[Rider] = field(default_factory=list)
    passengers: tuple[Passenger, ...] = ()

    def take_riders(self) -> Sequence[Rider]:
        """What goes with the next message to this worker."""
        if not self.riders:
            return ()
        riders, self.riders = self.riders, []
        return riders

    def take_passengers(self) -> tuple[Passenger, ...]:
        """What goes with it, too, and is answered by itself."""
        passengers, self.passengers = self.passengers, ()
        return passengers

    def bury(self) -> None:
        """Its process is gone for good, and hears nothing more."""
        self.is_dead = True
        self.riders, self.passengers = [], ()

    def death(self, asked: str) -> PeerDeadError:
        """What a request that it will not answer ends with."""
        name, pid = self.hello.worker, self.hello.pid
        return PeerDeadError(
            f"{name} (pid {pid}) died before it answered {asked}; see the end of its log for the reason"
        )

    def end_grace(self) -> None:
        if self.grace_timer is not None:
            self.grace_timer.cancel()
            self.grace_timer = None
