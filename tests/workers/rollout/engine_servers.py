"""Answers of one group by embedded engines behind HTTP, which take turns."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from corral.experiments.config.rollout import SamplingConfig
from corral.experiments.worker_specs import RoutedExpertsSpec
from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.server import EngineServer
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.rollout.generation_client import FailedTry, GenerationClient
from corral.workers.streams.https import open_session
from tests.workers.trusted import trust

DEADLINE_S = 20.0


class Connections:
    """Between a client and a server: bytes pass, until they are cut."""

    def __init__(self, behind: str) -> None:
        self._host, self._port = behind.removeprefix("https://").split(":")
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        """Listen; returns the URL."""
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        return "https://{}:{}".format(*self._server.sockets[0].getsockname())

    def cut(self) -> None:
        """As a server that is killed: nobody is told anything, and nobody answers any more."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, there_writer]
        with suppress(OSError):
            await asyncio.gather(self._pass(reader, there_writer), self._pass(there_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
        writer.close()


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

    async with AsyncExitStack() as stack:
        urls = []
        for seed in engine_seeds:
            server = EngineServer(
                GenerationEngine(model, seed=seed, version="0.0"), "key", "127.0.0.1", tls=trust().server()
            )
            stack.push_async_callback(server.stop)
            urls.append(await server.start())
        headers = {"Authorization": "Bearer key"}
        session = await stack.enter_async_context(open_session(trust().client(), headers=headers))

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
