"""One run in a sandbox, from bwrap's start until all that it started is gone.

    bwrap ──status: process 1──► look every 50 ms ──too much──┐
      │                                deadline, end() ───────┴──SIGKILL──► process 1, and with it its namespace
      ├──output: the gate's line ──► go ahead;  then kept up to the limit, and dropped
      └──status: exit code──► Result           none, and nobody ended it: SandboxError

The command waits at a gate until bwrap has made everything, and each of its processes is tied to the one before. If
this process is killed earlier, the command never begins; what bwrap has left half made is the holder's to end.
"""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from corral.workers.sandbox.base import Limits, Result, SandboxError
from corral.workers.sandbox.seccomp import compiled_filter
from corral.workers.sandbox.watch import look

START_TIMEOUT_S = 30.0  # of what takes milliseconds
END_TIMEOUT_S = 30.0  # after SIGKILL; a process that waits for a dead disk ends when that answers
_LOOK_INTERVAL_S = 0.05
_PIECE_BYTES = 1 << 16
_SAID_BYTES = 500
GATE = ("/bin/sh", "-c", 'echo && read -r _ && exec "$@"', "sandbox")
"""In the sandbox, before the command: it prints an empty line, and reads no more than one."""
# What process 1 of a sandbox was started with can be read there.
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}

_Cause = Literal["", "time", "memory", "processes", "closed"]


