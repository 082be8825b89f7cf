"""How the manager tells a generation worker to take over weights: HTTP of the worker's own, beside its server's.

    manager: ControlClient.bring_to ──POST /bring_to, admin key──► worker: ControlServer ──► WeightUpdates

Apart from the server's, since the worker must know what happens to its server, and what must not reach the server.
"""

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from corral.workers.checkpoint.published_weights import PublishedWeights
from corral.workers.generation.http_calls import ServerError, get_text, post
from corral.workers.generation.weight_updates import WeightUpdates

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PROBE_TIMEOUT_S = 5.0
_UPDATE_MARGIN_S = 30.0  # the worker gives up first, and says why
_SHUTDOWN_TIMEOUT_S = 1.0


class BringTo(BaseModel):
    """POST /bring_to."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    version: str = Field(min_length=1)
    weights: str = Field(min_length=1)
    """A directory."""
    digest: str | None
    """SHA-256 of its manifest; None where whoever published it knows none."""
    timeout_s: float = Field(gt=0.0)
    """Longest time that staging them may take, and again reading them."""


class ControlServer:
    """Answers the manager on the running loop."""

    def __init__(self, updates: WeightUpdates, *, admin_key: str, address: str) -> None:
        self._updates = updates
        self._expected = f"Bearer {admin_key}".encode()
        self._address = address
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Listen; returns the URL."""
        application = web.Application(middlewares=[self._check_key])
        application.add_routes([web.post("/bring_to", self._bring_to)])
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._address, port=0).start()
        return f"http://{self._address}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._expected):
            return web.Response(status=401, text="this wants the administrator's key of the trial")
        return await handler(request)

    async def _bring_to(self, request: web.Request) -> web.Response:
        try:
            body = BringTo.model_validate_json(await request.read())
        except ValidationError as error:
            return web.Response(status=400, text=str(error))
        try:
            await self._updates.bring_to(
                version=body.version, weights=Path(body.weights), digest=body.digest, timeout_s=body.timeout_s
            )
        except ServerError as error:
            return web.Response(status=409, text=str(error))
        return web.Response()


class ControlClient:
    """The manager's side."""

    def __init__(
        self, session: aiohttp.ClientSession, *, api_key: str, admin_key: str, update_timeout_s: float
    ) -> None:
        self._session = session
        self._api_key = api_key
        self._admin_key = admin_key
        self._update_timeout_s = update_timeout_s

    async def bring_to(self, control_url: str, published: PublishedWeights) -> None:
        """Until the worker's server holds these weights.

        Raises:
            ServerError: what the worker says went wrong, or that it does not answer.
        """
        body = {**msgspec.structs.asdict(published), "timeout_s": self._update_timeout_s}
        timeout_s = 2 * self._update_timeout_s + _UPDATE_MARGIN_S  # to stage, and to read what was staged
        await post(self._session, f"{control_url}/bring_to", body, key=self._admin_key, timeout_s=timeout_s)

    async def probe(self, url: str) -> None:
        """ServerError unless the server at `url` says that it takes requests."""
        await get_text(self._session, f"{url}/ready", key=self._api_key, timeout_s=_PROBE_TIMEOUT_S)
