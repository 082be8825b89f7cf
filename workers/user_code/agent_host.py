"""The process that a user's agents run in: it imports the agent, and plays many episodes at a time in one event loop.

    worker ──lines of JSON──► host                            host ──lines of JSON──► worker
      {"run": 7, "task": {...}, "endpoint": {...}, "key"}       {"ready": {...}}, or {"failed": why}
      {"judged": 3, "reward": 1.0}, or "error": why             {"beat": 12}            as long as its loop goes round
      {"cancel": 7}                                             {"judge": 3, "run": 7, "answer": text}
                                                                {"done": 7, "reward": ..., ...}

    run ──► agent(task, session) ⇄ model endpoint, by the episode's key ──► done

It is executed anew, so it holds nothing of the worker's memory, and no key of the trial: what it is given opens the
endpoint for the episodes that it plays, and nothing else. It ends when the worker closes its end, or dies.

Eight bytes that it shares with the worker hold the run whose step is being made: if the process dies, they say by whom.
"""

import asyncio
import faulthandler
import itertools
import json
import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec

from corral.experiments.own_python import own_python
from corral.experiments.prompts.chat import find_renderer
from corral.experiments.prompts.row_prompts import is_ids
from corral.experiments.prompts.tokens import eos_token_ids, load_tokenizer
from corral.experiments.trial.tether import die_with_parent
from corral.workers.agents.contract import (
    Endpoint,
    EpisodeEndedError,
    JudgeError,
    Message,
    Outcome,
    RefusedError,
    Task,
    Words,
)
from corral.workers.agents.http_model import HttpModel, open_http
from corral.workers.agents.session import ModelLanguage, Session
from corral.workers.sandbox.base import asks_for_sandbox
from corral.workers.user_code.agent_run import AgentRun, blocking_interrupted
from corral.workers.user_code.blame import LONGEST_CAUSE, describe_error, printable, users_traceback
from corral.workers.user_code.loading import load_callable
from corral.workers.user_code.trials import checked_reward

T = TypeVar("T")

LARGEST_LINE = 2**26  # bytes of a message: a task's row and its prompt's tokens
MARK_BYTES = 8
_MOST_NOTES = 64  # numbers of an episode
_WINDS_PER_TIMEOUT = 10  # so much later than its timeout, at most, an agent that blocks is interrupted
_LONGEST_BEAT_S = 5.0


class Setup(msgspec.Struct):
    """How a host is started: its one argument, as JSON."""

    agent: str
    """Import path."""
    settings: dict[str, Any]
    model: str
    """Folder with the tokenizer."""
    timeout_s: float
    """`rollout.agent_timeout_s`."""
    parent: int
    """The process that it ends with; 0: another one sees to that."""
    channel: int
    """Descriptor of its side of the connection."""
    mark: int
    """Descriptor of the memory that it shares with the worker."""
    template_arguments: dict[str, Any] = {}
    """`dataset.chat_template_kwargs`."""
    max_tokens: int | None = None
    """`rollout.episode.max_tokens`."""

    @property
    def beat_s(self) -> float:
        """Pause between two beats."""
        return min(self.timeout_s / _WINDS_PER_TIMEOUT, _LONGEST_BEAT_S)


class Fault(msgspec.Struct):
    """Why an episode failed."""

    kind: str
    """agent_error, reward_error or request_refused."""
    cause: str
    """One line, with file and line."""
    traceback: str = ""

    def printable(self) -> "Fault":
        """The same in texts that every file and connection takes."""
        return Fault(self.kind, printable(self.cause), printable(self.traceback))


class Done(msgspec.Struct):
    """What came of a run."""

    done: int
    reward: float | None = None
    """None: the trial's reward is to be asked."""
    metrics: dict[str, float] = {}
    turn_rewards: list[tuple[int, float]] = []
    untrained: list[int] = []
    ended: str = ""
    error: Fault | None = None


