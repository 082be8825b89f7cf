"""A model endpoint between real sockets: a program's client before it, a server that says what it is told behind it.

openai.AsyncOpenAI ──► ModelEndpoint ──► EpisodeSession ──► GenerationClient ──TLS──► ScriptedServer
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from openai import AsyncOpenAI

from corral.experiments.config.rollout import SamplingConfig
from corral.experiments.prompts.chat import ChatRenderer, find_renderer
from corral.experiments.prompts.tokens import eos_token_ids, load_tokenizer, vocabulary_size
from corral.experiments.trial.guarded_listener import GuardedListener
from corral.workers.model_endpoint.endpoint import ModelEndpoint
from corral.workers.rollout.episode_session import EpisodeSession
from corral.workers.rollout.generation_client import FailedTry, GenerationClient
from corral.workers.streams.https import open_session, serve
from tests.workers.trusted import trust

DEADLINE_S = 30.0
MAX_MODEL_LEN = 2000


@dataclass
class ScriptedServer:
    """The part of SGLang's API that an episode needs. The log-probability of a token is -id / 8, which floats hold."""

    answer: Callable[[list[int]], Sequence[int]]
    """To a prompt, until its end."""
    version: str = "0.0"
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    num_asked: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def start(self, stack: AsyncExitStack) -> str:
        self.may_answer.set()
        application = web.Application()
        application.add_routes([web.post("/generate", self._generate)])
        runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
        stack.push_async_callback(runner.cleanup)
        return await serve(runner, "127.0.0.1", trust().server(), GuardedListener(timeout_s=600.0))

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.asked.set()
        await self.may_answer.wait()
        answer = list(self.answer(body["input_ids"]))
        output = answer[: body["sampling_params"]["max_new_tokens"]]
        event = {
            "output_ids": output,
            "meta_info": {
                "output_token_logprobs": [[-token / 8, token, None] for token in output],
                "weight_versions": [{"version": self.version, "start": 0, "end": len(output)}],
                "finish_reason": {"type": "stop" if len(output) == len(answer) else "length"},
                "completion_tokens": len(output),
            },
        }
        return web.Response(text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")


@dataclass
class Rig:
    endpoint: ModelEndpoint
    renderer: ChatRenderer | None
    client: GenerationClient
    model: Path
    stack: AsyncExitStack

    def session(self, **limits: Any) -> EpisodeSession:
        return EpisodeSession("0:a", self.client, load_tokenizer(self.model), seed_of=lambda number: 0, **limits)

    def program(self, key: str) -> AsyncOpenAI:
        """A client as a program has it, with the retries that it has."""
        return AsyncOpenAI(base_url=f"{self.endpoint.url}/v1", api_key=key, timeout=DEADLINE_S)


@asynccontextmanager
async def rig(folder: Path, model: Path, urls: Sequence[str], *, max_new_tokens: int = 200) -> AsyncIterator[Rig]:
    """An endpoint of a model that servers answer for, which take turns."""
    async with AsyncExitStack() as stack:
        turns = list(urls)

        async def route(uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str:
            assert setback is None or setback.is_busy, setback
            turns.append(turns.pop(0))
            return turns[-1]

        client = GenerationClient(
            await stack.enter_async_context(open_session(trust().client(), headers={"Authorization": "Bearer key"})),
            route,
            sampling=SamplingConfig(max_new_tokens=max_new_tokens),
            stop_token_ids=eos_token_ids(model),
            token_timeout_s=DEADLINE_S,
        )
        tokenizer = load_tokenizer(model)
        renderer = find_renderer(model, tokenizer)
        endpoint = ModelEndpoint(
            renderer,
            tokenizer,
            vocabulary_size=vocabulary_size(model, tokenizer),
            model_name="actor",
            max_model_len=MAX_MODEL_LEN,
        )
        await endpoint.start(folder / "endpoint" / "socket")
        stack.push_async_callback(endpoint.stop)
        yield Rig(endpoint, renderer, client, model, stack)


@asynccontextmanager
async def scripted(
    folder: Path, model: Path, answer: Callable[[list[int]], Sequence[int]], **settings: Any
) -> AsyncIterator[tuple[Rig, ScriptedServer]]:
    """A rig whose server says what it is told."""
    server = ScriptedServer(answer)
    async with AsyncExitStack() as stack:
        url = await server.start(stack)
        yield await stack.enter_async_context(rig(folder, model, [url], **settings)), server
