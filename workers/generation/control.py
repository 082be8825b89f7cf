"""How the manager tells a generation worker to take over weights: HTTP of the worker's own, beside its server's.

    manager: ControlClient ──POST /stage, /bring_to, admin key──► worker: ControlServer ──► WeightUpdates
    worker of another host ──GET /weights/DIGEST/FILE, admin key────────┘ └──► give_weights

Apart from the server's, since the worker must know what happens to its server, and what must not reach the server.

    is DIGEST held? is FILE in its manifest? ──sendfile──► its bytes
        `──► 404, whatever else it names

Only what a manifest lists has a name here, and only while its version is held: a path is never made from what was asked
for before that was found among those names. The asking end is `workers/weight_transport/staging.py`.
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from corral.experiments.trial.guarded_listener import GuardedListener
from corral.workers.checkpoint.manifest import CorruptCheckpointError, read_manifest
from corral.workers.checkpoint.published_weights import PublishedWeights
from corral.workers.generation.server_client import RefusedError, ServerError, call, decoded
from corral.workers.generation.weight_updates import Staged, UpdateOrder, WeightsTornError, WeightUpdates
from corral.workers.streams.https import Handler, require_key, serve

_SLOWEST_BYTES_PER_S = 10e6  # who takes a file slower than this is faster with the shared file system
_LONGEST_PAUSE_S = 30.0  # that one may make besides

GIVEN_PATH: Final = "/weights/{digest}/{name:.+}"
Held = Callable[[str], Path | None]
"""The directory of a version by the digest of its manifest, or None if it is not held."""


async def give_weights(held: Held, request: web.Request) -> web.StreamResponse:
    """Answers GET /weights/DIGEST/FILE, behind the check of keys."""
    digest, name = request.match_info["digest"], request.match_info["name"]
    directory = held(digest)
    if directory is None:
        return web.Response(status=404, text=f"this worker does not hold {digest}")
    try:
        manifest = await asyncio.to_thread(read_manifest, directory, digest)
    except CorruptCheckpointError as error:
        return web.Response(status=404, text=str(error))
    if (entry := manifest.files.get(name)) is None:
        return web.Response(status=404, text=f"{digest} has no file {name!r}")
    return _TimedFile(directory / name, timeout_s=_LONGEST_PAUSE_S + entry.size / _SLOWEST_BYTES_PER_S)


class _TimedFile(web.FileResponse):
    """A host that vanished would hold the file, and with it memory of this host, until TCP gives up."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        super().__init__(path)
        self._timeout_s = timeout_s

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send it; TimeoutError ends the connection."""
        async with asyncio.timeout(self._timeout_s):
            return await super().prepare(request)


PROBE_TIMEOUT_S: Final = 3.0
_UPDATE_MARGIN_S = 30.0  # the worker gives up first, and says why
_SHUTDOWN_TIMEOUT_S = 1.0
_WANTS_KEY = "this wants the administrator's key of the trial"
_TORN = 422  # the weights are at fault, not the server: the trainer that published them must learn of it


class ControlServer:
    """Answers the manager on the running loop."""

    def __init__(self, updates: WeightUpdates, *, admin_key: str, address: str, tls: ssl.SSLContext) -> None:
        self._updates = updates
        self._guard = GuardedListener()
        self._check_key = require_key(admin_key, lambda: web.Response(status=401, text=_WANTS_KEY), self._guard)
        self._address = address
        self._tls = tls
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Listen; returns the URL."""
        application = web.Application(middlewares=[self._check_key, self._answer_errors])
        application.add_routes(
            [
                web.post("/bring_to", self._bring_to),
                web.post("/stage", self._stage),
                web.get(GIVEN_PATH, partial(give_weights, self._updates.staging.held)),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S)
        return await serve(self._runner, self._address, self._tls, self._guard)

    async def stop(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except msgspec.MsgspecError as error:
            return web.Response(status=400, text=str(error))
        except ServerError as error:
            return web.Response(status=_TORN if isinstance(error, WeightsTornError) else 409, text=str(error))

    async def _bring_to(self, request: web.Request) -> web.Response:
        await self._updates.bring_to(msgspec.json.decode(await request.read(), type=UpdateOrder))
        return web.Response()

    async def _stage(self, request: web.Request) -> web.Response:
        staged = await self._updates.stage(msgspec.json.decode(await request.read(), type=UpdateOrder))
        return web.Response(body=msgspec.json.encode(staged), content_type="application/json")


class ControlClient:
    """The manager's side."""

    def __init__(
        self, session: aiohttp.ClientSession, *, api_key: str, admin_key: str, update_timeout_s: float
    ) -> None:
        self._session = session
        self._api_key = api_key
        self._admin_key = admin_key
        self._update_timeout_s = update_timeout_s

    async def stage(self, control_url: str, published: PublishedWeights, *, sources: Sequence[str]) -> Staged:
        """Until the worker's host has these weights.

        Args:
            sources: control URLs of workers on other hosts that hold them.

        Raises:
            WeightsTornError: they are not what was published.
            ServerError: what the worker says went wrong, or that it does not answer.
        """
        timeout_s = self._update_timeout_s + _UPDATE_MARGIN_S
        answer = await self._order(f"{control_url}/stage", published, sources, timeout_s)
        return decoded(answer, Staged, url=f"{control_url}/stage")

    async def bring_to(self, control_url: str, published: PublishedWeights, *, sources: Sequence[str] = ()) -> None:
        """Until the worker's server holds these weights; as `stage`."""
        timeout_s = 2 * self._update_timeout_s + _UPDATE_MARGIN_S  # to stage, and to read what was staged
        await self._order(f"{control_url}/bring_to", published, sources, timeout_s)

    async def _order(self, url: str, published: PublishedWeights, sources: Sequence[str], timeout_s: float) -> str:
        order = UpdateOrder(
            **msgspec.structs.asdict(published), timeout_s=self._update_timeout_s, sources=list(sources)
        )
        try:
            return await call(
                self._session, url, key=self._admin_key, timeout_s=timeout_s, body=msgspec.to_builtins(order)
            )
        except RefusedError as error:
            if error.status == _TORN:
                raise WeightsTornError(str(error)) from error
            raise

    async def probe(self, url: str) -> None:
        """ServerError unless the server at `url` says that it takes requests."""
        await call(self._session, f"{url}/ready", key=self._api_key, timeout_s=PROBE_TIMEOUT_S)
