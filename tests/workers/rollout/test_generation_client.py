"""The client of generation servers: what it says of one that goes away, and that answers follow from their seeds."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from corral.experiments.config.rollout import SamplingConfig
from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.http.api import EngineServer
from corral.workers.rollout.generation_client import GenerationClient, Setback
from tests.workers.engine.tiny_models import save_tiny_model

DEADLINE_S = 20.0


async def _ask(*, is_ending: bool) -> None:
    """One group at a server that ends every connection; given up at once, or only before the second try."""
    lost, told = asyncio.Event(), asyncio.Event()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async def notice(*event: object) -> None:
        lost.set()

    async def route(uid: str, tokens: int, setback: Setback | None) -> str | None:
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
            new_tokens_per_chunk=4,
            request_timeout_s=DEADLINE_S,
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


async def _answers(model: Path, *, seeds: Sequence[int], engine_seeds: Sequence[int], chunk: int) -> list[list[int]]:
    """Of a group that goes to one server after the other, chunk by chunk."""
    async with AsyncExitStack() as stack:
        urls = []
        for seed in engine_seeds:
            server = EngineServer(GenerationEngine(model, seed=seed, version="0.0"), "key", "127.0.0.1")
            stack.push_async_callback(server.stop)
            urls.append(f"http://127.0.0.1:{await server.start()}")
        headers = {"Authorization": "Bearer key"}
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))

        async def route(uid: str, tokens: int, setback: Setback | None) -> str | None:
            assert setback is None
            urls.append(urls.pop(0))
            return urls[-1]

        client = GenerationClient(
            session,
            route,
            sampling=SamplingConfig(max_new_tokens=24),
            stop_token_ids=[0],
            new_tokens_per_chunk=chunk,
            request_timeout_s=DEADLINE_S,
        )
        return [answer.output_ids for answer in await client.sample_group("0:a", [7, 9], seeds=seeds)]


def test_answers_follow_from_their_seeds_whatever_the_chunks_and_the_servers(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    in_one_go = asyncio.run(_answers(model, seeds=range(6), engine_seeds=[1], chunk=24))
    assert max(len(answer) for answer in in_one_go) == 24 and len({tuple(answer) for answer in in_one_go}) == 6
    assert asyncio.run(_answers(model, seeds=range(6), engine_seeds=[2, 3], chunk=5)) == in_one_go
