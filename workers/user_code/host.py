"""The process that a function of the user's runs in: it imports the function, and makes the runs that the worker asks
for.

    worker ──lines of JSON──► host                            host ──lines of JSON──► worker
      {"run": 7, ...}           what a program asks for         {"ready": {...}}, or {"failed": why}
      {"judged": 3, "reward": 1.0}, or "error": why             {"beat": 12}            as long as its loop goes round
      {"cancel": 7}                                             {"judge": 3, "run": 7, "answer": text}
                                                                {"done": 7, "result": ...}, or "error": {...}

    run ──► an async function: a task of this process's event loop, beside all others
       └──► a plain function: a forked process, to itself while it runs ──late, or its run is cancelled──► killed

An agent, a reward and a sampler are programs of it (`agents.py`, `scoring.py`). The host is executed anew, so it holds
nothing of the worker's memory, and no key of the trial. It ends, and all below it, when the worker closes its end, or
dies.

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
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from corral.experiments.own_python import own_python
from corral.experiments.trial.tether import die_with_parent
from corral.workers.agents.contract import JudgeError, RefusedError
from corral.workers.rewards.contract import StopTrialError
from corral.workers.sandbox.availability import why_no_sandbox
from corral.workers.sandbox.base import asks_for_sandbox
from corral.workers.streams.live_timeout import LiveTimeout
from corral.workers.user_code.blame import LONGEST_CAUSE, printable, users_traceback, watched
from corral.workers.user_code.checks import LateError, cause_of
from corral.workers.user_code.loading import load_callable
from corral.workers.user_code.run import Run, blocking_interrupted

LARGEST_LINE = 2**26  # bytes of a message: a task's row and its prompt's tokens, or the answers of a group
MARK_BYTES = 8
FAILED, LATE, LOST, STOPS_TRIAL = "failed", "late", "lost", "stops_trial"
REFUSED, UNJUDGED = "request_refused", "unjudged"
_KINDS = {JudgeError: UNJUDGED, RefusedError: REFUSED, StopTrialError: STOPS_TRIAL, LateError: LATE}
_WINDS_PER_TIMEOUT = 10  # so much later than its timeout, at most, a function that blocks is interrupted
_LONGEST_BEAT_S = 5.0
_GRACE_S = 2.0  # after a run's deadline, for its forked process to say where it stands

Ask = Callable[[str], Coroutine[Any, Any, float]]
"""What the trial's reward says of a text."""
Call = Callable[[Mapping[str, Any]], Any]


class Setup(msgspec.Struct, kw_only=True):
    """How a host is started: its one argument, as JSON."""

    program: str
    """Import path of what makes a `Program` of this."""
    function: str
    """Import path of the user's function."""
    name: str
    """For people: "agent my:solve"."""
    settings: dict[str, Any] = {}
    """The function's own."""
    options: dict[str, Any] = {}
    """The program's own."""
    timeout_s: float
    """How long the function may be at work of its own at a time."""
    setting: str
    """The configuration's name of this time."""
    parent: int = 0
    """The process that it ends with; 0: another process sees to that."""
    is_hidden: bool = False
    """Whether the trial's secrets are hidden from it, so that it can make no sandbox."""
    channel: int = -1
    """Descriptor of its side of the connection."""
    mark: int = -1
    """Descriptor of the memory that it shares with the worker."""

    @property
    def beat_s(self) -> float:
        """Pause between two beats."""
        return min(self.timeout_s / _WINDS_PER_TIMEOUT, _LONGEST_BEAT_S)


