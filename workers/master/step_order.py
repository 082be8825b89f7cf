"""Which call of a train step may run now: that whose inputs are there (StepState), on ranks that are free (RankLocks).

    batch ──► remaining of each call ──next_go: n_seqs of them have its input keys──► a go ──finish_go──► output keys
                     ▲                                                                 │
                     └──────────────── until none remains: the call is over ◄──────────┘

Every call takes every sample of the batch exactly once, and never before all of its input keys exist: this is where
that holds.

    ask({0, 1}) ──► granted ─────────────────────────► free({0, 1}) ──► granted: {0, 1, 2} (asked first)
    ask({0, 1, 2}) ──► waits: 0 and 1 are taken                          waits:   {2}       (asked later, shares rank 2)
    ask({2}) ──► waits: who asked before it shares rank 2

Ranks are granted in the order in which they were asked for, so that a call on many ranks is not overtaken for ever by
calls on few. A rank works for one call at a time by this alone; that two ranks start the calls which they share in the
same order follows from it, and the order of request ids carries that guarantee even if this one failed.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from corral.scheduling.dataflow import DataflowGraph


class StepState:
    """One train step on one batch.

    Example:
        state = StepState(graph, ["0:a", "0:b"])
        state.next_go("ref_inf")                    # ["0:a", "0:b"]
        state.next_go("actor_train")                # None: there are no ref_logprobs yet
        state.finish_go("ref_inf", ["0:a", "0:b"])
        state.next_go("actor_train")                # ["0:a", "0:b"]
    """

    def __init__(self, graph: DataflowGraph, batch: Sequence[str]) -> None:
        self._graph = graph
        self._remaining = {call.name: dict.fromkeys(batch) for call in graph.step_calls}
        """By call, what it has not taken yet, oldest first: its output keys exist for all others."""

    @property
    def is_done(self) -> bool:
        return not any(self._remaining.values())

    def is_over(self, name: str) -> bool:
        """Whether a call has taken the whole batch."""
        return not self._remaining[name]

    def is_last_go(self, name: str, uids: Sequence[str]) -> bool:
        """Whether nothing remains for a call after this go."""
        return len(uids) == len(self._remaining[name])

    def next_go(self, name: str) -> list[str] | None:
        """The samples that a call can take now, oldest first; None while there are not enough, or others must end."""
        if self.is_over(name) or self._must_wait_for(name):
            return None
        remaining = self._remaining[name]
        ready = list(remaining)
        for producer in self._graph.predecessors(name):
            if lacking := self._remaining[producer]:
                ready = [uid for uid in ready if uid not in lacking]
        wanted = min(self._graph.call(name).n_seqs, len(remaining))
        return ready[:wanted] if len(ready) >= wanted else None

    def finish_go(self, name: str, uids: Sequence[str]) -> None:
        """A call has taken these samples, and made its output keys of them."""
        if self.is_last_go(name, uids):
            self._remaining[name].clear()
        else:
            for uid in uids:
                del self._remaining[name][uid]

    def drop(self, uids: Iterable[str]) -> None:
        """The step goes on without these samples."""
        for uid in uids:
            for remaining in self._remaining.values():
                remaining.pop(uid, None)

    def waits_for(self, name: str) -> list[str]:
        """The calls without which a call cannot go on, in topological order; empty if it can."""
        if self.is_over(name) or self.next_go(name) is not None:
            return []
        unfinished = [other for other in self._graph.predecessors(name) if not self.is_over(other)]
        return list(dict.fromkeys([*unfinished, *self._must_wait_for(name)]))

    def _must_wait_for(self, name: str) -> list[str]:
        return [other for other in self._graph.must_follow(name) if not self.is_over(other)]


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
