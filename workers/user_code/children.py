"""Children: the worker's side of all processes that run code of the user's (`host.py`), and environments.

    call ──► the process with the fewest runs ──result──► what came of it
                ├── the function failed, or was late ──► RunFailedError, with file and line
                └── it ends, or says nothing any more ──► killed with all that it has started, and another one started
                      ├── in a step of this run, and not by SIGKILL ──► RunFailedError: this run's fault
                      └── else ──► RunLostError: to be made again, which is no failure of it

They are started, read and ended in a thread of their own, so that a worker whose own loop stands still, or has several
after one another, blames no code of the user's. What they print goes to the worker's log, as much of it as a log can
bear. There is no other place in a worker that starts user code.
"""

import asyncio
import itertools
import json
import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from corral.workers.sandbox.hidden_secrets import HiddenSecrets, hide_secrets
from corral.workers.streams.closing import Closing, cancel
from corral.workers.streams.loop_thread import LoopThread
from corral.workers.user_code.blame import printable
from corral.workers.user_code.host import FAILED, LARGEST_LINE, LOST, MARK_BYTES, Ask, Fault, Setup, command, ending

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IMPORT_TIMEOUT_S = 120.0
_SILENT_BEATS = 3.0  # pauses between beats, beyond the function's own time, after which a process has no loop any more
_SILENCE_GRACE_S = 5.0
_LAST_WORDS_S = 1.0
_LEAVE_S = 10.0  # for a host to end what it has forked, which takes milliseconds
_MAX_STARTS = 3  # processes in a row that end or hang while they load; then the worker starts again
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What taking a message of any JSON may raise."""
_LOG_BYTES, _LOG_INTERVAL_S = 2**16, 10.0  # of what a process prints, the worker's log takes so much in so long


class RunFailedError(RuntimeError):
    """User code failed in a run; the text is one line, with file and line where they are known."""

    def __init__(self, text: str, *, kind: str = FAILED, traceback: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        """That of a `Fault`."""
        self.traceback = traceback


class RunLostError(RuntimeError):
    """The process of a run ended, and not in a step of it."""

    def __init__(self, text: str, *, by_another: bool) -> None:
        super().__init__(text)
        self.by_another = by_another
        """Whether it was in a step of another run; else nobody knows who is to blame."""


class HostError(RuntimeError):
    """No process can be started that runs the user's code; the worker has to start again."""

    def __init__(self, text: str, *, is_from_process: bool = False) -> None:
        super().__init__(text)
        self.is_from_process = is_from_process
        """Whether the process itself reported what failed, and no process before it had loaded the user's code: nothing
        but that is evidence against the code."""


@dataclass(frozen=True, slots=True)
class Started:
    """One process, about to be started."""

    command: Sequence[str]
    environment: Mapping[str, str] | None = None
    """None: the worker's own."""
    folder: Path | None = None
    """Where it works; None: where the worker does."""
    end: Callable[[], object] = lambda: None
    """Removes what it leaves, once it has ended."""


class Launch:
    """How the processes are started: a function of the user's, in this Python."""

    start_timeout_s = _IMPORT_TIMEOUT_S

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.name, self.timeout_s, self.beat_s = setup.name, setup.timeout_s, setup.beat_s

    def prepare(self, *, channel: int, mark: int, is_hidden: bool) -> Started:
        """The next process; the descriptors are inherited under their numbers.

        Args:
            is_hidden: whether secrets are hidden from it: it is in another process namespace, with which it ends.
        """
        parent = 0 if is_hidden else os.getpid()
        changes = {"parent": parent, "is_hidden": is_hidden, "channel": channel, "mark": mark}
        return Started(command(msgspec.structs.replace(self._setup, **changes), sys.path))

    def greet(self, ready: Mapping[str, Any]) -> None:
        """Look at what a process says of itself when it is ready."""


@dataclass(slots=True)
class _Run:
    kind: Any
    """Type of what it returns."""
    outcome: "asyncio.Future[Any]"
    judge: Ask | None


