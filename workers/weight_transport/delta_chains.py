"""Which deltas lead from what a host holds to the file that it wants, with the fewest bytes. Pure.

    held: a file of v5      v6: delta 5 -> 6      v7, wanted: delta 6 -> 7
            `───────────────────► 5 -> 6 ────────────► 6 -> 7 ──► its file of v7

A server that was busy while versions came misses some. Deltas are known by the digests that they lead from and to: what
is an orphan, or of another lineage, is on no way.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from corral.workers.checkpoint.durable_file import FileEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A file that leads from one content of another file to the next."""

    path: Path
    size: int
    """Bytes of it."""
    base: FileEntry
    result: FileEntry


def cheapest_chain(held: Collection[FileEntry], wanted: FileEntry, deltas: Iterable[Delta]) -> tuple[Delta, ...] | None:
    """Deltas to apply one after the other, the first one to something that is held (Dijkstra 1959, from the end).

    Returns:
        Those with the fewest bytes, and fewer than the wanted file has; None where no deltas lead there so.
    """
    leading_to: dict[FileEntry, list[Delta]] = defaultdict(list)
    for delta in deltas:
        leading_to[delta.result].append(delta)
    order = count()  # of equally many bytes, the first that was found
    reached: list[tuple[int, int, FileEntry, tuple[Delta, ...]]] = [(0, next(order), wanted, ())]
    done: set[FileEntry] = set()
    while reached:
        num_bytes, _, entry, chain = heapq.heappop(reached)
        if entry in held:
            return chain
        if entry in done:
            continue
        done.add(entry)
        for delta in leading_to[entry]:
            if num_bytes + delta.size < wanted.size:
                heapq.heappush(reached, (num_bytes + delta.size, next(order), delta.base, (delta, *chain)))
    return None
