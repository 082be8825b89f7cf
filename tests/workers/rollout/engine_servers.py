"""Answers of one group by embedded engines behind HTTP, which take turns."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from corral.experiments.config.rollout import SamplingConfig
from corral.experiments.worker_specs import RoutedExpertsSpec
from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.server import EngineServer
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.rollout.generation_client import FailedTry, GenerationClient
from corral.workers.streams.https import open_session
from tests.workers.trusted import trust

DEADLINE_S = 20.0


@asynccontextmanager
async def serving(*engines: GenerationEngine) -> AsyncIterator[tuple[list[str], aiohttp.ClientSession]]:
    """(their URLs, a session that has the key of all)"""
    async with AsyncExitStack() as stack:
        urls = []
        for engine in engines:
            server = EngineServer(engine, "key", "127.0.0.1", tls=trust().server())
            stack.push_async_callback(server.stop)
            urls.append(await server.start())
        session = open_session(trust().client(), headers={"Authorization": "Bearer key"})
        yield urls, await stack.enter_async_context(session)


async def sample_in_turns(
    model: Path,
    prompt: Sequence[int],
    *,
    seeds: Sequence[int],
    engine_seeds: Sequence[int],
    turn_tokens: int,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] = (0,),
    experts: RoutedExpertsSpec | None = None,
    enough: int | None = None,
) -> list[PartialAnswer]:
    """One answer for each of `seeds`; an engine for each of `engine_seeds`, which gives up after `turn_tokens`."""

    class TurnTakingClient(GenerationClient):
        def _body(self, group: Any, answer: PartialAnswer) -> bytes:
            body = json.loads(super()._body(group, answer))
            body["sampling_params"]["max_new_tokens"] = min(turn_tokens, answer.remaining)
            return json.dumps(body).encode()

    engines = [GenerationEngine(model, seed=seed, version="0.0") for seed in engine_seeds]
    async with serving(*engines) as (urls, session):

        async def route(uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
            assert setback is None or setback.is_busy
            urls.append(urls.pop(0))
            return urls[-1]

        client = TurnTakingClient(
            session,
            route,
            sampling=SamplingConfig(max_new_tokens=max_new_tokens),
            stop_token_ids=stop_token_ids,
            token_timeout_s=DEADLINE_S,
            experts=experts,
        )
        return await client.sample_group("0:a", list(prompt), seeds=seeds, enough=enough)
