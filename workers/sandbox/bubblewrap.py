"""A sandbox by bubblewrap, without root, daemon or cgroups: namespaces hide, rlimits refuse, a look from outside ends.

    create ──► holder: a mount namespace with one bounded tmpfs, which is the disk; it ends when its stdin closes
    exec   ──► nsenter holder ──► bwrap ──► process 1 of a process namespace ──► prlimit ──► gate ──► command

One run, from bwrap's start until all that it started is gone:

    bwrap ──status: process 1──► look every 50 ms ──too much──┐
      │                                deadline, end() ───────┴──SIGKILL──► process 1, and with it its namespace
      ├──output: the gate's line ──► go ahead;  then kept up to the limit, and dropped
      └──status: exit code──► Result           none, and nobody ended it: SandboxError

The command waits at a gate until bwrap has made everything, and each of its processes is tied to the one before. If
this process is killed earlier, the command never begins; what bwrap has left half made is the holder's to end.

Nothing of a sandbox outlives this process: bwrap is tied to the thread that started it, and what it starts to bwrap.
The holder reads end of file, and ends its process group, where all of bwrap is until these ties are there.

What bounds what:
- disk: the tmpfs has a size and a number of inodes, and nothing else can be written. It is memory of the host.
- memory: a process is refused more address space than the limit (RLIMIT_AS). All together are looked at every 50 ms,
  and ended beyond it. Between two looks they can take more: at worst the limit times the number of processes. Memory of
  the kernel, such as buffers of pipes and sockets, is counted by nobody. The kernel, where it runs out of memory, ends
  what is in sandboxes before anything else.
- processes: RLIMIT_NPROC, which counts per user namespace since Linux 5.14; before, the look alone bounds them.
- CPU: RLIMIT_CPU of each process, and the wall clock. They compete with whatever else runs on the host.

RLIMIT_NPROC binds no process of root's. So root's sandboxes are of the user nobody; only the binds are made by root.
"""

import asyncio
import json
import mmap
import os
import platform
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, Self

from corral.workers.sandbox.base import Limits, Result, SandboxError, SandboxFileError
from corral.workers.sandbox.command import WRITABLE, bwrap, python_folders
from corral.workers.sandbox.seccomp import compiled_filter

_FILE_TIMEOUT_S = 30.0
_BYTES_PER_INODE = 8192  # each takes about 1 KB of the kernel's memory, which the size of a tmpfs does not count
_FIRST_KERNEL_WITH_OWN_COUNT = (5, 14)
_NOBODY = "65534"
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
# On /sys, which is everywhere, and of which nothing is needed here. Folders that only root reaches are bound by root.
_HOLD = """
set -e
mount -t tmpfs -o "size=$1,nr_inodes=$2,mode=0755" sandbox /sys
shift 2
cd /sys
mkdir -m 0777 sandbox tmp shm
number=0
for folder; do mkdir "$number"; mount --rbind -- "$folder" "$number"; number=$((number + 1)); done
echo held
read -r _ || :
kill -s KILL 0
"""
_FIRST_TO_END = 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"'
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1"'
_START_TIMEOUT_S = 30.0  # of what takes milliseconds
_END_TIMEOUT_S = 30.0  # after SIGKILL; a process that waits for a dead disk ends when that answers
_LOOK_INTERVAL_S = 0.05
_PIECE_BYTES = 1 << 16
_COMPLAINT_BYTES = 500
_GATE = ("/bin/sh", "-c", 'echo && read -r _ && exec "$@"', "sandbox")
"""In the sandbox, before the command: it prints an empty line, and reads no more than one."""
# What process 1 of a sandbox was started with can be read there.
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}

_Cause = Literal["", "time", "memory", "processes", "closed"]
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


