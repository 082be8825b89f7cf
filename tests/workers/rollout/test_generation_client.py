"""The client of generation servers: what it says of one that goes away, and that answers follow from their seeds."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from corral.experiments.config.rollout import SamplingConfig
from corral.workers.rollout.generation_client import GenerationClient, Setback
from tests.workers.engine.tiny_models import save_tiny_model
from tests.workers.rollout.engine_servers import DEADLINE_S, sample_in_turns


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
