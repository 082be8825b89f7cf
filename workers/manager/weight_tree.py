"""Which host gets a version from whom: a tree that grows from the hosts that hold it, one branch at a time.

    nobody holds it:       at most 2 hosts ◄── the shared file system        all others wait
    some hold it:          each gives it to at most 2 hosts at a time        the rest waits until one has it

With 2 receivers of each, there are three times as many holders after each round. Nothing is planned ahead: what is
planned follows from what the table says at the moment, so a host that joins late is one more that wants it, one that is
gone gives to nobody, and a source that was reported is no holder until it has staged the version anew. The servers of
one host share what it stages: the first one stages, the others wait for it. Pure.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from corral.workers.manager.servers import Server

MAX_RECEIVERS: Final = 2  # of one holder; a single stream is bound by the receiver's hashing, not by a fast network
MAX_READERS: Final = 2  # of the shared file system; a second one, should the first one hang
MAX_SOURCES: Final = 3  # that a receiver is told; only the first is counted, the others are for when it fails
SHARED_FILE_SYSTEM: Final = ""


@dataclass(frozen=True, slots=True)
class Start:
    """An update that may start now."""

    server: Server
    arrives_from: str | None
    """The place of its source, or SHARED_FILE_SYSTEM; None where nothing is in the way of others."""
    sources: tuple[str, ...] = ()
    """Control URLs that the server's worker is told, in the order in which it is to ask them."""


def plan_updates(servers: Collection[Server], needing: Sequence[Server], *, version: str) -> list[Start]:
    """The updates that may start now, of those that are needed.

    Args:
        servers: all, those with updates under way, too.
        needing: servers that are to be brought to `version`, and of which no update is under way.
    """
    tree = _Tree(servers, version)
    starts = (tree.start(server) for server in needing)
    return [start for start in starts if start is not None]


class _Tree:
    """Who holds a version, and what is on its way, with what has just been planned."""

    def __init__(self, servers: Iterable[Server], version: str) -> None:
        self._holders: dict[str, str] = {}
        """Control URL of one that holds the version, by place."""
        self._arriving: set[str] = set()
        """Places that something arrives at."""
        self._load: Counter[str] = Counter()
        """Receivers by place of their source."""
        for server in servers:
            if server.place and server.staged == version:
                self._holders.setdefault(server.place, server.control)
            if server.arrives_from is not None:
                self._arriving.add(server.place)
                self._load[server.arrives_from] += 1
        self._num_free = sum(max(0, MAX_RECEIVERS - self._load[place]) for place in self._holders)
        """Receivers that the holders can take besides."""

    def start(self, server: Server) -> Start | None:
        """None while it has to wait."""
        place = server.place
        if not place or place in self._holders:  # it takes part in no tree, or finds the version on its host
            return Start(server, None)
        num_free = self._num_free if self._holders else MAX_READERS - self._load[SHARED_FILE_SYSTEM]
        if place in self._arriving or num_free <= 0:
            return None
        sources = heapq.nsmallest(MAX_SOURCES, self._holders, key=lambda source: (self._load[source], source))
        chosen = sources[0] if sources else SHARED_FILE_SYSTEM
        self._load[chosen] += 1
        self._num_free -= 1
        self._arriving.add(place)
        return Start(server, chosen, tuple(self._holders[source] for source in sources))