class Bubblewrap:
    """A work directory that no program leaves. Each run has processes of its own, and finds the files of those before.

    Example:
        >>> async with await Bubblewrap.create() as sandbox:
        ...     await sandbox.upload("program.py", b"print(6 * 7)")
        ...     result = await sandbox.exec(["python3", "program.py"], timeout_s=5.0)  # result.stdout == b"42\\n"
    """

    def __init__(self, holder: asyncio.subprocess.Process, *, program: str, folders: Sequence[Path]) -> None:
        self._holder = holder
        self._program = program
        self._read_only = {str(folder): f"/sys/{index}" for index, folder in enumerate(folders)}
        self._runs: dict[asyncio.Task[Result], _Run] = {}

    @classmethod
    async def create(cls, *, disk_bytes: int = 2**26, binds: Sequence[Path] | None = None) -> Self:
        """A sandbox with an empty work directory.

        Args:
            disk_bytes: of all that is written, which stays in memory.
            binds: what it may read besides /usr, at the same paths; None is this Python with what is installed in it.

        Raises:
            SandboxError: if none can be made here; `why_no_sandbox` has more words for it.
        """
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxError("bubblewrap is not installed: there is no bwrap in the PATH")
        folders = sorted(python_folders() if binds is None else binds)
        own = ["unshare", "--mount", *([] if _is_root() else ["--user", "--map-root-user"])]
        sizes = [str(disk_bytes), str(max(disk_bytes // _BYTES_PER_INODE, 256))]
        holder = await _start_process([*own, "/bin/sh", "-c", _HOLD, "sandbox", *sizes, *map(str, folders)], group=0)
        sandbox = cls(holder, program=program, folders=folders)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await _wait_until_held(holder)
        except BaseException as error:
            await sandbox.close()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"no namespace of a sandbox's own within {_START_TIMEOUT_S:g} s") from error
            raise
        return sandbox

    async def exec(
        self, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float, limits: Limits | None = None
    ) -> Result:
        """Runs a command and ends whatever it has started; several may run at a time, each with limits of its own.

        Raises:
            SandboxError: if it could not be started.
        """
        limits = limits or Limits()
        if self._holder.returncode is not None:
            raise SandboxError("the sandbox is closed")
        run = _Run(limits, group=self._holder.pid)
        task = asyncio.ensure_future(
            run.result(partial(self._command, command, limits), stdin=stdin, timeout_s=timeout_s)
        )
        self._runs[task] = run
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        finally:
            if not task.done():
                run.end("closed")
                await asyncio.wait([task])

    async def upload(self, path: str, content: bytes) -> None:
        """Writes a file, with the folders above it; SandboxFileError if that cannot be."""
        written = await self.exec(["/bin/sh", "-c", _WRITE, "upload", path], stdin=content, timeout_s=_FILE_TIMEOUT_S)
        if not written.is_success:
            raise SandboxFileError(f"{path} could not be written in the sandbox: {complaint_of(written.stderr)}")

    async def download(self, path: str) -> bytes:
        """Reads a file, of `Limits.file_bytes` at most; SandboxFileError if that cannot be."""
        limits = Limits(output_bytes=Limits().file_bytes)
        command = ["head", "-c", str(limits.output_bytes + 1), "--", path]
        read = await self.exec(command, timeout_s=_FILE_TIMEOUT_S, limits=limits)
        if not read.is_success or read.stdout_dropped_bytes:
            cause = f"it has more than {limits.output_bytes} bytes" if read.is_success else complaint_of(read.stderr)
            raise SandboxFileError(f"{path} could not be read from the sandbox: {cause}")
        return read.stdout

    async def close(self) -> None:
        """Ends what runs, and removes the work directory."""
        for run in self._runs.values():
            run.end("closed")
        if self._runs:
            await asyncio.wait(list(self._runs), timeout=_END_TIMEOUT_S)  # who awaits them hears what becomes of them
        if self._holder.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._holder.pid, signal.SIGKILL)
        await self._holder.communicate(b"")  # which also closes its stdin

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _forget(self, task: "asyncio.Task[Result]") -> None:
        del self._runs[task]
        if not task.cancelled():
            task.exception()  # who was cancelled does not ask for it

    def _command(self, command: Sequence[str], limits: Limits, status: int, filter_end: int) -> list[str]:
        enter = ["nsenter", f"--target={self._holder.pid}", "--mount"]
        if _is_root():
            enter += ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
        else:
            enter += ["--user", "--preserve-credentials"]
        inner = bwrap(
            ["prlimit", *_limit_options(limits), "--", *_GATE, *command],
            program=self._program,
            read_only=self._read_only,
            writable={path: ("--bind", f"/sys/{Path(path).name}", path) for path in WRITABLE},
            environment=_ONE_THREAD,
            options=["--json-status-fd", str(status), "--seccomp", str(filter_end)],
        )
        return ["/bin/sh", "-c", _FIRST_TO_END, "sandbox", *enter, *inner]


async def _wait_until_held(holder: asyncio.subprocess.Process) -> None:
    assert holder.stdout and holder.stderr, "it was started with pipes"
    if await holder.stdout.readline() != b"held\n":
        raise SandboxError(f"no namespace of a sandbox's own: {complaint_of(await holder.stderr.read())}")


def _limit_options(limits: Limits) -> Iterator[str]:
    """Each hard limit, but not above this process's own, which it could not raise."""
    wanted = {
        "core": (resource.RLIMIT_CORE, 0),
        "as": (resource.RLIMIT_AS, limits.memory_bytes),
        "nofile": (resource.RLIMIT_NOFILE, limits.open_files),
        "fsize": (resource.RLIMIT_FSIZE, limits.file_bytes),
    }
    if _counts_processes_apart():
        wanted["nproc"] = (resource.RLIMIT_NPROC, limits.processes + 1)  # process 1 is bwrap's
    for name, (number, value) in wanted.items():
        hard = resource.getrlimit(number)[1]
        yield f"--{name}={value if hard == resource.RLIM_INFINITY else min(value, hard)}"
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    last_s = limits.cpu_s + 1 if hard == resource.RLIM_INFINITY else min(limits.cpu_s + 1, hard)
    yield f"--cpu={min(limits.cpu_s, last_s)}:{last_s}"  # SIGXCPU tells it, SIGKILL ends it


def _counts_processes_apart() -> bool:
    """Whether RLIMIT_NPROC leaves out processes of the same user in other user namespaces."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return found is not None and (int(found[1]), int(found[2])) >= _FIRST_KERNEL_WITH_OWN_COUNT


def _is_root() -> bool:
    """Root of the host, and not of a user namespace, who may be nobody in particular."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


async def _start_process(
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


def _kill(process: asyncio.subprocess.Process) -> None:
    """SIGKILL. Not by the process's own method, which may take the exit code from whom asyncio lets wait for it."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def complaint_of(output: bytes) -> str:
    """What a program has complained of, for an error's message."""
    return output.decode(errors="replace").strip()[-_COMPLAINT_BYTES:] or "it said nothing"


class _Run:
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
        self._has_status = asyncio.Event()
        self._has_begun = asyncio.Event()
        self._cause: _Cause = ""

    async def result(self, command: Callable[[int, int], Sequence[str]], *, stdin: bytes, timeout_s: float) -> Result:
        """What comes of it. Not to be cancelled: `end()` ends it.

        Args:
            command: bwrap's command line, with a _GATE in it, from the descriptors of its status and its filter.

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
                done, _ = await asyncio.wait([outputs], timeout=_END_TIMEOUT_S)
            if not done:
                _kill(process)
                outputs.cancel()
                raise SandboxError(f"processes of a sandbox did not end within {_END_TIMEOUT_S:g} s of SIGKILL")
        finally:
            watch.cancel()
            if self._init is not None:
                os.close(self._init[1])
                self._init = None
        return self._judge(*outputs.result(), (await status.read()).splitlines())

    def end(self, cause: _Cause) -> None:
        """SIGKILL for all of it, at once or as soon as it can be: bwrap, if it is killed before it has reported the
        number of process 1, leaves a process that waits for it.
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
            return await _start_process(command(*descriptors), group=self._group, descriptors=descriptors), reader
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
        await self._has_status.wait()
        self._has_begun.set()
        await kept.read(stream)

    async def _watch(self, status: asyncio.StreamReader) -> None:
        """Waits for the number of process 1, then looks at what all of them hold."""
        line = await status.readline()
        self._has_status.set()
        if not line:
            return  # it has ended before
        number = json.loads(line)["child-pid"]
        with suppress(ProcessLookupError):
            self._init = number, os.pidfd_open(number)
        if self._cause:
            self.end(self._cause)
        while True:
            processes, memory_bytes = _look(number, memory_limit_bytes=self._limits.memory_bytes)
            if memory_bytes > self._limits.memory_bytes:
                self.end("memory")
            elif processes > self._limits.processes + 1:  # process 1 is bwrap's
                self.end("processes")
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def _judge(self, stdout: "_Kept", stderr: "_Kept", status: Sequence[bytes]) -> Result:
        reports = [json.loads(line) for line in status]
        code = next((each["exit-code"] for each in reports if "exit-code" in each), None)
        if self._cause == "closed":
            raise SandboxError("the sandbox was closed while something ran in it")
        if not self._cause and code is None:
            raise SandboxError(f"a sandbox did not begin, or was ended from outside: {complaint_of(stderr.content)}")
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


def _look(init: int, *, memory_limit_bytes: int) -> tuple[int, int]:
    """How many processes a sandbox has now, and their resident bytes, where pages that several share count once if it
    matters; 0 before it has begun, and once it is over. The proc file system of its own lists just them.

    Args:
        init: process 1 of the sandbox, by its number outside.
        memory_limit_bytes: below it, an upper bound of the memory is enough.
    """
    # A sandbox cannot mount anything there: it has no capabilities, and its root is read-only.
    proc = f"/proc/{init}/root/proc"
    try:
        if os.stat(proc).st_dev == os.stat("/proc").st_dev:
            return 0, 0  # it is being made, and still sees this one
        numbers = [name for name in os.listdir(proc) if name.isdecimal()]
    except OSError:
        return 0, 0
    resident = sum(_resident_bytes(content) for content in _read(proc, numbers, "statm"))
    if resident > memory_limit_bytes:  # each page counts in every process that has it, as after a fork
        resident = sum(_shared_out_bytes(content) for content in _read(proc, numbers, "smaps_rollup"))
    return len(numbers), resident


def _read(proc: str, numbers: list[str], name: str) -> Iterator[bytes]:
    """The file of each process that is still there."""
    for number in numbers:
        try:
            with open(f"{proc}/{number}/{name}", "rb") as file:
                yield file.read()
        except OSError:
            continue


def _resident_bytes(statm: bytes) -> int:
    return int(statm.split()[1]) * mmap.PAGESIZE


def _shared_out_bytes(rollup: bytes) -> int:
    """Each page divided by how many processes have it."""
    found = _PSS.search(rollup)
    return int(found[1]) * 1024 if found else 0
