"""FlushQueue: blocking requests wait here until a flush names them, so that all workers run them in the same order.

    add(request) ----> waiting --+
                                 +--> all requests of the oldest flush are here --> pop_ready(): in order of the ids
    flush(level, ids) -----------+

Requests contain collectives: if one worker ran A before B and another B before A, both would wait for ever. A master
sends one request to several workers under one id, and orders levels one after the other, so the order of (level, id)
is the same for any two workers on all requests that they share. A flush that comes aboard a request is a level like any
other.
"""

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from corral.workers.streams.calls import RequestId

ItemT = TypeVar("ItemT")


class FlushQueue(Generic[ItemT]):
    """Pure state; who uses it from several threads brings the lock.

    Example:
        queue.add(RequestId(1, 8), "b"); queue.add(RequestId(1, 7), "a"); queue.pop_ready()          # []
        queue.flush(level=1, request_ids=[RequestId(1, 7), RequestId(1, 8)]); queue.pop_ready()      # ["a", "b"]
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestId, ItemT] = {}
        self._settled: set[RequestId] = set()
        self._flushes: deque[list[RequestId]] = deque()
        self._level = 0

    def add(self, request_id: RequestId, item: ItemT) -> None:
        """A request has arrived."""
        self._waiting[request_id] = item

    def settle(self, request_id: RequestId) -> None:
        """A request was answered without running it; a flush that names it need not wait for it."""
        self._settled.add(request_id)

    def flush(self, *, level: int, request_ids: Iterable[RequestId]) -> None:
        """Everything of this level has been sent; a level that was flushed before is ignored."""
        if level > self._level:
            self._level = level
            self._flushes.append(sorted(request_ids))

    def pop_ready(self) -> list[ItemT]:
        """What may run now, in order. Nothing overtakes a flush that still lacks a request."""
        ready: list[ItemT] = []
        while self._flushes and all(known in self._waiting or known in self._settled for known in self._flushes[0]):
            named = self._flushes.popleft()
            ready.extend(self._waiting.pop(request_id) for request_id in named if request_id in self._waiting)
        return ready

    def reset(self) -> None:
        """A new epoch: what waits was asked by a master that is gone, and levels start again.

        What was refused stays known: it was refused because its epoch, this one, had not begun.
        """
        self._waiting.clear()
        self._flushes.clear()
        self._level = 0
