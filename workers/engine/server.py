"""HTTP front of the embedded engine: the part of SGLang's API that rollout workers and the manager speak.

    client --HTTP--> [ key | size | schema | limits ] --> EngineLoop (its own thread) --> future --> JSON
                        401   413    400      400         /generate: generate.py

    POST /generate        GET /health /ready /get_model_info /metrics

Every endpoint wants `Authorization: Bearer <api key>`. Errors are {"error": {"message": ...}}. 503 means "not now":
paused (/ready, /health), queue full, engine stopped. A client that goes away has its requests aborted. What changes the
engine (weights, pauses) has no endpoint: who runs this server has its loop.
"""

from __future__ import annotations

import asyncio
import ssl

from aiohttp import web

from corral.experiments.trial.guarded_listener import GuardedListener
from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.generate import GenerateEndpoint
from corral.workers.engine.loop import EngineLoop, EngineStoppedError
from corral.workers.engine.messages import error_body
from corral.workers.streams.https import Handler, require_key, serve

_WANTS_KEY = "this wants the header 'Authorization: Bearer <api key>' of the trial"
_SHUTDOWN_TIMEOUT_S = 5.0  # for replies under way when the server stops


class EngineServer:
    """Serves one GenerationEngine until `stop`.

    Example:
        server = EngineServer(engine, api_key, "127.0.0.1", tls=tls)
        url = await server.start()
        try:
            await server.wait_ended()       # raises what the engine thread died of
        finally:
            await server.stop()
    """

    def __init__(
        self,
        engine: GenerationEngine,
        api_key: str,
        host: str,
        *,
        tls: ssl.SSLContext,
        max_body_bytes: int = 64 * 2**20,
        max_queued_requests: int = 4096,
    ) -> None:
        """
        Args:
            engine: handed over; only this server's thread may use it from `start` on.
            api_key: what clients must send as bearer token.
            host: address to bind; the system chooses the port.
            tls: how the server proves itself to its clients.
            max_body_bytes: larger bodies are answered 413.
            max_queued_requests: beyond these, /generate answers 503.
        """
        if not api_key:
            raise ValueError("the key is empty; every endpoint is protected by it")
        self._guard = GuardedListener()
        self._check_key = require_key(api_key, lambda: _error(401, _WANTS_KEY), self._guard)
        self._host = host
        self._tls = tls
        self._max_body_bytes = max_body_bytes
        self.loop = EngineLoop(engine)
        """By which the engine is changed."""
        self._engine = engine
        self._generate = GenerateEndpoint(self.loop, max_queued_requests=max_queued_requests)
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Start the engine thread and listen; returns the URL."""
        application = web.Application(
            client_max_size=self._max_body_bytes, middlewares=[self._answer_errors, self._check_key]
        )
        application.add_routes(self._routes())
        # handler_cancellation: a client that hangs up must not keep rows of the batch busy.
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_TIMEOUT_S
        )
        url = await serve(self._runner, self._host, self._tls, self._guard)
        self.loop.start()
        return url

    async def stop(self) -> None:
        """End requests as aborted, answer them, close the port."""
        await asyncio.to_thread(self.loop.stop)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def wait_ended(self) -> None:
        """Until the engine thread ends; raises the exception that ended it, if any."""
        await asyncio.shield(asyncio.wrap_future(self.loop.ended))

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate.answer),
            web.get("/health", self._health),
            web.get("/ready", self._health),
            web.get("/get_model_info", self._get_model_info),
            web.get("/metrics", self._metrics),
        ]

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except (ValueError, web.RequestPayloadError) as error:
            return _error(400, str(error))
        except EngineStoppedError as error:
            return _error(503, str(error))
        except web.HTTPException as error:
            return _error(error.status, error.reason)

    async def _health(self, request: web.Request) -> web.Response:
        if self.loop.ended.done():
            return _error(503, f"the generation engine has ended: {self.loop.ended.exception()!r}")
        if self._engine.is_paused:
            return _error(503, "generation is paused")
        return web.Response()

    async def _get_model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": str(self._engine.model_directory),
                "model_type": self._engine.model_type,
                "weight_version": self._engine.version,
                "is_generation": True,
            }
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        counts = {
            "num_running_reqs": self._engine.num_running,
            "num_queue_reqs": self._engine.num_queued,
            "generation_tokens_total": self._engine.tokens_generated,
        }
        return web.Response(text="".join(f"sglang:{name} {count}\n" for name, count in counts.items()))


def _error(status: int, message: str) -> web.Response:
    return web.json_response(error_body(message), status=status)
