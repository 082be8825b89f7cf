"""AgentProcesses: the worker's side of the processes that agents and environments run in (`Program`).

    play ──► the process with the fewest runs ──Done──► what came of it
                └── it ends, or says nothing any more ──► killed with all that it has started, and another one started
                      ├── in a step of this run, and not by SIGKILL ──► AgentFailedError: this one's fault
                      └── else ──► EpisodeLostError: to be played again, which is no failure of it

What they print goes to the worker's log, as much of it as a log can bear.
"""

import asyncio
import itertools
import json
import logging
import mmap
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import msgspec

from corral.workers.lifecycle.worker import UserCodeError
from corral.workers.rollout.programs import Program, Started
from corral.workers.rollout.reward_processes import ending
from corral.workers.streams.closing import cancel
from corral.workers.user_code.agent_host import LARGEST_LINE, MARK_BYTES, Done
from corral.workers.user_code.blame import LONGEST_NAME, printable

logger = logging.getLogger(__name__)

_SILENT_BEATS = 3.0  # pauses between beats, beyond the agent's own time, after which a process has no loop any more
_SILENCE_GRACE_S = 5.0
_LAST_WORDS_S = 1.0
_MAX_STARTS = 3  # processes in a row that end or hang while they load; then the worker starts again
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What taking a message of any JSON may raise."""
_LOG_BYTES, _LOG_INTERVAL_S = 2**16, 10.0  # of what a process prints, the worker's log takes so much in so long


class AgentFailedError(RuntimeError):
    """An agent failed in an episode; the text is one line, with file and line where they are known."""

    def __init__(self, text: str, *, kind: str = "agent_error", traceback: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        """agent_error, reward_error or request_refused."""
        self.traceback = traceback


class EpisodeLostError(RuntimeError):
    """The process of an episode ended, and not in a step of it."""

    def __init__(self, text: str, *, by_another: bool) -> None:
        super().__init__(text)
        self.by_another = by_another
        """Whether it was in a step of another one; else nobody knows who is to blame."""


class AgentHostError(RuntimeError):
    """No process can be started that plays; the worker has to start again."""

    def __init__(self, text: str, *, is_said: bool = False) -> None:
        super().__init__(text)
        self.is_said = is_said
        """Whether the process itself reported what failed: nothing but that is evidence against the user's code."""


Judge = Callable[[str], Awaitable[float]]
"""What the trial's reward says of a text; AgentFailedError if it fails at it, or judges groups only."""


@dataclass(slots=True)
class _Run:
    outcome: "asyncio.Future[Done]"
    judge: Judge


