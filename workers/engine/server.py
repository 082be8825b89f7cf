"""HTTP front of the embedded engine: the subset of SGLang's API that rollout workers and the manager speak.

    client --HTTP--> [ key | size | schema | limits ] --> EngineLoop (its own thread) --> future --> JSON
                        401   413    400      400         /generate: generate.py

    POST /generate /abort_request /pause_generation /continue_generation /update_weights_from_disk /weights_checker
    GET /health /ready /get_model_info /metrics

Every endpoint wants `Authorization: Bearer <api key>`; where there is an administrator's key, as SGLang has one, what
changes the server (aborts, pauses, updates) wants that one instead. Errors are {"error": {"message": ...}};
those of a weight update are {"success": false, "message": ...}. 503 means "not now": paused (/ready, /health), queue
full, engine stopped. A client that goes away has its requests aborted.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from corral.workers.engine.engine import GenerationEngine, PauseMode, StagedModel
from corral.workers.engine.generate import GenerateEndpoint
from corral.workers.engine.loop import EngineLoop, EngineStoppedError
from corral.workers.engine.messages import (
    AbortBody,
    BadRequestError,
    CheckWeightsBody,
    PauseBody,
    UpdateWeightsBody,
    error_body,
    parse,
)
from corral.workers.streams.https import serve

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CheckHeld = Callable[[Mapping[str, str]], None]

_COMMAND_TIMEOUT_S = 60.0  # the engine answers a command after its present decode step, which takes far less
_OF_THE_ADMINISTRATOR = frozenset(
    {
        "/abort_request",
        "/continue_generation",
        "/pause_generation",
        "/update_weights_from_disk",
        "/weights_checker",
    }
)
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
        admin_key: str | None = None,
        max_body_bytes: int = 64 * 2**20,
        max_queued_requests: int = 4096,
    ) -> None:
        """
        Args:
            engine: handed over; only this server's thread may use it from `start` on.
            api_key: what clients must send as bearer token.
            admin_key: what is wanted instead of it for aborts, pauses and updates; None is the same key.
            host: address to bind; the system chooses the port.
            tls: how the server proves itself to its clients.
            max_body_bytes: larger bodies are answered 413.
            max_queued_requests: beyond these, /generate answers 503.
        """
        if not api_key or admin_key == "":
            raise ValueError("a key is empty; every endpoint is protected by one")
        self._expected_authorization = f"Bearer {api_key}".encode()
        self._expected_of_administrator = f"Bearer {admin_key or api_key}".encode()
        self._host = host
        self._tls = tls
        self._max_body_bytes = max_body_bytes
        self._loop = EngineLoop(engine)
        self._generate = GenerateEndpoint(self._loop, max_queued_requests=max_queued_requests)
        self.engine = engine
        """Read its counters freely."""
        self._update_lock = asyncio.Lock()
        self._prepared: StagedModel | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Start the engine thread and listen; returns the URL."""
        await self._generate.load_tokenizer()
        application = web.Application(
            client_max_size=self._max_body_bytes, middlewares=[self._answer_errors, self._check_key]
        )
        application.add_routes(self._routes())
        # handler_cancellation: a client that hangs up must not keep rows of the batch busy.
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_TIMEOUT_S
        )
        url = await serve(self._runner, self._host, self._tls)
        self._loop.start()
        return url

    async def stop(self) -> None:
        """End requests as aborted, answer them, close the port."""
        await asyncio.to_thread(self._loop.stop)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def wait_ended(self) -> None:
        """Until the engine thread ends; raises the exception that ended it, if any."""
        await asyncio.shield(asyncio.wrap_future(self._loop.ended))

    async def prepare_weights(self, directory: Path) -> None:
        """Read and check weights while the engine generates, for the next update; one from elsewhere forgets them.

        Raises:
            WeightsRejectedError: if they are unreadable, incomplete or of another model.
        """
        async with self._update_lock:
            self._prepared = None  # two versions beside the live one would be one too many
            self._prepared = await asyncio.to_thread(self.engine.stage_weights, directory)

    async def checksums(self, *, skipped: Sequence[str]) -> dict[str, str]:
        """Of the live weights, which nobody writes into: it generates on."""
        checksums = self.engine.checksums
        return await asyncio.to_thread(checksums.of, checksums.names(skipped=skipped))

    async def change_over(
        self, directory: Path, *, version: str, mode: PauseMode, looked_at: Sequence[str], check: CheckHeld
    ) -> float:
        """Take over weights between two decode steps, those that were prepared if they are of this directory.

        Args:
            looked_at: parameters whose checksums `check` gets, when the new weights are live and have made no token.
            check: what it raises ends all requests, and is raised here.

        Returns:
            How long it kept the engine from its next step, in seconds.

        Raises:
            WeightsRejectedError: the weights are unreadable, incomplete or of another model.
        """
        engine = self.engine
        async with self._update_lock:
            staged = await self._staged(directory)
            await asyncio.to_thread(staged.checksums.of, looked_at)  # so that nothing is hashed while it stands still
            future = self._loop.change_over(
                staged, version=version, mode=mode, check=lambda: check(engine.checksums.of(looked_at))
            )
            changed = await self._ask(future)
        return changed.stopped_s

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate.answer),
            web.post("/abort_request", self._abort_request),
            web.post("/pause_generation", self._pause_generation),
            web.post("/continue_generation", self._continue_generation),
            web.post("/update_weights_from_disk", self._update_weights_from_disk),
            web.post("/weights_checker", self._check_weights),
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

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        is_for_administrator = request.path in _OF_THE_ADMINISTRATOR
        expected = self._expected_of_administrator if is_for_administrator else self._expected_authorization
        if not hmac.compare_digest(given, expected):
            key = "administrator's key" if is_for_administrator else "api key"
            return _error(401, f"this wants the header 'Authorization: Bearer <{key}>' of the trial")
        return await handler(request)

    async def _ask(self, future: Future[ResultT]) -> ResultT:
        return await asyncio.wait_for(asyncio.wrap_future(future), _COMMAND_TIMEOUT_S)

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = parse(AbortBody, await request.read())
        if body.rid is None and not body.abort_all:
            raise BadRequestError("one of rid and abort_all is required")
        wanted = None if body.abort_all else self._generate.request_ids(body.rid or "")
        await self._ask(self._loop.abort(wanted))
        return web.Response()

    async def _pause_generation(self, request: web.Request) -> web.Response:
        body = parse(PauseBody, await request.read())
        await self._ask(self._loop.pause(PauseMode(body.mode)))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        await self._ask(self._loop.resume())
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = parse(UpdateWeightsBody, await request.read())
        try:
            # Staging takes seconds for large models: one at a time, or an older version could overtake a newer one.
            async with self._update_lock:
                future = self._loop.update(
                    await self._staged(Path(body.model_path)),
                    version=body.weight_version,
                    flush_cache=body.flush_cache,
                    abort_all_requests=body.abort_all_requests,
                )
                result = await self._ask(future)
        except ValueError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        if result.is_cache_stale:
            message = (
                f"Weights were updated to {body.weight_version}, but the cache was not flushed because requests are "
                "still running; they go on with keys and values of the old weights. Send flush_cache: false if that is "
                "meant, or pause with mode retract."
            )
            return web.json_response({"success": False, "message": message}, status=400)
        message = f"Succeeded to update model weights. Weight version updated to {body.weight_version}."
        return web.json_response({"success": True, "message": message, "num_paused_requests": result.num_in_flight})

    async def _check_weights(self, request: web.Request) -> web.Response:
        body = parse(CheckWeightsBody, await request.read())
        checksums = await self.checksums(skipped=body.skip_tensor_list or ())
        return web.json_response({"success": True, "message": "Success", "ranks": [{"checksums": checksums}]})

    async def _staged(self, directory: Path) -> StagedModel:
        """What was prepared, which serves once, if it is of this directory; or else it is read now."""
        staged, self._prepared = self._prepared, None
        if staged is None or staged.directory != directory:
            staged = await asyncio.to_thread(self.engine.stage_weights, directory)
        return staged

    async def _health(self, request: web.Request) -> web.Response:
        if self._loop.ended.done():
            return _error(503, f"the generation engine has ended: {self._loop.failure!r}")
        if self.engine.is_paused:
            return _error(503, "generation is paused")
        return web.Response()

    async def _get_model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": str(self.engine.model_directory),
                "model_type": self.engine.model_type,
                "weight_version": self.engine.version,
                "is_generation": True,
            }
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        counts = {
            "num_running_reqs": self.engine.num_running,
            "num_queue_reqs": self.engine.num_queued,
            "generation_tokens_total": self.engine.tokens_generated,
        }
        return web.Response(text="".join(f"sglang:{name} {count}\n" for name, count in counts.items()))


def _error(status: int, message: str) -> web.Response:
    return web.json_response(error_body(message), status=status)
