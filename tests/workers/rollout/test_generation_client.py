"""The client of generation servers: what it says of one that goes away, and that answers follow from their seeds."""

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.config.rollout import SamplingConfig
from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.server import EngineServer
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.rollout.generation_client import GenerationClient, Setback, _Lengths
from corral.workers.streams.https import open_session
from tests.workers.engine.tiny_models import save_tiny_model
from tests.workers.rollout.engine_servers import DEADLINE_S, Connections, sample_in_turns
from tests.workers.trusted import trust

PROMPT = list(range(1, 41))


async def _ask(*, is_ending: bool) -> None:
    """One group at a server that ends every connection; given up at once, or only before the second try."""
    lost, told = asyncio.Event(), asyncio.Event()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async def notice(*event: object) -> None:
        lost.set()

    async def route(uid: str, tokens: int, oldest_version: str, setback: Setback | None) -> str | None:
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
            first_token_timeout_s=DEADLINE_S,
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


async def _over_a_lost_server(model: Path) -> tuple[list[PartialAnswer], list[int], int, list[Setback]]:
    """Eight answers whose first server is lost when it has made some of each; (answers, tokens that were still wanted
    of each server when it was chosen, those that the second one has made, what was told of the first)."""
    wanted, told = list[int](), list[Setback]()
    async with AsyncExitStack() as stack:
        engines = [GenerationEngine(model, seed=seed, version="0.0") for seed in range(2)]
        servers = [EngineServer(engine, "key", "127.0.0.1", tls=trust().server()) for engine in engines]
        urls = []
        for server in servers:
            stack.push_async_callback(server.stop)
            urls.append(await server.start())
        connections = Connections(urls[0])
        urls[0] = await connections.start()
        session = await stack.enter_async_context(
            open_session(trust().client(), headers={"Authorization": "Bearer key"})
        )

        async def lose() -> None:
            while engines[0].tokens_generated < 8 * 100:
                await asyncio.sleep(0.001)
            connections.cut()

        async def route(uid: str, tokens: int, oldest_version: str, setback: Setback | None) -> str | None:
            wanted.append(tokens)
            if setback is None:
                return urls[0]
            told.append(setback)
            return urls[1]

        client = GenerationClient(
            session,
            route,
            sampling=SamplingConfig(max_new_tokens=1000),
            stop_token_ids=[],
            first_token_timeout_s=DEADLINE_S,
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
    assert [len(answer.output_ids) for answer in answers] == [1000] * 8
    assert wanted[0] == len(PROMPT) + 8 * 400, "no answer has ended: each is taken to use two fifths of its limit"
    num_kept = wanted[1] - wanted[0]
    assert num_kept > 8 * 32, "all but the tokens of an event had come back"
    assert num_made_again <= 8 * 1000 - num_kept, "what had come back is not made again"
    assert len(told) == 1 and not told[0].is_busy, "told once, though eight streams have ended"
    in_one_go = sample_in_turns(
        model, PROMPT, seeds=range(8), engine_seeds=[9], turn_tokens=1000, max_new_tokens=1000, stop_token_ids=[]
    )
    assert [answer.output_ids for answer in answers] == [answer.output_ids for answer in asyncio.run(in_one_go)]