@dataclass(eq=False, slots=True)
class _Process:
    """One host that is up."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    mark: mmap.mmap
    started: Started
    _: KW_ONLY
    silence_s: float
    runs: dict[int, _Run] = field(default_factory=dict)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    is_ended: bool = False

    def start(self, coroutine: Any) -> None:
        self.tasks.add(task := asyncio.create_task(coroutine))
        task.add_done_callback(self.tasks.discard)

    async def say(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > LARGEST_LINE:
            raise AgentFailedError(f"its task has {len(line)} bytes as JSON, and at most {LARGEST_LINE} are sent")
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
                return f"it said what no agent's process says: {error}"

    def _take(self, message: dict[str, Any]) -> None:
        if "done" in message:
            done = msgspec.convert(message, Done)
            done.ended, done.error = printable(done.ended[:LONGEST_NAME]), done.error and done.error.printable()
            done.metrics = {printable(name[:LONGEST_NAME]): number for name, number in done.metrics.items()}
            run = self.runs.pop(done.done, None)
            if run is not None and not run.outcome.done():
                run.outcome.set_result(done)
        elif "judge" in message and (run := self.runs.get(message["run"])) is not None:
            self.start(self._judge(run, int(message["judge"]), printable(str(message["answer"]))))

    async def _judge(self, run: _Run, call: int, answer: str) -> None:
        try:
            reply: dict[str, Any] = {"judged": call, "reward": await run.judge(answer)}
        except AgentFailedError as error:
            reply = {"judged": call, "error": str(error)}
        except Exception as error:  # not the agent's: whoever waits for the episode has to answer it
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
        self.writer.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.started.curtain.exit_code(await self.process.wait())
        for task in self.tasks - {asyncio.current_task()}:
            task.cancel()
        await asyncio.to_thread(self.started.end)
        return code


class AgentProcesses:
    """The processes of one program; each is started when it is needed first, but for the first one.

    Example:
        async with AgentProcesses(AgentProgram("my_agents:solve", ...), timeout_s=300.0, number=2) as processes:
            done = await processes.play(task, endpoint=address, key=key, judge=judge)
    """

    def __init__(self, program: Program, *, timeout_s: float, number: int, has_played: bool = False) -> None:
        """
        Args:
            has_played: whether the program has played episodes of this trial before, so that it can be loaded.
            timeout_s: `rollout.agent_timeout_s`.
            number: processes at most.
        """
        self.program = program
        self._timeout_s, self._number, self._has_played = timeout_s, number, has_played
        self._processes: list[_Process] = []
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._watches: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "AgentProcesses":
        try:
            await self._add()
        except AgentHostError as error:
            if error.is_said and not self._has_played:
                raise UserCodeError(str(error)) from error
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await cancel(*self._watches)
        for process in self._processes:
            await process.end()

    async def play(self, task: Mapping[str, Any], *, endpoint: Mapping[str, str], key: str, judge: Judge) -> Done:
        """What comes of one episode.

        Args:
            task: the fields of a `Task`.
            endpoint: the model's: `unix`, the path of its socket, and `url`.
            key: what opens it for this episode.
            judge: asks the trial's reward about a text.

        Raises:
            AgentFailedError: if the agent fails, by whatever it does.
            EpisodeLostError: if its process ended through no fault of it.
            AgentHostError: if no process can be started.
        """
        process, number = await self._least_loaded(), next(self._numbers)
        outcome: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        process.runs[number] = _Run(outcome, judge)
        try:
            await process.say({"run": number, "task": dict(task), "endpoint": dict(endpoint), "key": key})
            done = await outcome
        finally:
            if process.runs.pop(number, None) is not None and not process.is_ended:
                process.start(process.say({"cancel": number}))
        if done.error is not None:
            raise AgentFailedError(done.error.cause, kind=done.error.kind, traceback=done.error.traceback)
        return done

    async def _least_loaded(self) -> _Process:
        async with self._starting:
            if not self._processes or (
                len(self._processes) < self._number and all(process.runs for process in self._processes)
            ):
                await self._add()
        return min(self._processes, key=lambda process: len(process.runs))

    async def _add(self) -> None:
        """Start a process, and wait until it has loaded what plays; a signal or a deadline is a reason to try again."""
        name, cause, num_lost = self.program.name, "", 0
        while num_lost < _MAX_STARTS:
            process, cause = await self._start(), ""
            process.start(process.pass_output_on(f"{name}, process {process.process.pid},"))
            try:
                async with asyncio.timeout(self.program.start_timeout_s):
                    first = dict(json.loads(await process.reader.readline() or "{}"))
            except TimeoutError:
                first, cause = {}, f"said nothing within {self.program.start_timeout_s:.0f} s"
            except (ConnectionError, *_UNREADABLE) as error:
                first, cause = {}, f"said no word that is known: {error!r}"
            if "ready" in first and self.program.greet(first["ready"]):
                self._processes.append(process)
                self._watches.add(watch := asyncio.create_task(self._watch(process)))
                watch.add_done_callback(self._watches.discard)
                return
            code = await process.end()
            if "failed" in first:
                raise AgentHostError(str(first["failed"]), is_said=True)
            if "ready" not in first:
                num_lost += 1
                cause = cause or f"ended, {ending(code)}"
                logger.warning("the process that loads %s %s (%d of %d starts)", name, cause, num_lost, _MAX_STARTS)
        raise AgentHostError(f"{_MAX_STARTS} processes in a row did not load {name}: the last one {cause}")

    async def _start(self) -> _Process:
        ours, theirs = socket.socketpair()
        mark = os.memfd_create("corral-agent")
        os.truncate(mark, MARK_BYTES)
        started = self.program.prepare(theirs.fileno(), mark)
        with theirs, os.fdopen(mark, "rb+", closefd=True):
            process = await asyncio.create_subprocess_exec(
                *started.curtain.around(started.command),
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
        silence_s = self._timeout_s + _SILENT_BEATS * self.program.beat_s + _SILENCE_GRACE_S
        return _Process(process, reader, writer, memory, started, silence_s=silence_s)

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
        name, pid = self.program.name, process.process.pid
        logger.warning("%s, process %d with %d episodes: %s", name, pid, len(process.runs), cause)
        is_proven = bool(why) or code != -signal.SIGKILL  # SIGKILL may be the kernel's for memory, or a person's
        for number, run in process.runs.items():
            if not run.outcome.done():
                is_by_another = culprit in process.runs and number != culprit
                failed, lost = AgentFailedError(cause), EpisodeLostError(cause, by_another=is_by_another)
                run.outcome.set_exception(failed if number == culprit and is_proven else lost)
        process.runs.clear()
