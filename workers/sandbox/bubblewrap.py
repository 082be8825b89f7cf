"""A sandbox by bubblewrap, without root, daemon or cgroups: namespaces hide, rlimits refuse, a look from outside ends.

    create ──► holder: a mount namespace with one bounded tmpfs, which is the disk; it ends when its stdin closes
    exec   ──► nsenter holder ──► bwrap ──► process 1 of a process namespace ──► prlimit ──► gate ──► command

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
import os
import platform
import re
import resource
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

from corral.workers.sandbox.base import Limits, Result, SandboxError, SandboxFileError
from corral.workers.sandbox.command import WRITABLE, bwrap, python_folders
from corral.workers.sandbox.run import END_TIMEOUT_S, GATE, START_TIMEOUT_S, Run, shown, start_process

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


class Bubblewrap:
    """One work directory, and runs in it; `create()` makes one."""

    def __init__(self, holder: asyncio.subprocess.Process, *, program: str, folders: Sequence[Path]) -> None:
        self._holder = holder
        self._program = program
        self._read_only = {str(folder): f"/sys/{index}" for index, folder in enumerate(folders)}
        self._runs: dict[asyncio.Task[Result], Run] = {}

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
        holder = await start_process([*own, "/bin/sh", "-c", _HOLD, "sandbox", *sizes, *map(str, folders)], group=0)
        sandbox = cls(holder, program=program, folders=folders)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await _wait_until_held(holder)
        except BaseException as error:
            await sandbox.close()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"no namespace of a sandbox's own within {START_TIMEOUT_S:g} s") from error
            raise
        return sandbox

    async def exec(
        self, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float, limits: Limits | None = None
    ) -> Result:
        """As `Sandbox` has it."""
        limits = limits or Limits()
        if self._holder.returncode is not None:
            raise SandboxError("the sandbox is closed")
        run = Run(limits, group=self._holder.pid)
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
        """As `Sandbox` has it."""
        written = await self.exec(["/bin/sh", "-c", _WRITE, "upload", path], stdin=content, timeout_s=_FILE_TIMEOUT_S)
        if not written.is_success:
            raise SandboxFileError(f"{path} could not be written in the sandbox: {shown(written.stderr)}")

    async def download(self, path: str) -> bytes:
        """As `Sandbox` has it."""
        limits = Limits(output_bytes=Limits().file_bytes)
        command = ["head", "-c", str(limits.output_bytes + 1), "--", path]
        read = await self.exec(command, timeout_s=_FILE_TIMEOUT_S, limits=limits)
        if not read.is_success or read.stdout_dropped_bytes:
            cause = f"it has more than {limits.output_bytes} bytes" if read.is_success else shown(read.stderr)
            raise SandboxFileError(f"{path} could not be read from the sandbox: {cause}")
        return read.stdout

    async def close(self) -> None:
        """As `Sandbox` has it."""
        for run in self._runs.values():
            run.end("closed")
        if self._runs:
            await asyncio.wait(list(self._runs), timeout=END_TIMEOUT_S)  # who awaits them hears what becomes of them
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
            ["prlimit", *_limit_options(limits), "--", *GATE, *command],
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
        raise SandboxError(f"no namespace of a sandbox's own: {shown(await holder.stderr.read())}")


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
