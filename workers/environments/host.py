"""The host of an environment: a program for a Python of its own, in which verifiers and the environment are installed.

    host.py describe SETTINGS OUTPUT    ──► OUTPUT: {"described": {...}}
    host.py list SETTINGS OUTPUT        ──► the same, then a row for each task
    host.py play SETTINGS FD,MARK       ──► {"ready": {...}} or {"failed": why}, then episodes as long as FD is open

    worker ──run, key, task──► Env.run_slot ──► harness ──► verifiers' client ──Relay, by trace──► its endpoint
       ▲                           │ any failure is the episode's own                              │ messages
       └──done: reward, metrics────┘◄──────────────────────────────────────────────────────────────┘

Messages become tokens at the endpoint, by the trial's own template, once: the environment never sees a token.

It is started by its path and imports nothing of corral. Lines of JSON go in both directions, as with an agent's process
(`corral/workers/user_code/agent_host.py`); SETTINGS is JSON as well, see `Settings`. What the environment prints is for
the worker's log. It ends when the worker closes its end, or dies. Eight bytes behind MARK, which it shares with the
worker, hold the run whose step is being made: if the process dies, they say by whom.
"""

import asyncio
import ctypes
import hashlib
import itertools
import json
import math
import mmap
import os
import re
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.utils import loaders

_MODEL = "policy"  # what the endpoint calls it
_BEAT_S = 1.0
_MARK_BYTES = 8
_RUN: ContextVar[int] = ContextVar("run", default=0)
"""Whose task this is."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MOST_EMPTY = 8  # answers without a token to an episode that has ended: then whoever plays it does not listen
_EMPTY = {"role": "assistant", "content": ""}
_LIMITS = {
    "max_turns": "turns",
    "max_input_tokens": "length",
    "max_output_tokens": "length",
    "max_total_tokens": "length",
}
"""Of an agent, by verifiers' words and ours."""
_LONGEST_LINE = 1 << 28
_KEY_VARIABLE = "CORRAL_RELAY_API_KEY"  # programs that verifiers starts do not inherit names with API_KEY
_PLUGINS = str(Path(__file__).parent / "plugins")
_STANDARD = str(Path(os.__file__).parent) + os.sep
_TURN = "X-Turn"  # of the endpoint's replies: which turn of the episode it is
_MAX_ERROR, _MAX_TRACEBACK = 2000, 8000  # characters


@dataclass(frozen=True, slots=True)
class Settings:
    """What the configuration says of the environment."""

    id: str
    args: Mapping[str, Any]
    num_tasks: int | None = None
    timeout_s: float = 300.0
    """How long an episode may be at work of its own at a time."""
    parent: int = 0
    """The worker's process."""


# The environment


def make_config(settings: Settings) -> vf.EnvConfig:
    """Its configuration: what the user says, over what its authors say, over a conversation on this machine.

    verifiers' own defaults are a shell for the model, and a sandbox that is rented; neither is meant by who names none.
    """
    if _PLUGINS not in sys.path:
        sys.path.append(_PLUGINS)
    given = {**settings.args, "taskset": {**settings.args.get("taskset", {}), "id": settings.id}}
    declared = loaders.env_config_type(settings.id, str(given.get("id", "")))
    brings_harness = loaders.default_harness_id(settings.id) == settings.id
    talks = "null" if _has_tools(settings.id, given["taskset"]) else "corral_chat"
    for name, known in declared.model_fields.items():
        if isinstance(known.default, vf.AgentConfig):
            role = dict(given.get(name) or {})
            if known.default.harness is None and not brings_harness:
                role.setdefault("harness", {"id": talks})
            if "runtime" not in known.default.model_fields_set:
                role.setdefault("runtime", {"type": "subprocess"})
            given[name] = role
    return loaders.resolve_env_config(given)


def _has_tools(name: str, given: Mapping[str, Any]) -> bool:
    taskset = loaders.taskset_class(name)
    config = loaders.taskset_config_type(name).model_validate(given)
    return bool(taskset.toolsets(config) or taskset.task_type().toolsets(config.task))


def describe(config: vf.EnvConfig) -> dict[str, Any]:
    """By what one sees later that the code of an environment is another: its packages' versions, and its files."""
    distributions = metadata.packages_distributions()
    digest, packages = hashlib.sha256(), {"verifiers": metadata.version("verifiers")}
    for module in _modules(config):
        for name in distributions.get(module.__name__.partition(".")[0], ()):
            packages[name] = metadata.version(name)
        file = Path(str(module.__file__))
        files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
        for path in files:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return {"packages": packages, "sha256": digest.hexdigest()}


def _modules(config: vf.EnvConfig) -> Iterator[Any]:
    yield loaders.import_taskset(config.taskset.id)
    if config.id:
        yield loaders.import_environment(config.id)