class Marked(Generic[T]):
    """Awaits a coroutine, and notes before each of its steps whose it is, behind it that it is nobody's."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], number: int, mark: Callable[[int], None]) -> None:
        self._coroutine, self._number, self._mark = coroutine, number, mark

    def __await__(self) -> Generator[Any, Any, T]:
        pid, step = os.getpid(), partial(self._coroutine.send, None)
        while True:
            self._mark(self._number)
            try:
                awaited = step()
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                if os.getpid() != pid:  # the agent has forked, and the child comes back: the loop is not its own
                    os._exit(0)
                self._mark(0)
            try:
                yield awaited
                step = partial(self._coroutine.send, None)
            except BaseException as error:
                step = partial(self._coroutine.throw, error)


class Host:
    """Plays what it is told to, until the worker is gone."""

    def __init__(self, agent: Callable[..., Any], setup: Setup) -> None:
        model = Path(setup.model)
        self._agent, self._setup = agent, setup
        tokenizer = load_tokenizer(model)
        renderer = find_renderer(model, tokenizer, arguments=setup.template_arguments)
        self._language = ModelLanguage(
            tokenizer, stop_token_ids=eos_token_ids(model), renderer=renderer, max_tokens=setup.max_tokens
        )
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._judged: dict[int, asyncio.Future[float]] = {}
        self._calls = itertools.count()
        self._http: dict[str, aiohttp.ClientSession] = {}
        """By the endpoint's path."""
        self._memory = mmap.mmap(setup.mark, MARK_BYTES)

    async def serve(self, channel: socket.socket) -> None:
        """Until the worker closes its end."""
        reader, self._writer = await asyncio.open_connection(sock=channel, limit=LARGEST_LINE)
        self._say({"ready": {"needs_sandbox": asks_for_sandbox(self._agent)}})
        with blocking_interrupted(self._setup.timeout_s) as wind:
            beating = asyncio.create_task(self._beat(wind))
            try:
                while line := await reader.readline():
                    self._take(json.loads(line))  # unlike msgspec's: NaN, integers of any size, half a surrogate pair
            finally:
                beating.cancel()

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"run": int(number)}:
                task = asyncio.create_task(self._play(number, message))
                self._runs[number] = task
                task.add_done_callback(lambda _: self._runs.pop(number, None))
            case {"cancel": int(number)}:
                if number in self._runs:
                    self._runs[number].cancel()
            case {"judged": int(call)}:
                waiting = self._judged.pop(call, None)
                if waiting is not None and not waiting.done():
                    if error := message.get("error"):
                        waiting.set_exception(JudgeError(error))
                    else:
                        waiting.set_result(message["reward"])

    async def _beat(self, wind: Callable[[], Awaitable[None]]) -> None:
        for number in itertools.count():
            await wind()
            self._say({"beat": number})
            await asyncio.sleep(self._setup.beat_s)

    async def _play(self, number: int, message: Mapping[str, Any]) -> None:
        """One episode, from its task to what came of it; a run that is cancelled has nobody who waits for it."""
        task, path, key = Task(**message["task"]), message["endpoint"]["unix"], message["key"]
        if path not in self._http:
            self._http[path] = open_http(path)
        run = AgentRun(self._setup.agent, timeout_s=self._setup.timeout_s)
        session = Session(
            run.asks(HttpModel(self._http[path], key)),
            self._language,
            run.asks(partial(self._judge, number)),
            task.prompt_ids,
            conversation=_messages_of(task.prompt),
            endpoint=Endpoint(message["endpoint"]["url"] + "/v1", key),
        )
        done = Done(number)
        try:
            played = self._agent(task, session, **self._setup.settings)
            outcome = _outcome_of(await run.wait(Marked(played, number, self._mark)))
            done.reward, done.ended = outcome.reward, outcome.ended
            session.note(**outcome.metrics)
        except EpisodeEndedError as error:
            done.ended = error.reason
        except BaseException as error:  # SystemExit and CancelledError of the agent's own, too
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            done.error = _fault(error)
        record = session.record
        done.ended = done.ended or record.ended
        done.turn_rewards, done.untrained = record.turn_rewards, record.untrained
        done.metrics = dict(itertools.islice(record.notes.items(), _MOST_NOTES))
        try:
            self._say(msgspec.to_builtins(done))
        except ValueError as error:
            self._say(msgspec.to_builtins(Done(number, error=Fault("agent_error", str(error)))))
        sys.stdout.flush()

    async def _judge(self, number: int, answer: str) -> float:
        call, waiting = next(self._calls), asyncio.get_running_loop().create_future()
        self._judged[call] = waiting
        try:
            self._say({"judge": call, "run": number, "answer": answer})
            return float(await waiting)
        finally:
            self._judged.pop(call, None)

    def _say(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > LARGEST_LINE:
            raise ValueError(f"what it reports has {len(line)} bytes as JSON, and at most {LARGEST_LINE} are taken")
        self._writer.write(line)

    def _mark(self, number: int) -> None:
        self._memory[:] = number.to_bytes(MARK_BYTES, "little")


def _messages_of(prompt: Words) -> list[Message] | None:
    """A prompt that is a conversation; None for text and token ids."""
    if isinstance(prompt, str) or is_ids(prompt):
        return None
    return [message for message in prompt if isinstance(message, Mapping)]


def _outcome_of(returned: Any) -> Outcome:
    """What an agent has returned, checked; TypeError or ValueError if it is no outcome."""
    outcome = returned if isinstance(returned, Outcome) else Outcome(returned)
    if outcome.reward is None:
        return outcome
    if isinstance(outcome.reward, str) or not hasattr(outcome.reward, "__float__"):
        raise TypeError(f"an agent returns a number, an Outcome or None, got {type(outcome.reward).__name__}")
    return Outcome(checked_reward(outcome.reward), metrics=outcome.metrics, ended=str(outcome.ended))


def _fault(error: BaseException) -> Fault:
    kinds = {JudgeError: "reward_error", RefusedError: "request_refused"}
    kind = next((kinds[cause] for cause in kinds if isinstance(error, cause)), "agent_error")
    cause = describe_error(error) if kind == "agent_error" else printable(str(error)[:LONGEST_CAUSE])
    return Fault(kind, cause, users_traceback(error))


def main(argument: str) -> None:
    """Serves the worker whose side of a connection the argument, a `Setup`, names."""
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):  # the worker says when; unlike SIG_IGN it is not left to programs
        signal.signal(number, lambda *_: None)
    setup = msgspec.json.decode(argument, type=Setup)
    if setup.parent:
        die_with_parent(parent=setup.parent)()
    channel = socket.socket(fileno=setup.channel)
    os.register_at_fork(after_in_child=lambda: os.close(setup.channel))  # what an agent forks does not speak for it
    try:
        host = Host(load_callable(setup.agent), setup)
    except BaseException as error:
        failed = {"failed": f"{setup.agent} cannot be imported: {describe_error(error)}"}
        channel.sendall(json.dumps(failed).encode() + b"\n")
        return
    with suppress(ConnectionError):
        asyncio.run(host.serve(channel))


def command(setup: Setup, path: Sequence[str]) -> list[str]:
    """Starts a host that finds modules where the worker does."""
    code = f"import os, sys; sys.path[:] = sys.argv[2:]; from {__name__} import main; main(sys.argv[1]); os._exit(0)"
    return own_python("-c", code, msgspec.json.encode(setup).decode(), *path)
