"""POST /generate: one body -> a plan of requests -> the engine's thread -> one JSON, or a stream of it.

    body --plan--> request per prompt --submit--> EngineLoop --futures--> all answers as one JSON
                                                                 |
                                    stream: true                 +--listener--> outputs in their order
                                                                                  |
              "data: {first tokens}" ... "data: {last tokens}" "data: [DONE]" <---+   server-sent events

An event holds the tokens since the one before, as those of SGLang do that is started with
`--incremental-streaming-output`, so what is sent grows with the answer and not with its square. A client that goes away
has its requests aborted.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from aiohttp import web

from corral.workers.engine.answer_text import answer_text
from corral.workers.engine.loop import EngineLoop, EngineStoppedError, OutputListener
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
        plan = self._plan(body)
        if len(plan) > self._capacity:
            raise BadRequestError(
                f"{len(plan)} answers in one request are more than this server ever holds, {self._capacity}; "
                "ask for fewer"
            )
        if self._num_in_flight + len(plan) > self._capacity:
            message = f"{self._num_in_flight} of at most {self._capacity} requests are in flight; try another server"
            return web.json_response(error_body(message), status=503)
        with self._in_flight(plan):
            return await (self._stream(request, body, plan) if body.stream else self._whole(body, plan))

    def _plan(self, body: GenerateBody) -> list[GenerationRequest]:
        """One request per prompt, all checked before the first is queued."""
        start = body.logprob_start_len if body.return_logprob and body.logprob_start_len >= 0 else None
        plan: list[GenerationRequest] = []
        for prompt, sampling in zip(body.prompts, body.params_by_prompt, strict=True):
            request = GenerationRequest(
                request_id=uuid.uuid4().hex,
                prompt=tuple(prompt),
                sampling=sampling,
                input_logprobs_from=start,
                wants_original_logprobs=body.return_original_logprob,
                experts_from=body.routed_experts_start_len if body.return_routed_experts else None,
                is_streamed=body.stream,
            )
            self._loop.engine.check(request)
            if start is not None and start >= len(prompt):
                raise BadRequestError(f"logprob_start_len must be below the prompt's {len(prompt)} tokens, got {start}")
            plan.append(request)
        return plan

    @contextmanager
    def _in_flight(self, plan: list[GenerationRequest]) -> Iterator[None]:
        """Counted; if one has failed or the client is gone, nobody reads the others."""
        self._num_in_flight += len(plan)
        try:
            yield
        except BaseException:
            self._abort(plan)
            raise
        finally:
            self._num_in_flight -= len(plan)

    async def _whole(self, body: GenerateBody, plan: list[GenerationRequest]) -> web.Response:
        outputs = await self._outputs(plan, listener=None)
        decode = self._loop.engine.decode
        replies = []
        for asked, output in zip(plan, outputs, strict=True):
            text = None
            if decode is not None:
                text = answer_text(output.output_ids, output.finish_reason, asked.sampling, decode)
            replies.append(generate_reply(output, body, text=text))
        return web.json_response(replies[0] if body.is_single else replies)

    async def _outputs(self, plan: list[GenerationRequest], *, listener: OutputListener | None) -> list[RequestOutput]:
        futures = [self._loop.submit(asked, listener=listener) for asked in plan]
        return await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))

    async def _stream(
        self, request: web.Request, body: GenerateBody, plan: list[GenerationRequest]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        place = {asked.request_id: index for index, asked in enumerate(plan)}
        event_loop, news = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | None]()

        def note(output: RequestOutput) -> None:
            event_loop.call_soon_threadsafe(news.put_nowait, output)

        whole = asyncio.ensure_future(self._outputs(plan, listener=note))
        # None ends it: the last note of a request comes before its future is done, and an engine that has ended ends
        # its requests.
        whole.add_done_callback(lambda _: news.put_nowait(None))
        try:
            while (output := await news.get()) is not None:
                reply = generate_reply(output, body, text=None)
                await response.write(_event(reply if body.is_single else {**reply, "index": place[output.request_id]}))
            await whole
        except (ValueError, EngineStoppedError) as error:
            # The status is sent already. SGLang says it in the stream, too.
            self._abort(plan)
            code = 400 if isinstance(error, ValueError) else 503
            await response.write(_event(error_body(str(error), code=code)))
        finally:
            whole.cancel()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _abort(self, plan: list[GenerationRequest]) -> None:
        self._loop.abort(asked.request_id for asked in plan)


def _event(content: dict[str, Any]) -> bytes:
    """One server-sent event, https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    return b"data: %b\n\n" % msgspec.json.encode(content)