def rows_of(taskset: vf.Taskset, *, num_tasks: int | None) -> Iterator[dict[str, Any]]:
    """A row for each task, with all that the task is made of.

    Raises:
        ValueError: if there are no tasks, or no end of them, or two of the same name.
    """
    if num_tasks is None and not taskset.bounded:
        raise ValueError("it makes tasks without end; say how many with rollout.environment.num_tasks")
    tasks = list(itertools.islice(taskset, num_tasks))
    if not tasks:
        raise ValueError("it has no tasks")
    ids = [task.data.id or "" for task in tasks]
    if not all(ids) or len(set(ids)) < len(ids):
        ids = [task.key for task in tasks]
    for name, task in zip(ids, tasks, strict=True):
        shown = task.data.prompt_text or task.data.name or task.data.description or name
        yield {"id": name, "prompt": shown, "task": task.data.model_dump(mode="json", exclude_defaults=True)}


# The model


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
        self.secret = secrets.token_urlsafe(24)
        self.episodes: dict[str, Played] = {}
        """By the id of a trace."""
        self._stack = stack
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def start(self) -> str:
        """Listen on loopback; returns the URL."""
        application = web.Application(client_max_size=_LONGEST_LINE)
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
        """What the environment is told. That an episode has come to a limit is no failure of it: it is judged as it
        stands, so whoever still asks gets an answer of no token.
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
    reply = {"id": "ended", "object": "chat.completion", "created": 0, "model": _MODEL}
    choice = {"index": 0, "finish_reason": "length"}
    if not streams:
        return web.json_response(reply | {"choices": [choice | {"message": _EMPTY}]})
    chunk = reply | {"object": "chat.completion.chunk", "choices": [choice | {"delta": _EMPTY}]}
    return web.Response(text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")


# Episodes


class Player:
    """Plays the episodes that the worker asks for, all at the same time."""

    def __init__(self, env: vf.Env, relay: Relay, context: vf.ModelContext, *, timeout_s: float) -> None:
        self._env = env
        self._timeout_s = timeout_s
        self._relay = relay
        self._context = context
        self._task_class = type(env.taskset).task_type()

    async def play(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """What came of one episode; an environment's failure is a value."""
        episode, traces = Played(run["endpoint"]["unix"], run["key"]), list[str]()

        def note(trace: vf.Trace) -> None:
            traces.append(trace.id)
            self._relay.episodes[trace.id] = episode

        try:
            data = self._task_class.data_type().model_validate(run["task"]["fields"]["task"])
            (slot,) = self._env.slots(self._task_class(data, self._env.config.taskset.task))
            _RUN.set(run["run"])
            playing = asyncio.ensure_future(_settled(self._env.run_slot(slot, self._context, on_trace=note)))
            try:
                while not playing.done() and (left_s := episode.left_s(self._timeout_s)) > 0.0:
                    await asyncio.wait([playing], timeout=left_s)
                if not playing.done():
                    text = f"it neither ended nor asked the model for {self._timeout_s:g} s (rollout.agent_timeout_s)"
                    verdict = failed("TimeoutError", text, "".join(_stack_of(playing)))
                elif isinstance(outcome := playing.result(), BaseException):
                    verdict = failed(type(outcome).__name__, str(outcome), "".join(traceback.format_exception(outcome)))
                else:
                    verdict = judged(outcome, episode)
            finally:
                playing.cancel()
        except Exception as error:
            verdict = failed(type(error).__name__, str(error), traceback.format_exc())
        finally:
            for trace in traces:
                self._relay.episodes.pop(trace, None)
        return {"done": run["run"], **verdict}


async def _settled(playing: Awaitable[vf.Episode]) -> vf.Episode | BaseException:
    """What comes of it, an error as a value: SystemExit of a task would end the loop that plays all the others."""
    try:
        return await playing
    except BaseException as error:
        return error


