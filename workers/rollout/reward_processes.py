"""RewardProcesses: the worker's side of the processes that a reward runs in (`workers/user_code/reward_host.py`).

    call ──► an idle process, else a new one ──Outcome──► idle again
                         └── dead, hung, or nobody waits any more ──► ended; the next call has another one

A plain reward has a process to itself while it runs; an async one shares a process with all other calls.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from corral.experiments.config.rollout import RewardPart
from corral.workers.sandbox.curtain import Curtain, draw_curtain
from corral.workers.streams.live_timeout import LiveTimeout
from corral.workers.user_code.reward_host import Call, Form, Outcome, command

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IMPORT_TIMEOUT_S = 120.0
_HOST_TIMEOUT_S = 30.0  # it answers in milliseconds
_LAST_WORDS_S = 5.0  # between the end of its connection and its own
_MAX_STARTS = 3  # hosts in a row that end or hang while they import; then the worker starts again
_LARGEST_REPLY = 2**26  # bytes of an outcome
_GRACE_S = 2.0  # after a call's deadline, for its process to say where it stands
_MAX_AWAITED = 256  # calls of an async reward at a time
_DEFAULT_PROCESSES = range(4, 17)


class RewardHostError(RuntimeError):
    """The process that rewards are forked from cannot go on; the worker has to start again."""


@dataclass(eq=False, slots=True)
class _Process:
    pid: int
    channel: socket.socket
    host: socket.socket
    """To the process that it was forked from."""
    is_ended: bool = False

    @property
    def is_alive(self) -> bool:
        try:
            return self.channel.recv(1, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:  # it ended, and left a call unread
            return False


class RewardProcesses:
    """At most `number` of them, None as many as there are CPUs, but 4 to 16; each is started when it is needed."""

    def __init__(self, part: RewardPart, *, number: int | None, curtain: Curtain) -> None:
        cpus = min(max(len(os.sched_getaffinity(0)), _DEFAULT_PROCESSES[0]), _DEFAULT_PROCESSES[-1])
        self._part = part
        self._number = number or cpus
        self._curtain = curtain
        self._host: socket.socket | None = None
        self._idle: list[_Process] = []
        self._places: asyncio.Semaphore | None = None
        self._places_of: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def start(self) -> Form:
        """Have the reward imported, unless it is.

        Raises:
            RewardHostError: if it cannot be.
        """
        num_lost = 0
        while self._host is None:
            try:
                self._form = self._start()
            except RewardHostError as error:
                num_lost += 1
                self._kill_host()
                if num_lost == _MAX_STARTS:
                    raise
                logger.warning("%s: it is started again", error)
                continue
            if self._form.needs_sandbox and self._curtain.hidden:  # behind which there are none
                self._end_host()
                self._curtain = draw_curtain(())
        if self._form.error:
            raise RewardHostError(self._form.error)
        return self._form

    def close(self) -> None:
        """End all of them; calls under way are cancelled, as nothing was judged."""
        self._is_closed = True
        self._end_host()

    def _start(self) -> Form:
        self._host, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        part, is_hidden = self._part, bool(self._curtain.hidden)
        host = command(part.function, theirs.fileno(), sys.path, settings=part.settings, is_hidden=is_hidden)
        with theirs:
            self._process = subprocess.Popen(
                self._curtain.around(host), stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0
            )
        self._host.settimeout(_IMPORT_TIMEOUT_S)
        form = self._answer(Form)
        self._host.settimeout(_HOST_TIMEOUT_S)
        return form

    def _end_host(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None
            try:
                self._process.wait(_HOST_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def _kill_host(self) -> None:
        """One that ended, or does not answer, with all that was forked from it: the next call starts another."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in self._idle:
            process.is_ended = True
            process.channel.close()
        self._idle.clear()
        self._end_host()

    async def call(self, call: Call) -> Outcome:
        """What comes of a call, whose deadline begins when a process takes it up.

        Raises:
            RewardHostError: if no process can be started.
        """
        while True:
            async with self._place():  # without a deadline: every call before it has one
                if self._is_closed:
                    raise asyncio.CancelledError
                if (outcome := await self._call(self._take(), call)) is not None:
                    return outcome

    def _place(self) -> asyncio.Semaphore:
        if self._places is None or self._places_of is not asyncio.get_running_loop():  # an evaluation has several
            number = _MAX_AWAITED if self.start().is_async else self._number
            self._places = asyncio.Semaphore(self._part.concurrency or number)
            self._places_of = asyncio.get_running_loop()
        return self._places

    async def _call(self, process: _Process, call: Call) -> Outcome | None:
        """What came of it; None if another call was why the process was ended, so that this one is made again."""
        outcome: Outcome | None = None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + call.timeout_s
        try:
            with suppress(TimeoutError, OSError, msgspec.DecodeError):
                async with LiveTimeout(call.timeout_s + _GRACE_S):
                    outcome = await _exchange(process.channel, call)
        except asyncio.CancelledError:
            # An async call that nobody waits for any more goes on beside the others, until its deadline.
            if not self._is_closed and not self._form.is_async:
                self._end(process)
            raise
        if self._is_closed:
            raise asyncio.CancelledError
        is_late = loop.time() >= deadline
        if outcome is None and process.is_ended and not is_late:
            return None
        if outcome is None or outcome.is_stuck:
            code = self._end(process)
            cause = (
                f"no result within {call.timeout_s:g} s" if is_late else f"its process ended by itself, {ending(code)}"
            )
            return outcome or Outcome(cause=cause, is_killed=not is_late and code == -signal.SIGKILL)
        if not self._form.is_async:
            self._idle.append(process)
        return outcome

    def _take(self) -> _Process:
        while self._idle:
            process = self._idle[-1] if self._form.is_async else self._idle.pop()
            if process.is_alive:
                return process
            self._end(process)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._ask(b"fork", int, theirs)
            except RewardHostError as error:
                logger.warning("%s: it is started again", error)
                self._kill_host()
                self.start()
                pid = self._ask(b"fork", int, theirs)
        assert self._host is not None
        process = _Process(pid, ours, self._host)
        if self._form.is_async:
            self._idle.append(process)
        return process

    def _end(self, process: _Process) -> int:
        """Kill it, and say how it ended, which may have been before."""
        if process.is_ended:
            return 0
        process.is_ended = True
        if process in self._idle:
            self._idle.remove(process)
        process.channel.close()
        if process.host is self._host:
            with suppress(RewardHostError):  # the next call finds out that the host is gone
                return self._ask(msgspec.msgpack.encode(process.pid), int)
        return -signal.SIGKILL  # it ended with its host

    def _ask(self, word: bytes, kind: type[T], *sockets: socket.socket) -> T:
        assert self._host is not None, "start() comes first"
        try:
            socket.send_fds(self._host, [word], [each.fileno() for each in sockets])
        except OSError as error:
            raise RewardHostError(f"the process that {self._part.function} is forked from is gone: {error}") from error
        return self._answer(kind)

    def _answer(self, kind: type[T]) -> T:
        assert self._host is not None, "start() comes first"
        try:
            answer = self._host.recv(1 << 16)
        except OSError as error:
            raise RewardHostError(f"the process that imports {self._part.function} does not answer: {error}") from error
        if not answer:
            try:
                how = ending(self._curtain.exit_code(self._process.wait(_LAST_WORDS_S)))
            except subprocess.TimeoutExpired:
                how = "and has closed its connection before"
            raise RewardHostError(f"the process that imports {self._part.function} has ended, {how}")
        try:
            return msgspec.msgpack.decode(answer, type=kind)
        except msgspec.MsgspecError as error:
            raise RewardHostError(
                f"the process that imports {self._part.function} says no known word: {error}"
            ) from error


async def _exchange(channel: socket.socket, call: Call) -> Outcome | None:
    """One call on a connection of its own; None if its process has ended."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            socket.send_fds(channel, [b"c"], [theirs.fileno()])
        ours.setblocking(False)
        await loop.sock_sendall(ours, msgspec.msgpack.encode(call))
        ours.shutdown(socket.SHUT_WR)
        reply = b""
        while len(reply) <= _LARGEST_REPLY and (piece := await loop.sock_recv(ours, 1 << 16)):
            reply += piece
    return msgspec.msgpack.decode(reply, type=Outcome) if reply else None


def ending(exit_code: int) -> str:
    """How a process ended, for people."""
    return f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
