"""The client of generation servers: what it says of one that goes away, and that answers follow from their seeds."""

import asyncio
import json
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.config.rollout import SamplingConfig
from corral.workers.engine.engine import GenerationEngine
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.episodes.stream_events import NOT_FINITE
from corral.workers.episodes.turn_request import RequestRefusedError
from corral.workers.rollout import generation_client
from corral.workers.rollout.generation_client import FailedTry, GenerationClient, _Lengths
from tests.workers.engine.tiny_models import save_tiny_model
from tests.workers.rollout.engine_servers import DEADLINE_S, sample_in_turns, serving
from tests.workers.stream_helpers import Cable

PROMPT = list(range(1, 41))


async def _ask(*, is_ending: bool) -> None:
    """One group at a server that ends every connection; given up at once, or only before the second try."""
    lost, told = asyncio.Event(), asyncio.Event()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async def notice(*event: object) -> None:
        lost.set()

    async def route(uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
        if setback is not None:
            told.set()
            await asyncio.Event().wait()
        return url

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    url = "http://{}:{}".format(*server.sockets[0].getsockname())
    trace = aiohttp.TraceConfig()
    trace.on_request_exception.append(notice)
    async with server, aiohttp.ClientSession(trace_configs=[trace]) as session:
        client = GenerationClient(
            session,
            route,
            sampling=SamplingConfig(),
            stop_token_ids=[0],
            token_timeout_s=DEADLINE_S,
        )
        group = asyncio.create_task(client.sample_group("0:a", [1, 2], seeds=[1, 2]))
        await asyncio.wait_for((lost if is_ending else told).wait(), DEADLINE_S)
        group.cancel()
        await asyncio.wait([group])


@pytest.mark.parametrize("is_ending", [True, False])
def test_a_server_that_leaves_with_the_trial_is_no_warning(is_ending: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asyncio.run(_ask(is_ending=is_ending))
    assert ("/generate failed" in caplog.text) is not is_ending


def _answers(model: Path, *, engine_seeds: Sequence[int], turn_tokens: int) -> list[list[int]]:
    answers = sample_in_turns(
        model, [7, 9], seeds=range(6), engine_seeds=engine_seeds, turn_tokens=turn_tokens, max_new_tokens=24
    )
    return [answer.output_ids for answer in asyncio.run(answers)]


def test_answers_follow_from_their_seeds_whatever_the_requests_and_the_servers(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    in_one_go = _answers(model, engine_seeds=[1], turn_tokens=24)
    assert max(len(answer) for answer in in_one_go) == 24 and len({tuple(answer) for answer in in_one_go}) == 6
    assert _answers(model, engine_seeds=[2, 3], turn_tokens=5) == in_one_go


async def _over_a_lost_server(model: Path) -> tuple[list[PartialAnswer], list[int], int, list[FailedTry]]:
    """Eight answers whose first server is lost when it has made some of each; (answers, tokens that were still wanted
    of each server when it was chosen, those that the second one has made, what was told of the first)."""
    wanted, told = list[int](), list[FailedTry]()
    engines = [GenerationEngine(model, seed=seed, version="0.0") for seed in range(2)]
    async with serving(*engines) as (urls, session):
        cable = Cable(urls[0])
        urls[0] = (await cable.start()).replace("tcp:", "https:")

        async def lose() -> None:
            while engines[0].tokens_generated < 8 * 100:
                await asyncio.sleep(0.001)
            await cable.stop()

        async def route(uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
            wanted.append(tokens)
            if setback is None:
                return urls[0]
            told.append(setback)
            return urls[1]

        client = GenerationClient(
            session,
            route,
            sampling=SamplingConfig(max_new_tokens=500),
            stop_token_ids=[],
            token_timeout_s=DEADLINE_S,
        )
        losing = asyncio.create_task(lose())
        answers = await client.sample_group("0:a", PROMPT, seeds=range(8))
        await losing
        return answers, wanted, engines[1].tokens_generated, told


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 1000))
def test_what_is_expected_of_an_answer_is_the_mean_of_the_last_ones_or_what_is_left_of_it(
    lengths: list[int], remaining: int
) -> None:
    expected = _Lengths()
    assert expected.further(remaining) == math.ceil(0.4 * remaining)
    for length in lengths:
        expected.ended(length)
    weights = [0.99**age for age in range(len(lengths))][::-1]
    mean = sum(weight * length for weight, length in zip(weights, lengths, strict=True)) / sum(weights)
    assert expected.further(remaining) in {min(remaining, math.ceil(mean + error)) for error in (-1e-6, 0.0, 1e-6)}


def test_a_server_that_is_lost_costs_what_had_not_come_back(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):  # answers of full length
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | {"eos_token_id": None}))
    answers, wanted, num_made_again, told = asyncio.run(_over_a_lost_server(model))
    assert [len(answer.output_ids) for answer in answers] == [500] * 8
    assert wanted[0] == len(PROMPT) + 8 * 200, "no answer has ended: each is taken to use two fifths of its limit"
    num_kept = wanted[1] - wanted[0]
    assert num_kept > 8 * 32, "all but the tokens of an event had come back"
    assert num_made_again <= 8 * 500 - num_kept, "what had come back is not made again"
    assert len(told) == 1 and not told[0].is_busy, "told once, though eight streams have ended"
    in_one_go = sample_in_turns(
        model, PROMPT, seeds=range(8), engine_seeds=[9], turn_tokens=500, max_new_tokens=500, stop_token_ids=[]
    )
    assert [answer.output_ids for answer in answers] == [answer.output_ids for answer in asyncio.run(in_one_go)]


