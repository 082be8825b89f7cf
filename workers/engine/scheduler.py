"""Which requests run together: continuous batching as a pure state machine, no tensors.

    add() -> WAITING --admit()--> RUNNING (row 0..B-1) --remove()--> gone
                ^                    |
                +----- retract() ----+            (to the front)

Admission is first come, first served, and never passes over a request: a long one waits for rows to empty, but cannot
be starved by short ones. The budget counts the rectangle that the cache will need, rows x the longest reservation, so
memory is bounded whatever the lengths are.

Rows stay roughly in order of length, longest first: those that came first have grown most. So that a gap does not end
this, a row of like length moves into it, and one like that into the gap it leaves; where attention reads all rows at
once and order is of no use, the last row fills the gap.

Example:
    scheduler = BatchScheduler(max_running_requests=2, max_total_tokens=100)
    for request in (a, b, c): scheduler.add(request)      # each reserves 40 tokens
    scheduler.admit()                                     # [a, b]; c waits: 2 rows are the limit
    scheduler.remove(0)                                   # [(1, 0)]: b, the last, is now row 0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from corral.workers.engine.requests import ActiveRequest


class BatchScheduler:
    """Orders requests and assigns rows; the engine moves the tensors accordingly."""

    def __init__(self, *, max_running_requests: int, max_total_tokens: int, least_likeness: float = 0.0) -> None:
        """least_likeness: share of a row's length that another must have to move into its gap; 0.0 takes any."""
        if max_running_requests < 1:
            raise ValueError(f"max_running_requests must be at least 1, got {max_running_requests}")
        if max_total_tokens < 1:
            raise ValueError(f"max_total_tokens must be at least 1, got {max_total_tokens}")
        self.max_running_requests = max_running_requests
        self.max_total_tokens = max_total_tokens
        self._least_likeness = least_likeness
        self.running: list[ActiveRequest] = []
        self.waiting: deque[ActiveRequest] = deque()

    @property
    def longest_reserved(self) -> int:
        return max((request.reserved_tokens for request in self.running), default=0)

    def add(self, request: ActiveRequest) -> None:
        """Queue a request; whoever adds it has checked that it fits into `max_total_tokens`, or it would never run."""
        self.waiting.append(request)

    def admit(self) -> list[ActiveRequest]:
        """Move waiting requests to running while rows and cache allow; they take the rows after the present ones."""
        admitted: list[ActiveRequest] = []
        longest = self.longest_reserved
        while self.waiting and len(self.running) < self.max_running_requests:
            longest = max(longest, self.waiting[0].reserved_tokens)
            if (len(self.running) + 1) * longest > self.max_total_tokens:
                break
            request = self.waiting.popleft()
            self.running.append(request)
            admitted.append(request)
        return admitted

    def remove(self, row: int) -> list[tuple[int, int]]:
        """End the request in `row`; others move up, so that rows stay contiguous.

        Returns:
            (source, target) rows whose content must move, in this order; none where `row` was the last one.
        """
        moves: list[tuple[int, int]] = []
        gap = row
        while gap < len(self.running) - 1:
            source = self._row_like(gap)
            self.running[gap] = self.running[source]
            moves.append((source, gap))
            gap = source
        self.running.pop()
        return moves

    def _row_like(self, row: int) -> int:
        """The last of the later rows that is of like length, or the next."""
        least = self._least_likeness * self.running[row].num_tokens
        later = range(len(self.running) - 1, row, -1)
        return next((other for other in later if self.running[other].num_tokens >= least), row + 1)

    def retract(self) -> list[ActiveRequest]:
        """Send every running request back to the front of the queue, in the order given by `running`."""
        retracted = list(self.running)
        self.running.clear()
        self.waiting.extendleft(reversed(retracted))
        return retracted

    def withdraw(self, is_wanted: Callable[[ActiveRequest], bool]) -> list[ActiveRequest]:
        """Take matching requests out of the queue (not out of the running ones)."""
        withdrawn = [request for request in self.waiting if is_wanted(request)]
        self.waiting = deque(request for request in self.waiting if not is_wanted(request))
        return withdrawn