@dataclass(eq=False, slots=True)
class _Process:
    """One host that is up."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    mark: mmap.mmap
    started: Started
    secrets: HiddenSecrets
    _: KW_ONLY
    silence_s: float
    forks: bool = False
    """Whether it has forked processes, which it ends itself."""
    runs: dict[int, _Run] = field(default_factory=dict)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    is_ended: bool = False

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(task := asyncio.create_task(coroutine))
        task.add_done_callback(self.tasks.discard)

    async def say(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > LARGEST_LINE:
            raise RunFailedError(f"its task has {len(line)} bytes as JSON, and at most {LARGEST_LINE} are sent")
        with suppress(ConnectionError):  # who waits for an answer hears of the end of the process
            self.writer.write(line)
            await self.writer.drain()

    async def read(self) -> str:
        """Take in what it says, until it ends; why it has to be ended, "" if it ended by itself."""
        silent = 0
        while True:
            try:
                async with asyncio.timeout(self.silence_s):
                    line = await self.reader.readline()
            except TimeoutError:
                silent += 1  # once may be this worker's own standing still
                if silent == 2:
                    return f"its event loop stood still for {2 * self.silence_s:g} s, and could not be interrupted"
                continue
            except ConnectionError:
                return ""
            except ValueError:
                return f"it wrote a message of more than {LARGEST_LINE} bytes"
            if not line:
                return ""
            silent = 0
            try:
                self._take(json.loads(line))
            except (*_UNREADABLE, msgspec.ValidationError) as error:
                return f"it said what no process of user code says: {error}"

    def _take(self, message: dict[str, Any]) -> None:
        run = self.runs.get(int(message.get("done", message.get("run", 0))))
        if run is None or run.outcome.done():
            return
        if "judge" in message:
            if run.judge is None:
                raise ValueError("it asks for a reward, and has none")
            self.start(self._judge(run, run.judge, int(message["judge"]), printable(str(message["answer"]))))
        elif "error" in message:
            fault = msgspec.convert(message["error"], Fault)
            cause, trace = printable(fault.cause), printable(fault.traceback)
            lost, failed = (
                RunLostError(cause, by_another=False),
                RunFailedError(cause, kind=fault.kind, traceback=trace),
            )
            run.outcome.set_exception(lost if fault.kind == LOST else failed)
        else:
            run.outcome.set_result(msgspec.convert(message["result"], run.kind))

    async def _judge(self, run: _Run, judge: Ask, number: int, answer: str) -> None:
        try:
            reply: dict[str, Any] = {"judged": number, "reward": await judge(answer)}
        except RunFailedError as error:
            reply = {"judged": number, "error": str(error)}
        except Exception as error:  # not the function's own: the caller of the run must handle it
            if not run.outcome.done():
                run.outcome.set_exception(error)
            return
        await self.say(reply)

    async def pass_output_on(self, name: str) -> None:
        """To the log: so much at a time, and of the rest how much it was."""
        assert self.process.stdout is not None
        loop, since, left, lost = asyncio.get_running_loop(), 0.0, 0, 0
        while text := await self.process.stdout.read(_LOG_BYTES):
            if loop.time() - since >= _LOG_INTERVAL_S:
                if lost:
                    logger.info("%s printed %d bytes more", name, lost)
                since, left, lost = loop.time(), _LOG_BYTES, 0
            shown, left = text[:left], max(left - len(text), 0)
            lost += len(text) - len(shown)
            if shown:
                logger.info("%s printed:\n%s", name, shown.decode(errors="replace").rstrip())
        if lost:
            logger.info("%s printed %d bytes more", name, lost)

    async def end(self) -> int:
        """Kill it with all that it has started; its exit code, below 0 a signal, which may be from before."""
        self.is_ended = True
        self.writer.transport.abort()
        if self.forks:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self.process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.secrets.exit_code(await self.process.wait())
        for task in self.tasks - {asyncio.current_task()}:
            task.cancel()
        await asyncio.to_thread(self.started.end)
        return code


class Children(Closing):
    """The processes of one function, or environment; each is started when it is needed, or by `start`.

    Example:
        with Children(Launch(setup), hidden=[trial.secrets_path], number=2) as children:
            done = await children.call({"task": task, "endpoint": address, "key": key}, Done, judge=judge)
    """

    def __init__(self, launch: Launch, *, hidden: Sequence[Path], number: int = 1) -> None:
        """
        Args:
            hidden: folders that user code does not see.
            number: processes at most, besides those that they fork.
        """
        self.name = launch.name
        self._launch = launch
        self._number, self._hidden = number, tuple(hidden)
        self._processes: list[_Process] = []
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._watches: set[asyncio.Task[None]] = set()
        self._ready: Mapping[str, Any] | None = None
        self._is_closed = False
        self._thread = LoopThread(f"children of {launch.name}")

    def start(self) -> Mapping[str, Any]:
        """Have the program loaded, unless it was; what it says of itself.

        Raises:
            HostError: if it cannot be.
        """
        if self._ready is None:
            deadline_s = (_MAX_STARTS + 1) * (self._launch.start_timeout_s + _LEAVE_S)
            self._thread.wait(self._least_loaded(), deadline_s=deadline_s)
        assert self._ready is not None
        return self._ready

    def close(self) -> None:
        """End all of them; calls under way are cancelled, as nothing came of them."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.wait(self._end_all(), deadline_s=2 * _LEAVE_S)
            self._thread.close()

    async def call(self, asked: Mapping[str, Any], kind: type[T], *, judge: Ask | None = None) -> T:
        """What comes of one run. May be called from any event loop.

        Args:
            asked: what the program makes a run of; it goes into JSON.
            kind: type of what it returns.
            judge: asks the trial's reward about a text, in the caller's loop; it raises RunFailedError if it cannot.

        Raises:
            RunFailedError: if the user's code fails, by whatever it does.
            RunLostError: if its process ended through no fault of it.
            HostError: if no process can be started.
        """
        if self._is_closed:
            raise asyncio.CancelledError
        loop = asyncio.get_running_loop()

        async def ask(text: str) -> float:
            assert judge is not None
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(judge(text), loop))

        return await self._thread.run(self._call(asked, kind, ask if judge else None))

    async def _call(self, asked: Mapping[str, Any], kind: type[T], judge: Ask | None) -> T:
        process, number = await self._least_loaded(), next(self._numbers)
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        process.runs[number] = _Run(kind, outcome, judge)
        try:
            await process.say({"run": number, **asked})
            return await outcome
        finally:
            del process.runs[number]
            if (outcome.cancelled() or not outcome.done()) and not process.is_ended:
                process.start(process.say({"cancel": number}))

    async def _least_loaded(self) -> _Process:
        async with self._starting:
            if not self._processes or (
                len(self._processes) < self._number and all(process.runs for process in self._processes)
            ):
                await self._add()
        return min(self._processes, key=lambda process: len(process.runs))

    async def _add(self) -> None:
        """Start a process, and wait until it has loaded what runs; a signal or a deadline is a reason to try again."""
        name, cause, num_lost = self.name, "", 0
        while num_lost < _MAX_STARTS:
            process, first, cause, is_up, makes_sandboxes = await self._start(), {}, "", False, False
            process.start(process.pass_output_on(f"{name}, process {process.process.pid},"))
            try:
                async with asyncio.timeout(self._launch.start_timeout_s):
                    first = dict(json.loads(await process.reader.readline() or "{}"))
                makes_sandboxes = bool(first.get("ready", {}).get("needs_sandbox"))
                is_up = "ready" in first and not (makes_sandboxes and process.secrets.hidden)
            except TimeoutError:
                cause = f"said nothing within {self._launch.start_timeout_s:.0f} s"
            except (ConnectionError, *_UNREADABLE) as error:
                cause = f"said no word that is known: {error!r}"
            finally:
                code = 0 if is_up else await process.end()
            if is_up:
                ready = first["ready"]
                if ready.get("forks"):  # its loop runs no code of the user's
                    process.forks, process.silence_s = True, process.silence_s - self._launch.timeout_s
                self._ready = ready
                self._launch.greet(ready)
                self._processes.append(process)
                self._watches.add(watch := asyncio.create_task(self._watch(process)))
                watch.add_done_callback(self._watches.discard)
                return
            if "failed" in first:
                raise HostError(str(first["failed"]), is_from_process=self._ready is None)
            if makes_sandboxes:
                self._hidden = ()  # where secrets are hidden it could make none
                continue
            num_lost += 1
            cause = cause or f"ended, {ending(code)}"
            logger.warning("the process that loads %s %s (%d of %d starts)", name, cause, num_lost, _MAX_STARTS)
        raise HostError(f"{_MAX_STARTS} processes in a row did not load {name}: the last one {cause}")

    async def _start(self) -> _Process:
        ours, theirs = socket.socketpair()
        mark = os.memfd_create("corral-mark")
        os.truncate(mark, MARK_BYTES)
        secrets = hide_secrets(*self._hidden)
        with theirs, os.fdopen(mark, "rb+", closefd=True):
            started = self._launch.prepare(channel=theirs.fileno(), mark=mark, is_hidden=bool(secrets.hidden))
            process = await asyncio.create_subprocess_exec(
                *secrets.around(started.command),
                env=started.environment,
                cwd=started.folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[theirs.fileno(), mark],
                start_new_session=True,  # it is ended with whatever it has started
            )
            memory = mmap.mmap(mark, MARK_BYTES)
        reader, writer = await asyncio.open_connection(sock=ours, limit=LARGEST_LINE)
        silence_s = self._launch.timeout_s + _SILENT_BEATS * self._launch.beat_s + _SILENCE_GRACE_S
        return _Process(process, reader, writer, memory, started, secrets, silence_s=silence_s)

    async def _watch(self, process: _Process) -> None:
        """Until it ends; then everybody who waits for it hears why."""
        reading = asyncio.create_task(process.read())
        leaving = asyncio.create_task(process.process.wait())  # what it has forked may keep the connection open
        try:
            await asyncio.wait([reading, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not (reading.done() and reading.result()):
                # What it said last is still on its way, or how it ended: one comes before the other.
                await asyncio.wait([reading, leaving], timeout=_LAST_WORDS_S)
        finally:
            leaving.cancel()
            reading.cancel()
        why = reading.result() if reading.done() and not reading.cancelled() else ""
        culprit = int.from_bytes(process.mark[:], "little")
        self._processes.remove(process)
        code = await process.end()
        cause = why or f"its process ended by itself, {ending(code)}"
        name, pid = self.name, process.process.pid
        logger.warning("%s, process %d with %d runs: %s", name, pid, len(process.runs), cause)
        is_proven = bool(why) or code != -signal.SIGKILL  # SIGKILL may be the kernel's for memory, or a person's
        for number, run in process.runs.items():
            if not run.outcome.done():
                is_by_another = culprit in process.runs and number != culprit
                failed, lost = RunFailedError(cause), RunLostError(cause, by_another=is_by_another)
                run.outcome.set_exception(failed if number == culprit and is_proven else lost)

    async def _end_all(self) -> None:
        await cancel(*self._watches)
        for process in self._processes:
            process.is_ended = True
            for run in process.runs.values():
                run.outcome.cancel()
        await asyncio.gather(*(process.end() for process in self._processes))
