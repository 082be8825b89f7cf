"""RankLocks: a call has all ranks of its mesh for itself, or waits; calls on other ranks do not notice.

    ask({0, 1}) ──► granted ─────────────────────────► free({0, 1}) ──► granted: {0, 1, 2} (asked first)
    ask({0, 1, 2}) ──► waits: 0 and 1 are taken                          waits:   {2}       (asked later, shares rank 2)
    ask({2}) ──► waits: who asked before it shares rank 2

Ranks are granted in the order in which they were asked for, so that a call on many ranks is not overtaken for ever by
calls on few. A rank works for one call at a time by this alone; that two ranks start the calls which they share in the
same order follows from it, and the flush of the request stream carries that guarantee even if this one failed.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Wish:
    name: str
    ranks: frozenset[int]
    granted: asyncio.Event = field(default_factory=asyncio.Event)


class RankLocks:
    """Exclusive use of sets of ranks.

    Example:
        async with locks.hold("actor_train", mesh.ranks):
            ...
    """

    def __init__(self) -> None:
        self._holder_by_rank: dict[int, str] = {}
        self._wishes: list[_Wish] = []

    @asynccontextmanager
    async def hold(self, name: str, ranks: Collection[int]) -> AsyncIterator[None]:
        """Wait for the ranks, and have them while the block runs; the deadline is the caller's."""
        wish = _Wish(name, frozenset(ranks))
        self._wishes.append(wish)
        self._grant()
        try:
            await wish.granted.wait()
            yield
        finally:
            if wish.granted.is_set():
                for rank in wish.ranks:
                    del self._holder_by_rank[rank]
            else:
                self._wishes.remove(wish)
            self._grant()

    def holders(self, ranks: Collection[int]) -> list[str]:
        """The calls that have one of these ranks now."""
        return sorted({holder for rank in ranks if (holder := self._holder_by_rank.get(rank))})

    def _grant(self) -> None:
        spoken_for: set[int] = set()
        for wish in list(self._wishes):
            if not wish.ranks & (self._holder_by_rank.keys() | spoken_for):
                self._holder_by_rank.update(dict.fromkeys(wish.ranks, wish.name))
                self._wishes.remove(wish)
                wish.granted.set()
            spoken_for |= wish.ranks
