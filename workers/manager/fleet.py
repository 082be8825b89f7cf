"""Fleet: every generation server of the trial, brought to the present weights and looked after.

    records ────────► appeared, gone ─► a probe of each, every 2 s ──silent──► SUSPECT
    new weights ─┐                                                                │ a pause
    joined ──────┼──► those that need it ─► as hosts can have it (plan_updates): staged ─► updating ─► verified ─► READY
    SUSPECT ─────┘                                                                                └─► requests that wait

Updates and probes run side by side, one of each for a server at most. Nothing is locked across I/O.

Guarantee: what has died, or does not answer, gets no request after `PROBE_INTERVAL_S + PROBE_TIMEOUT_S`, which is 5 s,
and earlier if a request finds out. The records only say where servers are: nobody is taken for well because of one.
"""

import asyncio
import heapq
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from corral.name_resolve.base import NameServiceError
from corral.workers.checkpoint.published_weights import PublishedWeights, Refusal, WeightsInUse
from corral.workers.generation.control import PROBE_TIMEOUT_S, ControlClient
from corral.workers.generation.server_client import ServerError
from corral.workers.generation.weight_updates import WeightsTornError
from corral.workers.manager.routing import ServerTable
from corral.workers.manager.servers import Server, ServerState

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 5.0 - PROBE_TIMEOUT_S
_STARTED_AT_ONCE, _START_PAUSE_S = 16, 0.01  # of hundreds of updates, so that rollout workers are answered meanwhile
_MOST_REFUSALS = 2  # of one directory by one server: a network file system may show a new file late, but not for ever


MAX_RECEIVERS: Final = 2  # of one holder; a single stream is bound by the receiver's hashing, not by a fast network
MAX_READERS: Final = 2  # of the shared file system; a second one, should the first one hang
MAX_SOURCES: Final = 3  # that a receiver gets; only the first is counted, the others are for when it fails
SHARED_FILE_SYSTEM: Final = ""


@dataclass(frozen=True, slots=True)
class Start:
    """An update that may start now."""

    server: Server
    arrives_from: str | None
    """The place of its source, or SHARED_FILE_SYSTEM; None where nothing is in the way of others."""
    sources: tuple[str, ...] = ()
    """Control URLs for the server's worker, in the order in which to ask them."""


