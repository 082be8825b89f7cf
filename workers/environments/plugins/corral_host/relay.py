"""Relay: between verifiers' client and the endpoints of episodes."""

import json
import secrets
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

LONGEST_LINE = 1 << 28
_MOST_EMPTY = 8  # answers without a token to an episode that has ended: then its harness does not stop
_EMPTY = {"role": "assistant", "content": ""}
_TURN = "X-Turn"  # of the endpoint's replies: which turn of the episode it is


@dataclass(slots=True)
class Played:
    """One episode under way: where its model is, and by which key; what it asked."""

    socket: str
    key: str
    turns: dict[str, list[int]] = field(default_factory=dict)
    """Numbers of the turns of each trace."""
    num_asked: int = 0
    """Requests that wait for an answer."""
    last_answer: float = field(default_factory=time.monotonic)
    num_empty: int = 0

    def left_s(self, timeout_s: float) -> float:
        """How long it may still be at work of its own, unless it asks."""
        return timeout_s if self.num_asked else self.last_answer + timeout_s - time.monotonic()


class Relay:
    """Between the environment's one client and the endpoints of episodes, which have a key each.

    The client is made once and keeps its connections, so the key cannot be part of it. What is asked names its trace.
    """

    def __init__(self, stack: AsyncExitStack) -> None:
        self.secret = secrets.token_hex(24)
        self.episodes: dict[str, Played] = {}
        """By the id of a trace."""
        self._stack = stack
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def start(self) -> str:
        """Listen on loopback; returns the URL."""
        application = web.Application(client_max_size=LONGEST_LINE)
        application.router.add_route("*", "/{path:.*}", self._relay)  # the endpoint refuses what it does not know
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

    async def _relay(self, request: web.Request) -> web.Response:
        if not secrets.compare_digest(request.headers.get("Authorization", ""), f"Bearer {self.secret}"):
            return web.json_response({"error": {"message": "another program's key"}}, status=401)
        trace = request.headers.get("X-Session-ID")
        # Which models there are is asked for no trace, and is the same for all.
        episode = self.episodes.get(trace) if trace else next(iter(self.episodes.values()), None)
        if episode is None:
            return web.json_response({"error": {"message": "the episode is over"}}, status=409)
        headers = {"Authorization": f"Bearer {episode.key}", "Content-Type": "application/json"}
        episode.num_asked += 1
        try:
            session, body = self._session(episode.socket), await request.read()
            async with session.request(
                request.method, f"http://model{request.path}", data=body, headers=headers
            ) as reply:
                if trace and _TURN in reply.headers:
                    episode.turns.setdefault(trace, []).append(int(reply.headers[_TURN]))
                return self._answer(episode, body, reply, await reply.read())
        except aiohttp.ClientError as error:
            return web.json_response({"error": {"message": f"the model does not answer: {error}"}}, status=503)
        finally:
            episode.num_asked -= 1
            episode.last_answer = time.monotonic()

    def _answer(self, episode: Played, asked: bytes, reply: aiohttp.ClientResponse, body: bytes) -> web.Response:
        """The error for the environment. That an episode has come to a limit is no failure of it: it is judged as it
        stands, so further requests get an answer without tokens.
        """
        if reply.status == 400 and _has_ended(body) and episode.num_empty < _MOST_EMPTY:
            episode.num_empty += 1
            return _empty(streams=bool(json.loads(asked).get("stream")))
        return web.Response(status=reply.status, body=body, content_type=reply.content_type)

    def _session(self, path: str) -> aiohttp.ClientSession:
        if path not in self._sessions:
            connector = aiohttp.UnixConnector(path, limit=0)
            session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
            self._stack.push_async_callback(session.close)
            self._sessions[path] = session
        return self._sessions[path]


def _has_ended(body: bytes) -> bool:
    return json.loads(body)["error"]["code"] in ("episode_ended", "context_length_exceeded")


def _empty(*, streams: bool) -> web.Response:
    reply = {"id": "ended", "object": "chat.completion", "created": 0, "model": ""}
    choice = {"index": 0, "finish_reason": "length"}
    if not streams:
        return web.json_response(reply | {"choices": [choice | {"message": _EMPTY}]})
    chunk = reply | {"object": "chat.completion.chunk", "choices": [choice | {"delta": _EMPTY}]}
    return web.Response(text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")
