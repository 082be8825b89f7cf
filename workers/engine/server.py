"""HTTP front of the embedded engine: the part of SGLang's API that rollout workers and the manager speak.

    client --HTTP--> [ key | size | schema | limits ] --> EngineLoop (its own thread) --> future --> JSON
                        401   413    400      400         GenerateEndpoint

    POST /generate        GET /health /ready /get_model_info /metrics

Every endpoint wants `Authorization: Bearer <api key>`. Errors are {"error": {"message": ...}}. 503 means "not now":
paused (/ready, /health), queue full, engine stopped. A client that goes away has its requests aborted. What changes the
engine (weights, pauses) has no endpoint: who runs this server has its loop.
"""

from __future__ import annotations

import asyncio
import base64
import reprlib
import ssl
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from aiohttp import web
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from corral.experiments.trial.guarded_listener import GuardedListener
from corral.workers.engine.engine import EngineLoop, EngineStoppedError, GenerationEngine
from corral.workers.engine.requests import ExpertRows, GenerationRequest, RequestOutput, answer_text
from corral.workers.engine.sampling import SamplingParams
from corral.workers.streams.https import Handler, require_key, serve

_WANTS_KEY = "this wants the header 'Authorization: Bearer <api key>' of the trial"
_SHUTDOWN_TIMEOUT_S = 5.0  # for replies under way when the server stops


# POST /generate: one body -> a request -> the engine's thread -> one JSON, or a stream of it.
#
#     body --> request --submit--> EngineLoop --future--> the answer as one JSON
#                                      |
#                     stream: true     +--listener--> outputs in their order
#                                                        |
#     "data: {first tokens}" ... "data: {last tokens}" <-+ "data: [DONE]"        server-sent events
#
# An event holds the tokens since the one before, as those of SGLang do that is started with
# `--incremental-streaming-output`, so what is sent grows with the answer and not with its square. A client that goes
# away has its request aborted.