def plan_updates(servers: Collection[Server], needing: Sequence[Server], *, version: str) -> list[Start]:
    """The updates that may start now, of those that are needed.

    Which host gets a version from whom is a tree that grows from the hosts that hold it, one branch at a time:

        nobody holds it:       at most 2 hosts ◄── the shared file system        all others wait
        some hold it:          each gives it to at most 2 hosts at a time        the rest waits until one has it

    With 2 receivers of each, there are three times as many holders after each round. Nothing is planned ahead: what is
    planned follows from what the table says at the moment, so a host that joins late is one more that wants it, one
    that is gone gives to nobody, and a source that was reported is no holder until it has staged the version anew. The
    servers of one host share what it stages: the first one stages, the others wait for it. Pure.

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


class Fleet:
    """Wires the table of servers to HTTP; its tasks end with the group that it is given."""

    def __init__(
        self,
        table: ServerTable,
        client: ControlClient,
        in_use: WeightsInUse,
        tasks: asyncio.TaskGroup,
        *,
        on_serving: Callable[[], None],
        on_news: Callable[[], None],
    ) -> None:
        """
        Args:
            in_use: where it is said which weights are being read, and which were refused.
            on_serving: is called when a server serves other weights than before.
            on_news: is called when others may be brought to the present weights now.
        """
        self._table = table
        self._client = client
        self._in_use = in_use
        self._tasks = tasks
        self._on_serving = on_serving
        self._on_news = on_news
        self._updates: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Updates under way, by name and incarnation of the server: an update of a lost host holds up no other."""
        self._refusals: Counter[tuple[str, str]] = Counter()
        """Of directories of weights, by name of the server."""
        self._refused: Refusal | None = None

    def refusal_of(self, published: PublishedWeights) -> str:
        """Why servers turn these weights away; "" if none does."""
        return self._refused.reason if self._refused and self._refused.weights == published.weights else ""

    def take_in(self, records: Mapping[str, str]) -> None:
        """What the name service says of servers, by its names."""
        present: set[str] = set()
        for name, text in records.items():
            server = f"generation_server/{name.rpartition('/')[2]}"
            present.add(server)
            known = self._table.servers.get(server)
            if (new := self._table.appeared(server, **json.loads(text))) is not known:
                self._tasks.create_task(self._probe_while_it_lives(new))
        for server in self._table.gone(present):
            logger.warning("%s is gone", server)

    async def _probe_while_it_lives(self, server: Server) -> None:
        # Of hundreds that are there at once: not all at once.
        await asyncio.sleep(random.uniform(0.0, PROBE_INTERVAL_S))
        while server.state is not ServerState.DEAD:
            if server.state is ServerState.READY:
                try:
                    await self._client.probe(server.url)
                    self._table.answered(server)
                except ServerError as error:
                    if server.state is ServerState.READY:  # not paused by an update of ours in the meantime
                        logger.warning("%s does not answer its probe: %s", server.name, error)
                        self._table.happened(server, "silent", reason=f"it does not answer its probe: {error}")
            await asyncio.sleep(PROBE_INTERVAL_S)

    # Weights

    async def bring_up(self, published: PublishedWeights) -> None:
        """Bring servers that need it to these weights: all at the same time, or as hosts can give it to them."""
        self._updates = {key: task for key, task in self._updates.items() if not task.done()}
        needing = [
            server
            for server in self._table.needing(published.policy_version)
            if (server.name, server.incarnation) not in self._updates
            and self._refusals[server.name, published.weights] < _MOST_REFUSALS
        ]
        # Without a digest, as with initial weights, nobody stages what others could have.
        starts = [Start(server, None) for server in needing]
        if published.digest is not None:
            starts = plan_updates(self._table.servers.values(), needing, version=published.version)
        for number, start in enumerate(starts):
            if number % _STARTED_AT_ONCE == _STARTED_AT_ONCE - 1:
                await asyncio.sleep(_START_PAUSE_S)
            server = start.server
            server.arrives_from = start.arrives_from
            task = self._tasks.create_task(self._update(start, published))
            self._updates[server.name, server.incarnation] = task
            task.add_done_callback(lambda _: self._on_news())

    async def _update(self, start: Start, published: PublishedWeights) -> None:
        server, version = start.server, published.version
        is_serving = server.state is ServerState.READY
        try:
            async with self._in_use.reading(published.directory):
                if published.digest is not None and (server.place or is_serving):
                    await self._stage(start, published)
                self._table.happened(server, "updating")
                await self._client.bring_to(server.control, published, sources=start.sources)
            await self._client.probe(server.url)
        except (ServerError, NameServiceError) as error:
            logger.warning("%s could not be brought to version %s: %s", server.name, version, error)
            if isinstance(error, WeightsTornError):
                await self._note_refusal(server, published, str(error))
            self._table.happened(server, "not updated", reason=f"not brought to version {version}: {error}")
            return
        if server.version is None:
            logger.info("%s joins at version %s", server.name, version)
        self._table.happened(server, "verified", version=published.policy_version)
        self._on_serving()

    async def _note_refusal(self, server: Server, published: PublishedWeights, reason: str) -> None:
        """A server that finds the same directory damaged again is not sent there any more, and the trainer hears of it.

        Guarantee: damage that lasts is read twice by each server, and then waits for weights that are published anew.
        """
        self._refusals[server.name, published.weights] += 1
        if self._refusals[server.name, published.weights] < _MOST_REFUSALS:
            return
        is_served = any(self._table.serving(published.policy_version))
        self._refused = Refusal(weights=published.weights, server=server.name, reason=reason, is_served=is_served)
        await self._in_use.refuse(self._refused)

    async def _stage(self, start: Start, published: PublishedWeights) -> None:
        """Before the server takes the version over, its host has it for others."""
        server = start.server
        staged = await self._client.stage(server.control, published, sources=start.sources)
        for source in staged.failed_sources:
            logger.warning("%s did not get version %s from %s", server.name, published.version, source)
            self._table.gave_not(source, version=published.version)
        self._table.staged(server, version=published.version if staged.is_held else None)
        self._on_news()
