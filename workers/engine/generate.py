"""POST /generate: one body -> a request -> the engine's thread -> one JSON, or a stream of it.

    body --> request --submit--> EngineLoop --future--> the answer as one JSON
                                     |
                    stream: true     +--listener--> outputs in their order
                                                       |
    "data: {first tokens}" ... "data: {last tokens}" <-+ "data: [DONE]"        server-sent events

An event holds the tokens since the one before, as those of SGLang do that is started with
`--incremental-streaming-output`, so what is sent grows with the answer and not with its square. A client that goes away
has its request aborted.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
from aiohttp import web

from corral.workers.engine.answer_text import answer_text
from corral.workers.engine.loop import EngineLoop, EngineStoppedError
from corral.workers.engine.messages import BadRequestError, GenerateBody, error_body, generate_reply, parse
from corral.workers.engine.requests import GenerationRequest, RequestOutput


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
