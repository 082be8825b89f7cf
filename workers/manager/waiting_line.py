"""WaitingLine: requests for a server that wait for the same thing, those of the oldest prompts first.

    add ──► waiting ──take, when it is its turn──► answered
               └───────expired, when its time is up──┘

A hundred thousand answers may wait, so each of them is an entry here, and neither a task nor a timer. Pure.
"""

import asyncio
import heapq
from typing import NamedTuple

from corral.workers.requests.manager_messages import Route, Schedule


class Waiting(NamedTuple):
    """Who waits."""

    answer: asyncio.Future[Route]
    request: Schedule
    until: float
    """When it is told in any case, on the clock of `WaitingLine.expired`."""


class WaitingLine:
    """
    Example:
        line.add(Waiting(answer, Schedule(uid="0:b", order=2, ...), 45.0))
        line.add(Waiting(answer, Schedule(uid="0:a", order=1, ...), 46.0))
        line.first()            # that of 0:a
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Waiting]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, waiting: Waiting) -> None:
        """Of two answers to one prompt the one that came first is first."""
        self._count += 1
        heapq.heappush(self._heap, (waiting.request.order, self._count, waiting))

    def first(self) -> Waiting | None:
        """Whose turn it is; None if nobody waits."""
        return self._heap[0][2] if self._heap else None

    def take(self) -> Waiting:
        """Let the first one go."""
        return heapq.heappop(self._heap)[2]

    def expired(self, now: float) -> list[Waiting]:
        """Let those go whose time is up, in order; at infinity these are all."""
        gone = sorted(entry for entry in self._heap if entry[2].until <= now)
        if gone:
            self._heap = [entry for entry in self._heap if entry[2].until > now]
            heapq.heapify(self._heap)
        return [waiting for *_, waiting in gone]
