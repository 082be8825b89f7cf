"""ModelEndpoint: programs of others talk to the model that is trained, as they talk to any model.

    program ──OpenAI's chat──────────► [ key | check | conversation ──► ids ] ──┐
            ──OpenAI's completions───► [ key | check | text or ids ───► ids ] ──┼──► EpisodeSession.generate ──► Turn
            ──vLLM's token endpoint──► [ key | check ──────────────────► ids ] ──┘                                │
                                                                        JSON, or a stream of it ◄── replies.py ───┘

A key is an episode: a client that has it adds to that episode only, and nothing else is accepted here. It listens on
loopback, and on a Unix socket that reaches into a sandbox without a network. What is sampled, and how, is the trial's:
a program says what it asks and how long an answer may be.
"""

import asyncio
import hashlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from corral.experiments.prompts.chat import ChatRenderer
from corral.experiments.prompts.messages import Message, ToolSchema, plain_messages
from corral.experiments.prompts.row_prompts import is_ids
from corral.experiments.prompts.tokens import answer_text, encode_prompt, first_index, is_longer, longest_text
from corral.experiments.trial.guarded_listener import GuardedListener
from corral.workers.episodes.log import Turn
from corral.workers.episodes.turn_request import EpisodeEndedError, RequestRefusedError, TurnRequest
from corral.workers.model_endpoint.replies import chat_reply, events, ids_reply, text_reply
from corral.workers.model_endpoint.requests import (
    ApiError,
    Asked,
    Bounded,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    parse,
)
from corral.workers.streams.https import serve

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_LONGEST_SOCKET_PATH = 107  # bytes that the kernel takes, one of which ends it
_MAX_BODY_BYTES = 64 * 2**20
_SHUTDOWN_TIMEOUT_S = 2.0  # for replies under way
_TOO_LONG = "context_length_exceeded"  # OpenAI's word for it, which programs know
_ENDED = "episode_ended"


_FIELDS = ("role", "content", "reasoning_content", "name", "tool_call_id")  # of those that say something


@dataclass(slots=True)
class Conversations:
    """The conversations of one episode's program, so that no message becomes tokens twice.

    messages ──begin with a conversation that was answered──► its ids, bridged to the messages behind the answer
       └──begin with none, or with one that is written in another way by now──► rendered from the beginning

    A program sends all messages each time. An answer in them is recognized if it equals the answer sent: fields that
    are None or nobody reads may be missing, and the arguments of a call may be spaced in another way. If it has changed
    anything, such as left the reasoning out, that is another history, and another branch of the episode.
    """

    renderer: ChatRenderer
    _known: dict[str, tuple[list[int], bool]] = field(default_factory=dict)
    """Conversations up to an answer of the model, as tokens, and whether it came to an end of its own; by what was
    said."""

    def prompt_ids(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema]) -> list[int]:
        """What the model is to go on from.

        Raises:
            ValueError: if they are no messages, or the model's template refuses them.
        """
        plain = plain_messages(messages)
        keys = list(_keys(plain, tools))
        end = next((end for end in range(len(plain), 0, -1) if keys[end - 1] in self._known), None)
        if end is not None:
            ids, stopped = self._known[keys[end - 1]]
            bridged = self.renderer.bridge(ids, stopped=stopped, messages=plain[end:], tools=tools, history=plain[:end])
            if bridged is not None:
                return bridged
        return self.renderer.render(plain, tools=tools)

    def add(self, messages: Sequence[Message], answer: Message, turn: Turn, *, tools: Sequence[ToolSchema]) -> None:
        """An answer was given."""
        *_, key = _keys(plain_messages([*messages, answer]), tools)
        self._known[key] = [*turn.prompt_ids, *turn.answer.output_ids], turn.answer.stopped


def _keys(messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema]) -> Iterator[str]:
    """The digest of the conversation up to each message."""
    digest = hashlib.blake2b(_canonical(list(tools)))
    for message in messages:
        fields = {name: message[name] for name in _FIELDS if message.get(name)}
        calls = [(call.get("id"), call["function"]) for call in message.get("tool_calls", ())]
        digest.update(_canonical([fields, calls]))
        yield digest.hexdigest()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"


class EpisodeSession(Protocol):
    """The interface of an episode, `corral.workers.rollout.episode_session` in a trial."""

    uid: str

    async def generate(self, prompt_ids: Sequence[int], request: TurnRequest) -> Turn:
        """The model's next answer; EpisodeEndedError at a limit, RequestRefusedError for what can never be answered."""


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False, slots=True)
class _Episode:
    """One that is open."""

    session: EpisodeSession
    goes_on: bool
    """Whether what is asked may go on from what was answered."""
    conversations: dict[str, Conversations] = field(default_factory=dict)
    """By the arguments of the template, as JSON."""
    under_way: set["asyncio.Task[Turn]"] = field(default_factory=set)
    is_closed: bool = False


