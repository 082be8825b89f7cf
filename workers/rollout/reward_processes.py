"""RewardProcesses: the worker's side of the processes that a reward runs in (`workers/user_code/reward_host.py`).

    call ──► an idle process, else a new one ──Outcome──► idle again
                         └── dead, hung, or nobody waits any more ──► ended; the next call has another one

A plain reward has a process to itself while it runs; an async one shares a process with all other calls.
"""

import asyncio
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
from corral.workers.user_code.reward_host import Call, Form, Outcome, command

T = TypeVar("T")

_IMPORT_TIMEOUT_S = 120.0
_HOST_TIMEOUT_S = 30.0  # it answers in milliseconds
_GRACE_S = 2.0  # after a call's deadline, for its process to say where it stands
_MAX_AWAITED = 256  # calls of an async reward at a time
_DEFAULT_PROCESSES = range(4, 17)


class RewardHostError(RuntimeError):
    """The process that rewards are forked from cannot go on; the worker has to start again."""


class _EndedByOthersError(Exception):
    """Another call was why the process was ended: this one is made again."""


@dataclass(eq=False, slots=True)
class _Process:
    pid: int
    channel: socket.socket
    is_ended: bool = False

    @property
    def is_alive(self) -> bool:
        with suppress(BlockingIOError):
            return self.channel.recv(1, socket.MSG_DONTWAIT) != b""
        return True


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
        if self._host is None:
            self._form = self._start()
            if self._form.needs_sandbox and self._curtain.hidden:  # behind which there are none
                self._end_host()
                self._curtain = draw_curtain(())
                self._form = self._start()
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
            try:
                self._process.wait(_HOST_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    async def call(self, call: Call) -> Outcome:
        """What comes of a call, whose deadline begins when a process takes it up.

        Raises:
            RewardHostError: if no process can be started.
        """
        while True:
            async with self._place():  # without a deadline: every call before it has one
                if self._is_closed:
                    raise asyncio.CancelledError
                with suppress(_EndedByOthersError):
                    return await self._call(self._take(), call)

    def _place(self) -> asyncio.Semaphore:
        if self._places is None or self._places_of is not asyncio.get_running_loop():  # an evaluation has several
            number = _MAX_AWAITED if self.start().is_async else self._number
            self._places = asyncio.Semaphore(self._part.concurrency or number)
            self._places_of = asyncio.get_running_loop()
        return self._places

    async def _call(self, process: _Process, call: Call) -> Outcome:
        outcome, is_over = None, False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + call.timeout_s
        try:
            with suppress(TimeoutError, OSError):
                async with asyncio.timeout_at(deadline + _GRACE_S):
                    outcome = await _exchange(process.channel, call)
            is_over = True
        finally:
            if self._is_closed:
                raise asyncio.CancelledError
            if outcome is None and process.is_ended and loop.time() < deadline:
                raise _EndedByOthersError
            # An async call that nobody waits for any more goes on beside the others, until its deadline.
            if (outcome is None or outcome.is_stuck) and (is_over or not self._form.is_async):
                how = self._end(process)
            elif not self._form.is_async:
                self._idle.append(process)
        if outcome is not None:
            return outcome
        if loop.time() >= deadline:
            return Outcome(cause=f"no result within {call.timeout_s:g} s")
        return Outcome(cause=f"its process ended by itself, {_ending(how)}")

    def _take(self) -> _Process:
        while self._idle:
            process = self._idle[-1] if self._form.is_async else self._idle.pop()
            if process.is_alive:
                return process
            self._end(process)
        ours, theirs = socket.socketpair()
        with theirs:
            process = _Process(self._ask(b"fork", int, theirs), ours)
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
        return self._ask(msgspec.msgpack.encode(process.pid), int)

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
            ending = _ending(self._curtain.exit_code(self._process.wait(_HOST_TIMEOUT_S)))
            raise RewardHostError(f"the process that imports {self._part.function} has ended, {ending}")
        return msgspec.msgpack.decode(answer, type=kind)


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
        while piece := await loop.sock_recv(ours, 1 << 16):
            reply += piece
    return msgspec.msgpack.decode(reply, type=Outcome) if reply else None


def _ending(exit_code: int) -> str:
    return f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