async def start_process(
    command: Sequence[str], *, group: int, descriptors: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """A process with pipes for all that it says and hears, and nothing of this one's environment.

    Args:
        group: of processes, that it joins; 0 is one of its own.

    Raises:
        SandboxError: if there is no such program.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            pass_fds=descriptors,
            env=_ENVIRONMENT,
            process_group=group,
        )
    except OSError as error:
        raise SandboxError(f"{command[0]} cannot be started: {error.strerror}") from error


def kill(process: asyncio.subprocess.Process) -> None:
    """SIGKILL. Not by the process's own method, which may take the exit code from whom asyncio lets wait for it."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def shown(said: bytes) -> str:
    """What a program has complained of, for an error's message."""
    return said.decode(errors="replace").strip()[-_SAID_BYTES:] or "it said nothing"


class Run:
    """A command that is ended by a limit, by `end()`, or by itself."""

    def __init__(self, limits: Limits, *, group: int) -> None:
        """
        Args:
            group: the processes that the holder ends at its end.
        """
        self._limits = limits
        self._group = group
        self._kernel_kills = _kernel_kills()
        self._init: tuple[int, int] | None = None
        self._is_told = asyncio.Event()
        self._has_begun = asyncio.Event()
        self._cause: _Cause = ""

    async def result(self, command: Callable[[int, int], Sequence[str]], *, stdin: bytes, timeout_s: float) -> Result:
        """What comes of it. Not to be cancelled: `end()` ends it.

        Args:
            command: bwrap's command line, with a GATE in it, from the descriptors of its status and its filter.

        Raises:
            SandboxError: if it did not begin, or something else than it and its limits ended it.
        """
        process, status = await self._start(command)
        outputs = asyncio.ensure_future(self._communicate(process, stdin))
        watch = asyncio.ensure_future(self._watch(status))
        try:
            done, _ = await asyncio.wait([outputs], timeout=timeout_s)
            if not done:
                self.end("time")
                done, _ = await asyncio.wait([outputs], timeout=END_TIMEOUT_S)
            if not done:
                kill(process)
                outputs.cancel()
                raise SandboxError(f"processes of a sandbox did not end within {END_TIMEOUT_S:g} s of SIGKILL")
        finally:
            watch.cancel()
            if self._init is not None:
                os.close(self._init[1])
                self._init = None
        return self._judge(*outputs.result(), (await status.read()).splitlines())

    def end(self, cause: _Cause) -> None:
        """SIGKILL for all of it, at once or as soon as it can be: bwrap, if it is killed before it has told the number
        of process 1, leaves a process that waits for it.
        """
        self._cause = self._cause or cause
        if self._init is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init[1], signal.SIGKILL)

    async def _start(
        self, command: Callable[[int, int], Sequence[str]]
    ) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        status, status_end = os.pipe()
        filter_end, filled = os.pipe()
        try:
            with os.fdopen(filled, "wb") as file:
                file.write(compiled_filter())
            reader = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(status, "rb", buffering=0)
            )
            descriptors = status_end, filter_end
            return await start_process(command(*descriptors), group=self._group, descriptors=descriptors), reader
        finally:
            os.close(status_end)
            os.close(filter_end)

    async def _communicate(self, process: asyncio.subprocess.Process, stdin: bytes) -> "tuple[_Kept, _Kept]":
        assert process.stdin and process.stdout and process.stderr, "it was started with pipes"
        kept = _Kept(self._limits.output_bytes), _Kept(self._limits.output_bytes)
        await asyncio.gather(
            self._feed(process.stdin, stdin),
            self._hear(process.stdout, kept[0]),
            kept[1].read(process.stderr),
            process.wait(),
        )
        if self._init is not None:
            await _ended(self._init[1])  # bwrap ends when the command has, and process 1 when all others have
        return kept

    async def _feed(self, stream: asyncio.StreamWriter, content: bytes) -> None:
        await self._has_begun.wait()
        with suppress(ConnectionError):  # it did not want to hear it all
            stream.write(b"\n" + content)
            await stream.drain()
            stream.close()
            await stream.wait_closed()

    async def _hear(self, stream: asyncio.StreamReader, kept: "_Kept") -> None:
        await stream.readline()  # the gate's; nothing if bwrap has failed
        await self._is_told.wait()
        self._has_begun.set()
        await kept.read(stream)

    async def _watch(self, status: asyncio.StreamReader) -> None:
        """Waits for the number of process 1, then looks at what all of them hold."""
        line = await status.readline()
        self._is_told.set()
        if not line:
            return  # it has ended before
        number = json.loads(line)["child-pid"]
        with suppress(ProcessLookupError):
            self._init = number, os.pidfd_open(number)
        if self._cause:
            self.end(self._cause)
        while True:
            usage = look(number, memory_limit_bytes=self._limits.memory_bytes)
            if usage.memory_bytes > self._limits.memory_bytes:
                self.end("memory")
            elif usage.processes > self._limits.processes + 1:  # process 1 is bwrap's
                self.end("processes")
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def _judge(self, stdout: "_Kept", stderr: "_Kept", status: Sequence[bytes]) -> Result:
        told = [json.loads(line) for line in status]
        code = next((each["exit-code"] for each in told if "exit-code" in each), None)
        if self._cause == "closed":
            raise SandboxError("the sandbox was closed while something ran in it")
        if not self._cause and code is None:
            raise SandboxError(f"a sandbox did not begin, or was ended from outside: {shown(stderr.content)}")
        number = code - 128 if code is not None and code > 128 else None
        if not self._cause and number == signal.SIGKILL and _kernel_kills() > self._kernel_kills:
            raise SandboxError("the kernel ran out of memory, and may have ended what ran in a sandbox")
        return Result(
            exit_code=None if self._cause or number is not None else code,
            signal=int(signal.SIGKILL) if self._cause else number,
            stdout=stdout.content,
            stderr=stderr.content,
            stdout_dropped_bytes=stdout.dropped_bytes,
            stderr_dropped_bytes=stderr.dropped_bytes,
            timed_out=self._cause == "time" or number == signal.SIGXCPU,
            out_of_memory=self._cause == "memory",
            too_many_processes=self._cause == "processes",
        )


class _Kept:
    """The beginning of a stream."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept = bytearray()
        self.dropped_bytes = 0

    @property
    def content(self) -> bytes:
        return bytes(self._kept)

    async def read(self, stream: asyncio.StreamReader) -> None:
        while piece := await stream.read(_PIECE_BYTES):
            room = self._limit_bytes - len(self._kept)
            self._kept += piece[:room]
            self.dropped_bytes += max(len(piece) - room, 0)


async def _ended(process: int) -> None:
    """Waits for the end of a process, by its descriptor."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process)


def _kernel_kills() -> int:
    """How many processes the kernel has ended for memory on this host, in whatever group."""
    words = Path("/proc/vmstat").read_text().split()
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
