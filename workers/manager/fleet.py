"""Fleet: every generation server of the trial, brought to the present weights and looked after.

    records ────────► appeared, gone ─► a probe of each, every 2 s ──silent──► SUSPECT
    new weights ─┐                                                                │ a pause
    joined ──────┼──► those that need it ─► as hosts can have it (weight_tree.py): staged ─► told ─► verified ─► READY
    SUSPECT ─────┘                                                                            └─► requests that wait

Updates and probes run side by side, one of each for a server at most. Nothing is locked across I/O.

Guarantee: what has died, or does not answer, gets no request after `PROBE_INTERVAL_S + PROBE_TIMEOUT_S`, which is 5 s,
and earlier if a request finds out. The records only say where servers are: nobody is taken for well because of one.
"""

import asyncio
import contextlib
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from corral.name_resolve.base import NameServiceError
from corral.workers.checkpoint.published_weights import PublishedWeights, Refusal, WeightsInUse
from corral.workers.generation.control import PROBE_TIMEOUT_S, ControlClient
from corral.workers.generation.server_client import ServerError
from corral.workers.generation.weight_updates import WeightsTornError
from corral.workers.manager.routing import ServerTable
from corral.workers.manager.servers import Server, ServerState
from corral.workers.manager.weight_tree import Start, plan_updates

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 5.0 - PROBE_TIMEOUT_S
_STARTED_AT_ONCE, _START_PAUSE_S = 16, 0.01  # of hundreds of updates, so that rollout workers are answered meanwhile
_MOST_REFUSALS = 2  # of one directory by one server: a network file system may show a new file late, but not for ever


class Fleet:
    """Wires the table of servers to HTTP; its tasks end with the group that it is given."""

    def __init__(
        self,
        table: ServerTable,
        client: ControlClient,
        in_use: WeightsInUse,
        tasks: asyncio.TaskGroup,
        *,
        most_standing_still: int,
        on_serving: Callable[[], None],
        on_news: Callable[[], None],
    ) -> None:
        """
        Args:
            in_use: where it is said which weights are being read, and which were refused.
            most_standing_still: servers that may take over weights at the same time, of those that generate.
            on_serving: is called when a server serves other weights than before.
            on_news: is called when others may be brought to the present weights now.
        """
        self._table = table
        self._client = client
        self._in_use = in_use
        self._tasks = tasks
        self._standing_still = asyncio.Semaphore(most_standing_still)
        self._on_serving = on_serving
        self._on_news = on_news
        self._updates: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Under way, by name and incarnation of the server: what a lost host was told holds up nobody else."""
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
                async with self._standing_still if is_serving else contextlib.nullcontext():
                    self._table.happened(server, "told")
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
