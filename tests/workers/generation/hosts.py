"""Several hosts on this machine: each a worker's real control server over a host directory of its own, and no model.

manager, or a test ──POST /stage, /bring_to──► ControlServer ──► WeightUpdates ──► WeightStaging
the control servers of other hosts ◄──GET /weights/DIGEST/FILE─────────────────────┘ └──► LabelServer
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from corral.experiments.trial.guarded_listener import GuardedListener
from corral.workers.checkpoint.published_weights import PublishedWeights
from corral.workers.generation.backend import NewWeights, Progress
from corral.workers.generation.control import ControlClient, ControlServer
from corral.workers.generation.held_weights import HeldWeights
from corral.workers.generation.server_client import Fingerprints, ServerError
from corral.workers.generation.weight_updates import Staged, WeightUpdates
from corral.workers.streams.https import open_session, serve
from corral.workers.weight_transport.filling import Encode, Filling, FindSource, StagedVersion, whole
from corral.workers.weight_transport.host_weights import HostWeights
from corral.workers.weight_transport.staging import Peers, WeightStaging
from tests.workers.generation.servers import ADMIN_KEY, API_KEY, DEADLINE_S, LOOPBACK
from tests.workers.loop_thread import LoopThread, loop_thread
from tests.workers.trusted import trust
from tests.workers.weight_transport.versions import content_of, make_version

TRIAL = "ab" * 16


class LabelServer:
    """A generation server that has a version's label and directory, and no weights; stands for its backend, too."""

    def __init__(self) -> None:
        self.tag, self.path = "0.0", ""

    async def start(self) -> str:
        application = web.Application()
        application.add_routes([web.get("/ready", self._ok)])
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        return await serve(self._runner, LOOPBACK, trust().server(), GuardedListener(timeout_s=600.0))

    async def stop(self) -> None:
        await self._runner.cleanup()

    def progress(self) -> Progress:
        return Progress(running=0, queued=0, tokens_generated=0)

    async def version(self) -> str:
        return self.tag

    async def fingerprints(self, *, skipped: Sequence[str]) -> list[Fingerprints]:
        raise ServerError("it has no weights")

    async def prepare(self, weights: Path) -> None:
        pass

    async def swap(self, new: NewWeights) -> float:
        self.tag, self.path = new.version, str(new.directory)
        return 0.0

    async def wait_ended(self) -> None:
        await asyncio.Event().wait()

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({})


class RememberingStaging(WeightStaging):
    """Knows whether it was told of other hosts the last time."""

    has_sources = False

    def stage(
        self, version: str, weights: Path, digest: str | None, *, timeout_s: float, sources: Sequence[str] = ()
    ) -> StagedVersion:
        self.has_sources = bool(sources)
        return super().stage(version, weights, digest, timeout_s=timeout_s, sources=sources)


class Host:
    """One worker on a host of its own."""

    def __init__(self, folder: Path, number: int) -> None:
        self.memory = folder / f"host-{number}"
        self.memory.mkdir()
        self.server = LabelServer()
        self.encode: Encode = whole
        self.num_read = 0
        """How often it read a whole version of the shared file system."""
        self._weights = HostWeights(self.memory, TRIAL, owner=f"generation_server/{number}")

    async def start(self) -> None:
        self.transport = RememberingStaging(
            self._weights, encode=self._encode, peers=Peers(ADMIN_KEY, trust().client())
        )
        self.updates = WeightUpdates(self.transport, mode="retract")
        self.url = await self.server.start()
        held = HeldWeights(self.server.fingerprints, self.url, version="0.0", directory=Path())
        self.updates.serves(self.server, held)
        self._control = ControlServer(self.updates, admin_key=ADMIN_KEY, address=LOOPBACK, tls=trust().server())
        self.control = await self._control.start()

    async def stop(self) -> None:
        await self._control.stop()
        await self.server.stop()
        self.transport.close()

    def record(self) -> dict[str, str | int]:
        """By which the manager finds it."""
        return {
            "url": self.url,
            "control": self.control,
            "incarnation": self.control,
            "place": self.updates.staging.place,
        }

    def content(self) -> dict[str, bytes]:
        """What its server was given."""
        return content_of(Path(self.server.path))

    def _encode(self, version: Filling) -> FindSource:
        self.num_read += not self.transport.has_sources
        return self.encode(version)


class Hosts:
    """All of them, on one event loop in a thread, and the shared file system."""

    def __init__(self, folder: Path, loop: LoopThread) -> None:
        self.all: list[Host] = []
        self.shared = folder / "shared"
        self._folder = folder
        self.run = loop.run

    def add(self) -> Host:
        host = Host(self._folder, len(self.all))
        self.run(host.start())
        self.all.append(host)
        return host

    def publish(self, seed: int, **sizes: Any) -> PublishedWeights:
        """A version on the shared file system, of files that nobody takes for weights."""
        weights = self.shared / f"v{seed}"
        return PublishedWeights(
            version=f"0.{seed}", weights=str(weights), digest=make_version(weights, seed=seed, suffix=".bin", **sizes)
        )

    def stage(self, host: Host, published: PublishedWeights, *sources: str, key: str = ADMIN_KEY) -> Staged:
        """As the manager asks for it."""
        client = ControlClient(self._session, api_key=API_KEY, admin_key=key, update_timeout_s=DEADLINE_S)
        return self.run(client.stage(host.control, published, sources=sources))

    def bring_to(self, host: Host, published: PublishedWeights) -> None:
        client = ControlClient(self._session, api_key=API_KEY, admin_key=ADMIN_KEY, update_timeout_s=DEADLINE_S)
        self.run(client.bring_to(host.control, published))

    async def _open(self) -> None:
        self._session = open_session(trust().client())

    async def _close(self) -> None:
        for host in self.all:
            await host.stop()
        await self._session.close()


@contextmanager
def running_hosts(folder: Path) -> Iterator[Hosts]:
    """None at first."""
    with loop_thread(deadline_s=DEADLINE_S) as loop:
        hosts = Hosts(folder, loop)
        try:
            hosts.run(hosts._open())
            yield hosts
        finally:
            hosts.run(hosts._close())