class Fault(msgspec.Struct):
    """Why a run failed."""

    kind: str
    """failed, late, lost (its process is gone through nobody's fault), stops_trial, request_refused or unjudged."""
    cause: str
    """One line, with file and line."""
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        """What is wrong, and in which line of the user's."""
        kind = next((kind for cause, kind in _KINDS.items() if isinstance(error, cause)), FAILED)
        is_plain = kind in (REFUSED, UNJUDGED)
        return cls(kind, printable(str(error)[:LONGEST_CAUSE]) if is_plain else cause_of(error), users_traceback(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How a function of the user's is called. It has one of `call` and `play`; what they return goes into JSON."""

    function: Callable[..., Any]
    ready: Mapping[str, Any] = field(default_factory=dict)
    """The fault as the worker reads it."""
    concurrency: int = sys.maxsize
    """Runs that are made at a time; their own time begins only then."""
    call: Call | None = None
    """Makes a run of a plain function, from what is asked."""
    play: Callable[[Mapping[str, Any], Run, Ask], Awaitable[Any]] | None = None
    """Makes a run of an async function, from what is asked."""


class Host:
    """Makes the runs that the worker asks for, until the worker is gone."""

    def __init__(self, program: Program, setup: Setup) -> None:
        self._program, self._setup = program, setup
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._judged: dict[int, asyncio.Future[float]] = {}
        self._numbers = itertools.count()
        self._memory = mmap.mmap(setup.mark, MARK_BYTES)
        self._slots = asyncio.Semaphore(program.concurrency)
        self._forks: set[_Fork] = set()
        self._idle: list[_Fork] = []

    async def serve(self, channel: socket.socket) -> None:
        """Until the worker closes its end."""
        reader, self._writer = await asyncio.open_connection(sock=channel, limit=LARGEST_LINE)
        forks, needs_sandbox = self._program.call is not None, asks_for_sandbox(self._program.function)
        self._say({"ready": {**self._program.ready, "forks": forks, "needs_sandbox": needs_sandbox}})
        with ExitStack() as stack:
            stack.callback(self._end_all)
            wind = lambda: None  # noqa: E731
            if not forks:
                wind = stack.enter_context(blocking_interrupted(self._setup.timeout_s, setting=self._setup.setting))
            beating = asyncio.create_task(self._beat(wind))
            stack.callback(beating.cancel)
            while line := await reader.readline():
                self._take(line, json.loads(line))  # unlike msgspec's: NaN, integers of any size, half a surrogate pair

    def _end_all(self) -> None:
        for fork in self._forks:
            fork.kill()

    def _take(self, line: bytes, message: dict[str, Any]) -> None:
        match message:
            case {"run": int(number)}:
                task = asyncio.create_task(self._run(number, message, line))
                self._runs[number] = task
                task.add_done_callback(lambda _: self._runs.pop(number, None))
            case {"cancel": int(number)}:
                if number in self._runs:
                    self._runs[number].cancel()
            case {"judged": int(number)}:
                waiting = self._judged.pop(number, None)
                if waiting is not None and not waiting.done():
                    if error := message.get("error"):
                        waiting.set_exception(JudgeError(error))
                    else:
                        waiting.set_result(message["reward"])

    async def _beat(self, wind: Callable[[], None]) -> None:
        for number in itertools.count():
            wind()
            self._say({"beat": number})
            await asyncio.sleep(self._setup.beat_s)

    async def _run(self, number: int, asked: Mapping[str, Any], line: bytes) -> None:
        """From what is asked to what came of it; a run that is cancelled has nobody who waits for it."""
        try:
            async with self._slots:
                if self._program.call is not None:
                    reply = await self._call_in_fork(self._program.call, line)
                else:
                    assert self._program.play is not None, "a program has one of both"
                    setup, mark = self._setup, partial(self._mark, number)
                    run = Run(setup.name, timeout_s=setup.timeout_s, setting=setup.setting, mark=mark)
                    reply = {"result": await self._program.play(asked, run, partial(self._judge, number))}
        except BaseException as error:  # SystemExit and CancelledError of the function's own, too
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            reply = {"error": msgspec.to_builtins(Fault.of(error))}
        try:
            self._say({"done": number, **reply})
        except ValueError as error:
            self._say({"done": number, "error": {"kind": FAILED, "cause": str(error)}})
        sys.stdout.flush()

    async def _judge(self, number: int, answer: str) -> float:
        question, waiting = next(self._numbers), asyncio.get_running_loop().create_future()
        self._judged[question] = waiting
        try:
            self._say({"judge": question, "run": number, "answer": answer})
            return float(await waiting)
        finally:
            self._judged.pop(question, None)

    def _say(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > LARGEST_LINE:
            raise ValueError(f"what it reports has {len(line)} bytes as JSON, and at most {LARGEST_LINE} are taken")
        self._writer.write(line)

    def _mark(self, number: int, is_running: bool) -> None:
        self._memory[:] = (number if is_running else 0).to_bytes(MARK_BYTES, "little")

    async def _call_in_fork(self, call: Call, asked: bytes) -> dict[str, Any]:
        """The reply of a process that has nothing else to do: an idle process, or a new one."""
        while self._idle and not self._idle[-1].is_alive:
            self._end(self._idle.pop())
        fork = self._idle.pop() if self._idle else await self._fork(call)
        timeout_s, is_kept, cause = self._setup.timeout_s, False, ""
        try:
            try:
                async with LiveTimeout(timeout_s + _GRACE_S):
                    line = await fork.ask(asked)
            except TimeoutError:
                return {"error": {"kind": LATE, "cause": f"no result within {timeout_s:g} s"}}
            except ValueError:
                return {"error": {"kind": FAILED, "cause": f"it reported more than {LARGEST_LINE} bytes as JSON"}}
            if line.endswith(b"\n"):
                try:
                    reply = dict(json.loads(line))
                except (RecursionError, TypeError, ValueError) as error:
                    return {"error": {"kind": FAILED, "cause": f"it reported no JSON: {error}"}}
                is_kept = reply.get("error", {}).get("kind") != LATE
                return {word: reply[word] for word in ("result", "error") if word in reply}
        finally:
            if is_kept:
                self._idle.append(fork)
            else:
                code = self._end(fork)
        cause = f"its process ended by itself, {ending(code)}"
        return {"error": {"kind": LOST if code == -signal.SIGKILL else FAILED, "cause": cause}}

    async def _fork(self, call: Call) -> "_Fork":
        tie, (ours, theirs) = die_with_parent(), socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours, limit=LARGEST_LINE)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()  # from here on without a pause: a process that nobody knows could not be ended
        if pid == 0:
            try:
                os.setpgid(0, 0)
                tie()
                for descriptor in (ours.fileno(), *(fork.descriptor for fork in self._forks)):
                    os.close(descriptor)
                _serve_fork(theirs, call, timeout_s=self._setup.timeout_s)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        with suppress(OSError):
            os.setpgid(pid, pid)  # by both: it may have to be killed before it has come to it
        self._forks.add(fork := _Fork(pid, reader, writer, ours.fileno()))
        return fork

    def _end(self, fork: "_Fork") -> int:
        self._forks.discard(fork)
        return fork.kill()


@dataclass(eq=False, slots=True)
class _Fork:
    """A forked process, and the connection to it."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    descriptor: int

    @property
    def is_alive(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    async def ask(self, line: bytes) -> bytes:
        """The line that it answers with; without its end if the process has ended."""
        with suppress(ConnectionError):
            self.writer.write(line)
            await self.writer.drain()
        try:
            return await self.reader.readline()
        except ConnectionError:
            return b""

    def kill(self) -> int:
        """Kill it with its group; how it ended, which may have been before."""
        self.writer.transport.abort()
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _serve_fork(channel: socket.socket, call: Call, *, timeout_s: float) -> None:
    """One run after the other, in the main thread, where signals are handled."""

    def say(reply: Mapping[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        channel.sendall(json.dumps(reply).encode() + b"\n")

    for line in channel.makefile("rb"):
        lock = threading.Lock()

        def tell(place: str, lock: threading.Lock = lock) -> None:
            """Where the main thread stands; the host then ends this process."""
            if lock.acquire(blocking=False):  # kept: the run has no other end
                say({"error": {"kind": LATE, "cause": f"no result within {timeout_s:g} s{place}"}})

        reply: dict[str, Any]
        try:
            with watched(timeout_s, tell):
                reply = {"result": call(json.loads(line))}
        except BaseException as error:
            reply = {"error": msgspec.to_builtins(Fault.of(error))}
        if not lock.acquire(blocking=False):
            threading.Event().wait()  # to be ended
        say(reply)


def ending(exit_code: int) -> str:
    """How a process ended, for people."""
    return f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def main(argument: str) -> None:
    """Serves the worker whose side of a connection the argument, a `Setup`, names."""
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):  # the worker says when; unlike SIG_IGN it is not left to programs
        signal.signal(number, lambda *_: None)
    setup = msgspec.json.decode(argument, type=Setup)
    if setup.parent:
        die_with_parent(parent=setup.parent)()
    channel = socket.socket(fileno=setup.channel)
    os.register_at_fork(after_in_child=lambda: os.close(setup.channel))  # what is forked does not speak for it
    failed = ""
    try:
        program: Program = load_callable(setup.program)(setup)
        if asks_for_sandbox(program.function) and not setup.is_hidden and (reason := why_no_sandbox()):
            failed = f"{setup.function} runs in a sandbox, and {socket.gethostname()} can make none: {reason}"
    except BaseException as error:
        failed = f"{setup.function} cannot be imported: {cause_of(error)}"
    with suppress(ConnectionError):
        if failed:
            channel.sendall(json.dumps({"failed": failed}).encode() + b"\n")
        else:
            asyncio.run(Host(program, setup).serve(channel))


def command(setup: Setup, path: Sequence[str]) -> list[str]:
    """Starts a host that finds modules where the worker does."""
    code = f"import os, sys; sys.path[:] = sys.argv[2:]; from {__name__} import main; main(sys.argv[1]); os._exit(0)"
    return own_python("-c", code, msgspec.json.encode(setup).decode(), *path)
