"""Files of a version from those of the version before it, and from what has changed since.

    held: a file of v5      v6: delta 5 -> 6      v7, wanted: delta 6 -> 7
            `───────────────────► 5 -> 6 ────────────► 6 -> 7 ──► its file of v7

A server that was busy while versions came misses some; of several ways it takes that with the fewest bytes. A delta
names the digests of its base and of its result: after the trainer has gone back, what is held is an orphan, no delta
leads from it, and files are read whole.
"""

import heapq
import logging
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.checkpoint.file_delta import DELTA_SUFFIX, DeltaError, PieceFile, Readable, apply_delta, read_header
from corral.workers.weight_transport.filling import Filling, FindWay, NoWayError, Pieces, Way

logger = logging.getLogger(__name__)


def by_deltas(version: Filling) -> FindWay:
    """Deltas where they lead from what is held."""
    return partial(_find_way, version)


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


def _find_way(version: Filling, name: str, expected: FileEntry) -> Way | None:
    """By the file's delta from what is held; where a version was missed, by that one's delta and its own."""
    if f"{name}{DELTA_SUFFIX}" not in version.manifest.files:
        return None
    own = _read_delta(version.weights / f"{name}{DELTA_SUFFIX}")
    if own.result != expected:
        raise NoWayError(f"{own.path} leads to {own.result}, and the manifest has {expected}")
    others = [] if version.held.file(name, own.base) is not None else _missed_deltas(version.weights, name)
    chain = cheapest_chain(version.held.contents(name), expected, [own, *others])
    if not chain:
        return None
    base = version.held.file(name, chain[0].base)
    assert base is not None  # the chain begins with something that is held
    num_bytes = sum(delta.size for delta in chain)
    return Way(origin=f"{base} and {len(chain)} deltas", pieces=_applied(base, chain), bytes_read=num_bytes)


def _missed_deltas(weights: Path, name: str) -> list[Delta]:
    """Of the versions beside this one that are still there.

    Their manifests need not be read: what comes out in the end is compared with that of the present version.
    """
    found: list[Delta] = []
    for path in weights.parent.glob(f"*/{name}{DELTA_SUFFIX}"):
        try:
            found.append(_read_delta(path))
        except (NoWayError, OSError) as error:  # it may be gone this very moment, as old versions go
            logger.info("%s is no way to %s: %s", path, weights, error)
    return found


def _read_delta(path: Path) -> Delta:
    try:
        with open(path, "rb") as file:
            header = read_header(file)
            return Delta(path=path, size=os.fstat(file.fileno()).st_size, base=header.base, result=header.result)
    except DeltaError as error:
        raise NoWayError(str(error)) from error


def _applied(base: Path, chain: Sequence[Delta]) -> Pieces:
    with ExitStack() as files:
        source: Readable = files.enter_context(open(base, "rb", buffering=0))
        try:
            for delta in chain:
                opened = files.enter_context(open(delta.path, "rb"))
                pieces = apply_delta(source, opened, read_header(opened))
                source = PieceFile(pieces)
            yield from pieces
        except DeltaError as error:
            raise NoWayError(str(error)) from error
