"""POST /generate: one body -> a plan of requests -> the engine's thread -> one JSON, or a stream of it.

    body --plan--> request per prompt and sample --submit--> EngineLoop --futures--> all answers as one JSON
                                                                 |
                                    stream: true                 +--listener--> latest output of each
                                                                                  |
                    "data: {answer so far}" ... "data: {answer}" "data: [DONE]" <-+   server-sent events

A chunk holds the whole answer so far, as SGLang's do: a client that reads slowly gets fewer and larger ones, and none
of them is kept for it. A client that goes away has its requests aborted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from corral.workers.engine.answer_text import DecodeText, TextForm, answer_text
from corral.workers.engine.loop import EngineLoop, EngineStoppedError
from corral.workers.engine.messages import BadRequestError, GenerateBody, error_body, generate_reply, parse
from corral.workers.engine.requests import GenerationRequest, RequestOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Planned:
    """One answer that a body asks for."""

    rid: str
    request: GenerationRequest
    text_form: TextForm


class _LatestOutputs:
    """What the engine thread last said of each streamed request; keeps one output of each, for one reader."""

    def __init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._is_awake = asyncio.Event()
        self._outputs: dict[str, RequestOutput] = {}

    def note(self, output: RequestOutput) -> None:
        """From any thread."""
        self._event_loop.call_soon_threadsafe(self._note, output)

    def _note(self, output: RequestOutput) -> None:
        self._outputs[output.request_id] = output
        self._is_awake.set()

    def wake(self) -> None:
        """Let the reader look, though there may be nothing new."""
        self._is_awake.set()

    async def changed(self) -> None:
        """Until `note` or `wake`; an engine that has ended ends its requests, so one of them comes."""
        await self._is_awake.wait()
        self._is_awake.clear()

    def take(self) -> list[RequestOutput]:
        """Those that have changed since the last call."""
        taken = list(self._outputs.values())
        self._outputs.clear()
        return taken


class GenerateEndpoint:
    """Answers /generate, and knows which requests are in flight under which names."""

    def __init__(self, loop: EngineLoop, *, max_queued_requests: int) -> None:
        """max_queued_requests: beyond these the answer is 503."""
        self._loop = loop
        self._capacity = loop.engine.max_running_requests + max_queued_requests
        self._requests_by_rid: dict[str, set[str]] = {}
        self._num_in_flight = 0
        self._decode: DecodeText | None = None

    async def load_tokenizer(self) -> None:
        """For the texts of answers; without a tokenizer that can be used they have none."""
        load = self._loop.engine.load_text_decoder
        if load is None:
            return
        try:
            self._decode = await asyncio.to_thread(load)  # a second for a large vocabulary
        except ValueError as error:
            logger.warning("answers come without their text: %s", error)

    def request_ids(self, rid: str) -> tuple[str, ...]:
        """The engine's names of the requests that a client has named `rid`."""
        return tuple(self._requests_by_rid.get(rid, ()))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = parse(GenerateBody, await request.read())
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

    def _plan(self, body: GenerateBody) -> list[_Planned]:
        """One request per prompt and sample, all checked before the first is queued."""
        start = body.logprob_start_len if body.return_logprob and body.logprob_start_len >= 0 else None
        names = iter(body.names())
        plan: list[_Planned] = []
        for prompt, sampling in zip(body.prompts, body.params_by_prompt, strict=True):
            made = [
                GenerationRequest(
                    request_id=uuid.uuid4().hex,
                    prompt=tuple(prompt),
                    sampling=params,
                    input_logprobs_from=start,
                    wants_original_logprobs=body.return_original_logprob,
                    experts_from=body.routed_experts_start_len if body.return_routed_experts else None,
                )
                for params in sampling.of_each_sample()
            ]
            self._loop.engine.limits.check(made[0])
            if start is not None and start >= len(prompt):
                raise BadRequestError(f"logprob_start_len must be below the prompt's {len(prompt)} tokens, got {start}")
            plan += [_Planned(next(names), request, sampling.text_form) for request in made]
        return plan

    @contextmanager
    def _in_flight(self, plan: list[_Planned]) -> Iterator[None]:
        """Requests that can be aborted by their rids; if one failed or the client is gone, nobody reads the others."""
        for planned in plan:
            self._requests_by_rid.setdefault(planned.rid, set()).add(planned.request.request_id)
        self._num_in_flight += len(plan)
        try:
            yield
        except BaseException:
            self._abort(plan)
            raise
        finally:
            self._num_in_flight -= len(plan)
            for planned in plan:
                named = self._requests_by_rid[planned.rid]
                named.discard(planned.request.request_id)
                if not named:
                    del self._requests_by_rid[planned.rid]

    async def _whole(self, body: GenerateBody, plan: list[_Planned]) -> web.Response:
        started = time.monotonic()
        outputs = await self._outputs(plan, listener=None)
        latency_s = time.monotonic() - started
        replies = [
            self._reply(output, body, planned, latency_s=latency_s)
            for output, planned in zip(outputs, plan, strict=True)
        ]
        return web.json_response(replies[0] if body.has_one_answer else replies)

    async def _outputs(
        self, plan: list[_Planned], *, listener: Callable[[RequestOutput], None] | None
    ) -> list[RequestOutput]:
        futures = [self._loop.submit(planned.request, listener=listener) for planned in plan]
        return await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))

    async def _stream(self, request: web.Request, body: GenerateBody, plan: list[_Planned]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        started = time.monotonic()
        place = {planned.request.request_id: index for index, planned in enumerate(plan)}
        latest = _LatestOutputs()
        whole = asyncio.ensure_future(self._outputs(plan, listener=latest.note))
        whole.add_done_callback(lambda _: latest.wake())
        try:
            is_ended = False
            while not is_ended:
                # Asked first: the last note of a request comes before its future is done, so this round takes it.
                is_ended = whole.done()
                if not is_ended:
                    await latest.changed()
                for output in latest.take():
                    index = place[output.request_id]
                    reply = self._reply(output, body, plan[index], latency_s=time.monotonic() - started)
                    await response.write(_event(reply if body.has_one_answer else {**reply, "index": index}))
            await whole
        except (ValueError, EngineStoppedError) as error:
            # The status is sent already. SGLang says it in the stream, too.
            self._abort(plan)
            await response.write(_event(error_body(str(error))))
        finally:
            whole.cancel()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _reply(
        self, output: RequestOutput, body: GenerateBody, planned: _Planned, *, latency_s: float
    ) -> dict[str, Any]:
        text = None
        if self._decode is not None:
            text = answer_text(output.output_ids, output.finish_reason, planned.text_form, self._decode)
        return generate_reply(output, body, rid=planned.rid, text=text, latency_s=latency_s)

    def _abort(self, plan: list[_Planned]) -> None:
        self._loop.abort([planned.request.request_id for planned in plan])


def _event(content: dict[str, Any]) -> bytes:
    """One server-sent event, https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    return f"data: {json.dumps(content)}\n\n".encode()