POISON, HEALTHY = 666, 1


def event(ids: Sequence[int] = (), *, so_far: int = 0, ends: dict[str, Any] | None = None) -> bytes:
    """A server-sent event, of the tokens `ids` after `so_far` others."""
    logprobs = [[-1.0, token, None] for token in ids]
    meta = {"completion_tokens": so_far + len(ids), "output_token_logprobs": logprobs, "weight_version": "0.0"}
    return b"data: " + json.dumps({"output_ids": list(ids), "meta_info": meta | {"finish_reason": ends}}).encode() + END


END = b"\n\n"
FAILURES: dict[str, tuple[int, bytes]] = {
    "a status": (500, b"internal error"),
    "an error in the stream": (200, b'data: {"error": {"message": "internal", "code": 500}}' + END),
    "an abort with a status": (200, event(ends={"type": "abort", "status_code": 500, "message": "CUDA"})),
    "an abort again and again": (200, event(ends={"type": "abort", "message": "Aborted"})),
    "an end without a token": (200, event(ends={"type": "length"})),
    "a stream that ends": (200, b"data: [DONE]" + END),
    "no JSON": (200, b"data: {" + END),
    "logits": (200, event(ends={"type": "abort", "err_type": NOT_FINITE, "message": "not finite"})),
    "a lost connection": (0, b""),
}


