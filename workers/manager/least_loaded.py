"""LeastLoaded: names with a load each -> the name with the least, in O(log n) whatever happened in between.

    put(name, load) ──► a further entry of the heap          least() ◄── the first entry that still holds
    remove(name)    ──► its entries hold no longer                        those before it are thrown away

Of equal loads the name decides, so that a choice can be said in advance. Pure.
"""

import heapq
from collections.abc import Iterator
from typing import Final

Load = tuple[int, ...]

_MOST_ENTRIES: Final = 4  # for each name, before those that hold no longer are thrown away together


class LeastLoaded:
    """
    Example:
        waiting = LeastLoaded()
        waiting.put("rollout_worker/0", (3,)), waiting.put("rollout_worker/1", (2,))
        waiting.least()         # "rollout_worker/1"
    """

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._heap: list[tuple[Load, str]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._loads

    def __iter__(self) -> Iterator[str]:
        return iter(self._loads)

    def __len__(self) -> int:
        return len(self._loads)

    def put(self, name: str, load: Load) -> None:
        """It is here, with this load from now on."""
        if self._loads.get(name) == load:
            return
        self._loads[name] = load
        heapq.heappush(self._heap, (load, name))
        if len(self._heap) > _MOST_ENTRIES * len(self._loads) + _MOST_ENTRIES:
            self._heap = [(load, name) for name, load in self._loads.items()]
            heapq.heapify(self._heap)

    def remove(self, name: str) -> None:
        """It is not here, or is no more."""
        self._loads.pop(name, None)

    def least(self) -> tuple[Load, str] | None:
        """The least load and its name; None if there are no names."""
        while self._heap and self._loads.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None