class GenerateEndpoint:
    """Answers /generate, and knows how many requests are in flight."""

    def __init__(self, loop: EngineLoop, *, max_queued_requests: int) -> None:
        """max_queued_requests: beyond these the answer is 503."""
        self._loop = loop
        self._capacity = loop.engine.max_running_requests + max_queued_requests
        self._num_in_flight = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = parse(await request.read())
        asked = self._request(body)
        if self._num_in_flight >= self._capacity:
            message = f"{self._num_in_flight} of at most {self._capacity} requests are in flight; try another server"
            return web.json_response(error_body(message), status=503)
        self._num_in_flight += 1
        try:
            return await (self._stream(request, body, asked) if body.stream else self._whole(body, asked))
        except BaseException:  # the client is gone
            self._loop.abort([asked.request_id])
            raise
        finally:
            self._num_in_flight -= 1

    def _request(self, body: GenerateBody) -> GenerationRequest:
        """Checked before it is queued."""
        start = body.logprob_start_len if body.return_logprob and body.logprob_start_len >= 0 else None
        request = GenerationRequest(
            request_id=uuid.uuid4().hex,
            prompt=tuple(body.input_ids),
            sampling=body.sampling_params,
            input_logprobs_from=start,
            wants_original_logprobs=body.return_original_logprob,
            experts_from=body.routed_experts_start_len if body.return_routed_experts else None,
            is_streamed=body.stream,
        )
        self._loop.engine.check(request)
        if start is not None and start >= len(request.prompt):
            raise BadRequestError(
                f"logprob_start_len must be below the prompt's {len(request.prompt)} tokens, got {start}"
            )
        return request

    async def _whole(self, body: GenerateBody, asked: GenerationRequest) -> web.Response:
        output, decode = await asyncio.wrap_future(self._loop.submit(asked)), self._loop.engine.decode
        text = None
        if decode is not None:
            text = answer_text(output.output_ids, output.finish_reason, asked.sampling, decode)
        return web.json_response(generate_reply(output, body, text=text))

    async def _stream(self, request: web.Request, body: GenerateBody, asked: GenerationRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        event_loop, news = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | None]()

        def note(output: RequestOutput) -> None:
            event_loop.call_soon_threadsafe(news.put_nowait, output)

        last = asyncio.wrap_future(self._loop.submit(asked, listener=note))
        # None ends it: the last note comes before the future is done, and an engine that has ended ends its requests.
        last.add_done_callback(lambda _: news.put_nowait(None))
        try:
            while (output := await news.get()) is not None:
                await response.write(_event(generate_reply(output, body, text=None)))
            await last
        except (ValueError, EngineStoppedError) as error:
            # The status is sent already. SGLang says it in the stream, too.
            code = 400 if isinstance(error, ValueError) else 503
            await response.write(_event(error_body(str(error), code=code)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _event(content: dict[str, Any]) -> bytes:
    """One server-sent event, https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    return b"data: %b\n\n" % msgspec.json.encode(content)


# The JSON of the generation server: SGLang's request and response bodies, checked at the border.
#
#     body --parse()--> GenerateBody
#                  `--> BadRequestError (status 400), naming the field
#     RequestOutput --generate_reply()--> {"output_ids": ..., "meta_info": ...}
#     message --error_body()--> {"error": {"message": ...}}
#
# What this server would have to ignore (text prompts, grammars, logit biases) is refused by its name, so that no client
# believes in it. So are SGLang's lists of prompts: each answer has a request of its own.

_ERRORS_IN_MESSAGE = 3


class BadRequestError(ValueError):
    """The body is not what the endpoint takes; the message is for the client."""


def _check_token_ids(value: list[Any]) -> list[Any]:
    """By hand, so that 100,000 wrong items are one error and not 100,000."""
    if any(type(token_id) is not int for token_id in value):
        raise ValueError("must be a list of integer token ids, of one prompt")
    return value


class GenerateBody(BaseModel):
    """POST /generate."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    input_ids: Annotated[list[Any], AfterValidator(_check_token_ids)]
    """One prompt; a request for each answer."""
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = False
    return_original_logprob: bool = False
    """Whether `output_token_original_logprobs` come as well: those of the same tokens at temperature 1. SGLang has no
    such field; its servers that are started with SGLANG_RETURN_ORIGINAL_LOGPROB=1 give only these."""
    logprob_start_len: int = Field(default=-1, ge=-1)
    """First prompt position whose log-probability is returned; -1 returns none."""
    return_routed_experts: bool = False
    """Whether `routed_experts` comes with a finished answer: the experts of each token, see `encode_experts`."""
    routed_experts_start_len: int = Field(default=0, ge=0)
    """First token of prompt and answer whose experts are returned."""
    stream: bool = False
    """Whether the reply is a stream of server-sent events, each with the tokens since the one before."""

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        """Nothing is asked for that would not come."""
        if self.return_original_logprob and not self.return_logprob:
            raise ValueError("return_original_logprob needs return_logprob: true")
        return self


def parse(body: bytes) -> GenerateBody:
    """Check a JSON body; an empty one stands for {}.

    Raises:
        BadRequestError: naming the fields and what is wrong with them.
    """
    try:
        return GenerateBody.model_validate_json(body or b"{}")
    except ValidationError as error:
        problems = [_problem(entry) for entry in error.errors(include_url=False)]
        shown = "; ".join(problems[:_ERRORS_IN_MESSAGE])
        more = f"; and {len(problems) - _ERRORS_IN_MESSAGE} more" if len(problems) > _ERRORS_IN_MESSAGE else ""
        raise BadRequestError(shown + more) from error


def _problem(entry: ErrorDetails) -> str:
    where = ".".join(map(str, entry["loc"]))
    return f"{where}: {entry['msg']}, got {reprlib.repr(entry['input'])}" if where else entry["msg"]


def error_body(message: str, *, code: int | None = None) -> dict[str, Any]:
    """What a client gets in place of an answer; code: the status, where a stream has begun with another."""
    return {"error": {"message": message} if code is None else {"message": message, "code": code}}


def _triples(logprobs: Sequence[float | None], token_ids: Sequence[int]) -> list[list[float | int | None]]:
    return [[logprob, token_id, None] for logprob, token_id in zip(logprobs, token_ids, strict=True)]


def encode_experts(rows: ExpertRows) -> str:
    """[tokens, layers, top_k] as base64 of int32, row by row: all layers of the model, 0 in those without experts."""
    return base64.b64encode(np.ascontiguousarray(rows, "<i4").tobytes()).decode("ascii")


def generate_reply(output: RequestOutput, body: GenerateBody, *, text: str | None) -> dict[str, Any]:
    """One answer as SGLang gives it, with a tokenizer or (text: None) without; triples: [logprob, token id, null]."""
    meta_info: dict[str, Any] = {
        "id": output.request_id,
        "finish_reason": msgspec.to_builtins(output.finish_reason),
        "prompt_tokens": len(output.prompt),
        "completion_tokens": output.start + len(output.output_ids),
        "cached_tokens": output.cached_tokens,
        "weight_version": output.weight_version,
        "weight_versions": [span._asdict() for span in output.weight_versions],
        "num_retractions": output.num_retractions,
    }
    if body.return_logprob:
        scored_prompt = output.prompt[body.logprob_start_len :] if output.input_logprobs else ()
        meta_info["input_token_logprobs"] = _triples(output.input_logprobs, scored_prompt)
        meta_info["output_token_logprobs"] = _triples(output.output_logprobs, output.output_ids)
        if body.return_original_logprob:
            meta_info["output_token_original_logprobs"] = _triples(output.original_logprobs, output.output_ids)
        meta_info["output_token_logprobs_length"] = len(output.output_ids)
    if output.experts is not None:
        meta_info["routed_experts"] = encode_experts(output.experts)
    reply = {"output_ids": list(output.output_ids), "meta_info": meta_info}
    return reply if text is None else {"text": text, **reply}


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