class ModelEndpoint:
    """Of one rollout worker, for all of its episodes.

    Example:
        endpoint = ModelEndpoint(
            renderer, tokenizer, vocabulary_size=151_936, model_name="actor", max_model_len=4096
        )
        await endpoint.start(folder / "model" / "socket")
        key = endpoint.open_episode(session)
        ...                                     # OPENAI_BASE_URL=endpoint.url + "/v1", OPENAI_API_KEY=key
        endpoint.close_episode(key)
        await endpoint.stop()
    """

    def __init__(
        self,
        renderer: ChatRenderer | None,
        tokenizer: Any,
        *,
        vocabulary_size: int,
        model_name: str,
        max_model_len: int,
    ) -> None:
        """
        Args:
            renderer: None if the model has no template: nobody can chat with it then.
            vocabulary_size: the model's token ids are below it.
            max_model_len: tokens of a prompt and its answer together.
        """
        self.url = ""
        """http://127.0.0.1:PORT, once it listens."""
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._vocabulary_size = vocabulary_size
        self._max_model_len = max_model_len
        self._special_ids = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self._longest_text = longest_text(tokenizer, max_model_len)
        self._episodes: dict[str, _Episode] = {}
        self._guard = GuardedListener()
        self._runner: web.AppRunner | None = None
        self._socket_path: Path | None = None

    async def start(self, socket_path: Path) -> None:
        """Listen on loopback, and on a socket in a folder that only this user may enter, made if it is missing.

        Raises:
            ValueError: if the path is longer than sockets may have it, or others may enter its folder.
            OSError: if nothing can listen there.
        """
        if len(bytes(socket_path)) > _LONGEST_SOCKET_PATH:
            raise ValueError(f"a socket's path has at most {_LONGEST_SOCKET_PATH} bytes, {socket_path} has more")
        socket_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = socket_path.parent.stat()
        if folder.st_uid != os.getuid() or stat.S_IMODE(folder.st_mode) & 0o077:
            raise ValueError(f"folder {socket_path.parent} is open to others; give the socket one of its own")
        application = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._answer_errors])
        application.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
                web.post("/inference/v1/generate", self._generate),
                web.get("/v1/models", self._models),
            ]
        )
        # No log of accesses: a header has a key. Who hangs up has its answer given up, as nobody will hear it.
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_TIMEOUT_S
        )
        self.url = await serve(self._runner, _LOOPBACK, None, self._guard)
        await web.UnixSite(self._runner, str(socket_path)).start()
        self._socket_path = socket_path

    async def stop(self) -> None:
        """Close all episodes, and listen no more."""
        for key in list(self._episodes):
            self.close_episode(key)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)

    def open_episode(self, session: EpisodeSession, *, goes_on: bool = True) -> str:
        """The key by which a program speaks to the model in this episode.

        Args:
            goes_on: whether what is asked may go on from what was answered; else each question is one by itself.
        """
        key = secrets.token_hex()
        self._episodes[key] = _Episode(session, goes_on)
        return key

    def close_episode(self, key: str) -> None:
        """The key opens nothing any more; what is under way for it is given up."""
        episode = self._episodes.pop(key, None)
        if episode is not None:
            episode.is_closed = True
            for task in episode.under_way:
                task.cancel()

    # What is asked

    async def _models(self, request: web.Request) -> web.Response:
        self._episode_of(request)
        model = {"id": self._model_name, "object": "model", "owned_by": "corral", "max_model_len": self._max_model_len}
        return web.json_response({"object": "list", "data": [model | {"created": 0}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode_of(request)
        asked, conversations, ids = await asyncio.to_thread(self._read_chat, episode, await request.read())
        renderer, tools = conversations.renderer, asked.schemas
        ends = [*renderer.stop_token_ids, *(asked.stop_token_ids or ())]
        turn = await self._turn(episode, ids, asked, stop_token_ids=ends)
        answer, callable_tools = turn.answer, tools if asked.tool_choice != "none" else ()
        parsed = renderer.parse(answer.output_ids, stopped=answer.stopped, tools=callable_tools, num_before=len(ids))
        message = parsed.as_message()
        if message["content"]:  # programs do not expect what was to end an answer as a part of it; the ids have it
            message["content"] = message["content"][: first_index(message["content"], asked.stops)]
        conversations.add(asked.messages, message, turn, tools=tools)
        tokenizer = self._tokenizer if asked.logprobs else None
        return await _send(request, asked, turn, chat_reply(turn, message, model=self._model_name, tokenizer=tokenizer))

    def _read_chat(self, episode: _Episode, body: bytes) -> tuple[ChatRequest, Conversations, list[int]]:
        """A request, the conversations that it may go on from, and its prompt. In a thread: it may be long."""
        asked = parse(body, ChatRequest)
        if self._renderer is None:
            raise ApiError("the model has no chat template; ask /v1/completions, or train one that has")
        self._check_size([asked.messages, asked.tools])
        key = json.dumps(asked.template_arguments, sort_keys=True)
        if (conversations := episode.conversations.get(key)) is None:
            try:
                conversations = Conversations(self._renderer.with_arguments(asked.template_arguments))
            except ValueError as error:
                raise ApiError(f"chat_template_kwargs: {error}") from error
            if episode.goes_on:
                conversations = episode.conversations.setdefault(key, conversations)
        if asked.tools and conversations.renderer.tool_calls is None:
            raise ApiError("the model's chat template writes tool calls in no form that is known here; leave tools out")
        try:
            return asked, conversations, conversations.prompt_ids(asked.messages, tools=asked.schemas)
        except ValueError as error:
            raise ApiError(str(error)) from error

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode_of(request)
        asked, ids = await asyncio.to_thread(self._read_completion, await request.read())
        turn = await self._turn(episode, ids, asked, stop_token_ids=asked.stop_token_ids or ())
        ends = self._special_ids if turn.answer.stopped else ()
        text = answer_text(self._tokenizer, turn.answer.output_ids, ends=ends)
        text = text[: first_index(text, asked.stops)]
        tokenizer = None if asked.logprobs is None else self._tokenizer
        return await _send(request, asked, turn, text_reply(turn, text, model=self._model_name, tokenizer=tokenizer))

    def _read_completion(self, body: bytes) -> tuple[CompletionRequest, list[int]]:
        asked = parse(body, CompletionRequest)
        self._check_size(asked.prompt)
        return asked, list(asked.prompt) if is_ids(asked.prompt) else encode_prompt(self._tokenizer, asked.prompt)

    async def _generate(self, request: web.Request) -> web.Response:
        episode = self._episode_of(request)
        asked = await asyncio.to_thread(parse, await request.read(), GenerateRequest)
        params = asked.params
        ends, temperature = params.stop_token_ids or (), params.own_temperature
        turn = await self._turn(episode, asked.token_ids, params, stop_token_ids=ends, temperature=temperature)
        return web.json_response(ids_reply(turn))

    # How it is answered

    def _episode_of(self, request: web.Request) -> _Episode:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        episode = self._episodes.get(key) if scheme.lower() == "bearer" else None
        if episode is None:
            raise ApiError("the key names no episode that is open", code="invalid_api_key", status=401)
        self._guard.prove(request.transport)
        return episode

    def _check_size(self, asked: object) -> None:
        """ApiError if the texts in it are longer than all tokens that fit: nobody makes tokens of them then."""
        if is_longer(asked, self._longest_text):
            raise self._too_long(f"more than {self._longest_text} characters of text")

    def _too_long(self, what: str) -> ApiError:
        limit = f"prompt and answer have at most {self._max_model_len} tokens"
        return ApiError(f"{what} leave no room for an answer: {limit}", code=_TOO_LONG, reason="length")

    async def _turn(
        self,
        episode: _Episode,
        ids: Sequence[int],
        asked: Bounded,
        *,
        stop_token_ids: Sequence[int],
        temperature: float | None = None,
    ) -> Turn:
        """The model's answer to these tokens.

        Raises:
            ApiError: if there is none.
        """
        room, most = self._max_model_len - len(ids), asked.max_new_tokens
        if room < 1:
            raise self._too_long(f"{len(ids)} tokens")
        if not ids or not all(0 <= token < self._vocabulary_size for token in ids):
            raise ApiError(f"a prompt has at least one token, each an id below {self._vocabulary_size}")
        if most is not None and most < 1:
            raise ApiError(f"an answer has at least one token, {most} were asked for")
        request = TurnRequest(min(room, most or room), temperature, stop=asked.stops, stop_token_ids=stop_token_ids)
        task = asyncio.create_task(episode.session.generate(ids, request))
        episode.under_way.add(task)
        try:
            return await task
        except asyncio.CancelledError as error:
            if not episode.is_closed:
                raise  # the program has hung up
            raise ApiError("the episode was closed before the answer was made", code=_ENDED) from error
        except EpisodeEndedError as error:
            code = _TOO_LONG if error.reason == "length" else _ENDED
            raise ApiError(str(error), code=code, reason=error.reason) from error
        except RequestRefusedError as error:
            logger.warning("a request of episode %s was refused: %s", episode.session.uid, error)
            is_wrong = error.kind == "request_refused"
            words = "the generation server refuses" if is_wrong else "no generation server can answer"
            raise ApiError(f"{words} this request", code=error.kind) from error
        finally:
            episode.under_way.discard(task)

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            refused = error
        except web.HTTPRequestEntityTooLarge:
            refused = self._too_long(f"a request of more than {_MAX_BODY_BYTES} bytes")
        except web.HTTPException as error:
            here = ", ".join(str(resource.canonical) for resource in request.app.router.resources())
            words = f"{error.reason}: {request.method} {request.path}; what is answered here is {here}"
            refused = ApiError(words, code="no_such_request", status=error.status)
        except Exception:
            logger.exception("the model endpoint failed on %s", request.path)
            refused = ApiError("the model endpoint failed", code="internal_error", status=500)
        return web.json_response(refused.body(), status=refused.status)


async def _send(request: web.Request, asked: Asked, turn: Turn, reply: dict[str, Any]) -> web.StreamResponse:
    number = {"X-Turn": str(turn.number)}  # for the host of an environment, which may not learn from it
    if not asked.stream:
        return web.json_response(reply, headers=number)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **number})
    await response.prepare(request)
    for event in events(reply, says_usage=asked.says_usage):
        await response.write(event)
    await response.write_eof()
    return response