class Marked(Coroutine[Any, Any, Any]):
    """A coroutine that notes before each of its steps whose it is, and behind it that it is nobody's."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], mark: Callable[[int], None], number: int) -> None:
        self._coroutine, self._mark, self._number = coroutine, mark, number

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def _step(self, step: Callable[..., Any], *values: Any) -> Any:
        self._mark(self._number)
        try:
            return step(*values)
        finally:
            self._mark(0)


def mark_steps(descriptor: int) -> None:
    """Has every task of the running loop that comes from an episode note its steps."""
    memory = mmap.mmap(descriptor, _MARK_BYTES)

    def mark(number: int) -> None:
        memory[:] = number.to_bytes(_MARK_BYTES, "little")

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        number = _RUN.get()
        return asyncio.Task(Marked(coroutine, mark, number) if number else coroutine, loop=loop, **options)

    asyncio.get_running_loop().set_task_factory(make)


def _stack_of(task: "asyncio.Task[Any]") -> list[str]:
    """Where a task waits, as a traceback has it."""
    waits: Any = task.get_coro()
    lines: list[str] = []
    while waits is not None:
        waits = getattr(waits, "_coroutine", waits)
        if (frame := getattr(waits, "cr_frame", None)) is not None:
            lines += traceback.format_stack(frame, limit=1)
        waits = getattr(waits, "cr_await", None)
    return lines


def judged(episode: vf.Episode, played: Played) -> dict[str, Any]:
    """Reward and metrics of an episode: of several agents that learn, the mean of theirs."""
    errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    if errors or not episode.ok:
        error = errors[-1] if errors else None
        text = error.message if error else "the episode did not come to its end"
        return failed(error.type if error else "EnvError", text, (error.traceback if error else "") or "")
    taught = [trace for trace in episode.traces if trace.agent.trainable]
    learning = {trace.id for trace in taught}
    untrained = [turn for name, turns in played.turns.items() if name not in learning for turn in turns]
    if not taught:
        return failed("EnvError", "no agent of it learns anything", "")
    metrics = {"turns": float(sum(trace.num_turns for trace in taught))}
    for trace in taught:
        metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
        metrics |= {f"reward/{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
    reward = sum(trace.reward for trace in taught) / len(taught)
    if not math.isfinite(reward):
        return failed("ValueError", f"the reward is {reward}", "")
    ended = next((limit for trace in taught if (limit := _LIMITS.get(trace.stop_condition or ""))), "")
    return {"reward": reward, "metrics": metrics, "untrained": untrained, "ended": ended}


def failed(kind: str, text: str, said: str) -> dict[str, Any]:
    """An episode without a reward."""
    # The last line of somebody's own: what catches and wraps is verifiers'.
    places = [line.strip() for line in said.splitlines() if line.lstrip().startswith("File ")]
    own = [place for place in places if _STANDARD not in place and f"{os.sep}verifiers{os.sep}" not in place] or places
    cause = " ".join(f"{kind}: {text}".split())[:_MAX_ERROR] + (f" ({own[-1]})" if own else "")
    return {"error": {"kind": "agent_error", "cause": cause, "traceback": said[-_MAX_TRACEBACK:]}}


async def serve(settings: Settings, descriptor: int, mark: int) -> None:
    """Plays until the worker closes its end."""
    mark_steps(mark)
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=_LONGEST_LINE)

    def say(**words: Any) -> None:
        writer.write(json.dumps(words).encode() + b"\n")

    async with AsyncExitStack() as stack:
        try:
            config = make_config(settings)
            env = loaders.load_environment(config)
            relay = Relay(stack)
            os.environ[_KEY_VARIABLE] = relay.secret
            client = vf.EvalClientConfig(base_url=await relay.start(), api_key_var=_KEY_VARIABLE)
            await stack.enter_async_context(env.serving())
            # How answers are sampled is the trial's business; what an environment's agents say of it is passed on.
            context = vf.ModelContext(model=_MODEL, client=client)
            player = Player(env, relay, context, timeout_s=settings.timeout_s)
            say(ready=describe(config))
        except Exception as error:
            traceback.print_exc()
            say(failed=told(error))
            await writer.drain()
            return
        running: dict[Any, asyncio.Task[None]] = {}

        async def play(run: Mapping[str, Any]) -> None:
            try:
                say(**await player.play(run))
            finally:
                running.pop(run["run"], None)

        async def beat() -> None:
            for number in itertools.count():
                say(beat=number)
                await writer.drain()
                await asyncio.sleep(_BEAT_S)

        beating = asyncio.create_task(beat())
        with suppress(ConnectionError):
            while not beating.done() and (line := await reader.readline()):
                word = json.loads(line)
                if "run" in word:
                    running[word["run"]] = asyncio.create_task(play(word))
                elif "cancel" in word and word["cancel"] in running:
                    running[word["cancel"]].cancel()
        for task in (beating, *running.values()):
            task.cancel()
        await asyncio.gather(beating, *running.values(), return_exceptions=True)


def tell(settings: Settings, output: TextIO, *, lists: bool) -> None:
    """Writes what the environment is, and its tasks."""
    config = make_config(settings)
    env = loaders.load_environment(config)
    output.write(json.dumps({"described": describe(config)}) + "\n")
    if lists:
        output.writelines(json.dumps(row) + "\n" for row in rows_of(env.taskset, num_tasks=settings.num_tasks))


def told(error: Exception) -> str:
    """An error on one line."""
    words = re.sub(r"For further information visit \S+", "", str(error)).split()
    return f"{type(error).__name__}: {' '.join(words)}"[:_MAX_ERROR]


def main(mode: str, settings_text: str, where: str) -> int:
    """Describes, lists, or plays; 1 with the reason as the last line of stderr if the environment cannot be used."""
    settings = Settings(**json.loads(settings_text))
    if mode == "play":
        if settings.parent:  # else another process sees to it that it ends
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != settings.parent:  # it went away before the wish was registered
                return 1
        asyncio.run(serve(settings, *map(int, where.split(","))))
        return 0
    try:
        with Path(where).open("w") as output:
            tell(settings, output, lists=mode == "list")
    except Exception as error:
        traceback.print_exc()
        print(told(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
