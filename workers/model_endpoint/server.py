"""ModelEndpoint: the model over HTTP, for programs that play episodes; each has a key, which opens its own alone.

    POST /inference/v1/generate, Authorization: Bearer KEY ──► EpisodeSession.generate ──► ids, logprobs
       {"token_ids": [...], "sampling_params": {"max_tokens": 64, "stop": ["\n"], "temperature": 1.0}}
    <- {"turn": 0, "choices": [{"token_ids": [...], "finish_reason": "stop", "logprobs": {"content": [...]}}]}
    <- {"error": {"type": "episode_ended", "code": "turns", "message": ...}}

It listens on a Unix socket in a folder of this user's own.
"""

import asyncio
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
from aiohttp import web

from corral.workers.episodes.log import Turn
from corral.workers.episodes.turn_request import EpisodeEndedError, RequestRefusedError, TurnRequest

_LARGEST_BODY = 2**26
_SHUTDOWN_S = 1.0


class PlaysEpisode(Protocol):
    """What the endpoint asks of an episode's session."""

    async def generate(self, prompt_ids: Sequence[int], request: TurnRequest) -> Turn:
        """The model's next answer."""


class SamplingParams(msgspec.Struct, frozen=True):
    """What may be asked of one turn; None is what the trial says."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()


class GenerateBody(msgspec.Struct, frozen=True):
    """A request for one turn."""

    token_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()


class ModelEndpoint:
    """Open as long as the context lasts.

    Example:
        async with ModelEndpoint() as endpoint:
            key = endpoint.open_episode(session)
    """

    def __init__(self) -> None:
        self._sessions: dict[str, PlaysEpisode] = {}
        self._requests: dict[str, set[asyncio.Task[Any]]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="corral-model-"))
            self.socket_path = str(Path(folder) / "endpoint")
            application = web.Application(client_max_size=_LARGEST_BODY)
            application.add_routes([web.post("/inference/v1/generate", self._generate)])
            runner = web.AppRunner(application, shutdown_timeout=_SHUTDOWN_S, access_log=None)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.UnixSite(runner, self.socket_path).start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    def open_episode(self, session: PlaysEpisode) -> str:
        """The key of an episode, until it is closed."""
        key = secrets.token_urlsafe(24)
        self._sessions[key], self._requests[key] = session, set()
        return key

    def close_episode(self, key: str) -> None:
        """Whoever has the key gets nothing more, and what is under way for it is given up."""
        self._sessions.pop(key, None)
        for request in self._requests.pop(key, ()):
            request.cancel()

    async def _generate(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        session = self._sessions.get(key)
        if session is None:
            return _error(401, "unauthorized", "", "no episode has this key, or it is over")
        try:
            body = msgspec.json.decode(await request.read(), type=GenerateBody)
        except msgspec.MsgspecError as error:
            return _error(400, "invalid_request", "", str(error))
        sampling = body.sampling_params
        wanted = TurnRequest(
            max_new_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=sampling.stop,
        )
        making = asyncio.ensure_future(session.generate(body.token_ids, wanted))
        requests = self._requests[key]
        requests.add(making)
        try:
            turn = await making
        except EpisodeEndedError as error:
            return _error(409, "episode_ended", error.reason, str(error))
        except RequestRefusedError as error:
            return _error(400, "request_refused", "", str(error))
        except asyncio.CancelledError:
            making.cancel()
            raise
        finally:
            requests.discard(making)
        return web.json_response(_reply(turn))


def _reply(turn: Turn) -> dict[str, Any]:
    answer = turn.answer
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(answer.output_ids, answer.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": answer.output_ids,
        "finish_reason": "stop" if answer.stopped else "length",
        "logprobs": {"content": content},
    }
    return {"request_id": str(turn.number), "turn": turn.number, "choices": [choice]}


def _error(status: int, kind: str, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"type": kind, "code": code, "message": message}}, status=status)