class Servers:
    """Generation servers that answer every prompt but the poisoned one."""

    def __init__(self, number: int, failure: tuple[int, bytes] = (500, b"")) -> None:
        self.number, self.failure, self.is_down = number, failure, False
        self.requests = Counter[str]()
        """Of the poisoned prompt, by URL."""
        self.setbacks = list[FailedTry]()
        self.urls = list[str]()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["input_ids"][0] != POISON:
            return web.Response(body=event([5], ends={"type": "stop"}))
        self.requests[request.url.authority] += 1
        status, said = self.failure
        if not status:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=status or 500, body=said)

    async def __aenter__(self) -> Self:
        self._runners = []
        for _ in range(self.number):
            application = web.Application()
            application.add_routes([web.post("/generate", self._generate)])
            self._runners.append(runner := web.AppRunner(application, shutdown_timeout=0.1))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.urls.append("http://{}:{}".format(*runner.addresses[0]))
        return self

    async def __aexit__(self, *exception: object) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def route(self, uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
        self.setbacks += [setback] if setback is not None else []
        others = [url for url in self.urls if setback is None or url != setback.url]
        return (others or self.urls)[0] if setback is None or setback.url == self.urls[0] else self.urls[0]

    def client(self, session: aiohttp.ClientSession, *, silence_s: float = DEADLINE_S) -> GenerationClient:
        return GenerationClient(
            session,
            self.route,
            sampling=SamplingConfig(max_new_tokens=8),
            stop_token_ids=[5],
            token_timeout_s=silence_s,
            num_servers=self.number,
        )


@pytest.mark.parametrize(("failure", "number"), [*((failure, 2) for failure in FAILURES), ("a status", 1)])
def test_a_prompt_that_no_server_answers_is_given_up_after_a_few_requests_to_two_of_them(
    failure: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_client, "_PAUSES_S", (0.1,))

    async def ask() -> tuple[RequestRefusedError, Counter[str], list[FailedTry]]:
        async with Servers(number, FAILURES[failure]) as servers, aiohttp.ClientSession() as session:
            client = servers.client(session)

            async def others() -> None:
                while True:
                    await client.sample_group("0:b", [HEALTHY], seeds=[1])
                    await asyncio.sleep(0.01)

            going_on = asyncio.create_task(others())
            with pytest.raises(RequestRefusedError) as raised:
                await asyncio.wait_for(client.sample_group("0:a", [POISON], seeds=[1]), DEADLINE_S)
            going_on.cancel()
            return raised.value, servers.requests, servers.setbacks

    error, requests, setbacks = asyncio.run(ask())
    assert error.kind == (NOT_FINITE if failure == "logits" else "server_error")
    if failure != "logits":
        assert len(requests) == min(2, number) and 4 <= requests.total() <= 6
        assert all(setback.kind in ("failed", "busy") for setback in setbacks)


def test_servers_that_cannot_be_reached_cost_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_client, "_PAUSES_S", (0.0,))

    async def ask() -> list[FailedTry]:
        async with Servers(1) as servers, aiohttp.ClientSession() as session:
            servers.urls.insert(0, "http://127.0.0.1:9")  # discard: nobody listens there
            num_away = 12
            route = servers.route

            async def away_for_long(uid: str, tokens: int, oldest: str, setback: FailedTry | None) -> str | None:
                await route(uid, tokens, oldest, setback)
                return servers.urls[len(servers.setbacks) >= num_away]

            servers.route = away_for_long  # type: ignore[method-assign]
            client = servers.client(session)
            await asyncio.wait_for(client.sample_group("0:a", [HEALTHY], seeds=[1]), DEADLINE_S)
            return servers.setbacks

    assert [setback.kind for setback in asyncio.run(ask())] == ["lost"] * 12


def test_a_loop_that_stood_still_blames_no_server_that_went_on() -> None:
    """The server is in a thread of its own."""
    setbacks, silence_s, url, has_ended = list[FailedTry](), 0.6, queue.Queue[str](), threading.Event()

    async def serve() -> None:
        async def generate(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            for number in range(20):
                ends = {"type": "length"} if number == 19 else None
                await response.write(event([6], so_far=number, ends=ends))
                await asyncio.sleep(0.1)
            await response.write_eof()
            return response

        application = web.Application()
        application.add_routes([web.post("/generate", generate)])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url.put("http://{}:{}".format(*runner.addresses[0]))
        await asyncio.to_thread(has_ended.wait, DEADLINE_S)
        await runner.cleanup()

    async def ask() -> list[PartialAnswer]:
        server = url.get(timeout=DEADLINE_S)

        async def route(uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
            setbacks.extend([setback] if setback is not None else [])
            return server

        async with aiohttp.ClientSession() as session:
            client = GenerationClient(
                session,
                route,
                sampling=SamplingConfig(max_new_tokens=20),
                stop_token_ids=[0],
                token_timeout_s=silence_s,
            )
            group = asyncio.create_task(client.sample_group("0:a", [1, 2], seeds=[1, 2]))
            while not client._lengths.num_events:
                await asyncio.sleep(0.01)
            time.sleep(2 * silence_s)
            return await asyncio.wait_for(group, DEADLINE_S)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        answers = asyncio.run(ask())
    finally:
        has_ended.set()
        thread.join()
    assert setbacks == [] and [len(answer.output_ids) for answer in answers] == [20, 20]
