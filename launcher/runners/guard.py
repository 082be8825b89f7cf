"""The guard of one worker: its parent, so small that it has nothing to die of, which leaves nothing of it behind.

    supervisor, or slurmstepd --> guard --> worker --> servers, rewards, whatever they start
       SIGKILL of the worker      what it started comes to the guard (as subreaper), which ends all of it
       SIGKILL of the supervisor  the kernel tells the guard, which ends the worker and all that it started
       SIGKILL of the guard       the kernel ends the worker; the session that they had together is ended by the
                                  supervisor, or by the next sweep of this host: its record says which (leftovers.py)

    SIGTERM, SIGINT --> the worker        SIGUSR1: end everything at once

The guard ends as its worker did, by the same signal or code. If the kernel had killed for memory, it notes that in a
file, since srun says 1 of it. The worker's temporary files are in a folder of its own, which goes with it.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.own_python import own_python
from corral.experiments.trial import leftovers
from corral.experiments.trial.directory import remove_file
from corral.experiments.trial.flocks import open_directory
from corral.experiments.trial.login_shell import leave_login_shell
from corral.experiments.trial.memory_groups import memory_groups
from corral.experiments.trial.tether import die_with_parent
from corral.launcher.trial.processes import (
    TRIAL_UUID_VARIABLE,
    children_of,
    descendants_of,
    process_start_ticks,
    sweep,
    user_name,
)

END_ALL: Final = signal.SIGUSR1
OUT_OF_MEMORY_VARIABLE: Final = "CORRAL_OUT_OF_MEMORY_NOTE"
"""Names the file that says of a worker that it ended for its memory."""
_HEARD: Final = (signal.SIGTERM, signal.SIGINT, END_ALL, signal.SIGCHLD)
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER: Final = 36
_END_TIMEOUT_S: Final = 30.0  # a process that waits for a dead disk or GPU dies when that answers
_TRACKER_GRACE_S: Final = 3.0
_MODULE: Final = "corral.launcher.runners.guard"


def guarded(command: Sequence[str]) -> list[str]:
    """The command under a guard; an interpreter stays the first word, which a container replaces by its own."""
    if command[0] == sys.executable:
        return own_python("-m", _MODULE, "--python", *command[1:])
    return own_python("-m", _MODULE, "--program", *command)


def main(arguments: Sequence[str]) -> NoReturn:
    """Guards one worker until it has ended, with all that it started."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    parent = os.getppid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    sweep()
    leave_login_shell(*filter(None, [os.environ.get("CORRAL_BIND_ADDRESS")]))
    command = [*([sys.executable] if arguments[0] == "--python" else []), *arguments[1:]]
    with contextlib.ExitStack() as stack:
        environment, record = _own_surroundings(stack)
        tie = die_with_parent()
        note = os.environ.get(OUT_OF_MEMORY_VARIABLE)
        if note is not None:
            remove_file(Path(note))
        kills_before = _kills_for_memory()

        def prepare() -> None:
            tie()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

        worker = subprocess.Popen(command, env=environment, preexec_fn=prepare)
        status = _watch(worker.pid, parent)
        if note is not None and status is not None and _is_for_memory(status, kills_before):
            Path(note).touch()
        if record is not None:
            for path in leftovers.names_in_memory(descendants_of(os.getpid())):
                record.note(path)
        status = _end_children(worker.pid, status)
    if record is not None:
        record.remove()
    sweep()  # the supervisor may be gone too
    _leave(status)


def _own_surroundings(stack: contextlib.ExitStack) -> tuple[dict[str, str], leftovers.Record | None]:
    """The worker's environment, with a temporary folder of its own; and what goes with it, if that can be recorded."""
    environment = dict(os.environ)
    pid = os.getpid()
    try:
        record = leftovers.begin(
            environment.get(TRIAL_UUID_VARIABLE, ""),
            session=pid if os.getsid(0) == pid else 0,
            start_ticks=process_start_ticks(pid) or 0,
        )
        shared = tempfile.gettempdir()
        folder = Path(tempfile.mkdtemp(prefix="corral-"))
        record.note(folder)
        held = open_directory(folder)
        stack.callback(os.close, held)
        fcntl.flock(held, fcntl.LOCK_SH)
    except OSError as error:
        print(f"what this worker leaves is not recorded: {error}", file=sys.stderr)
        return environment, None
    # What torch compiles is for the next start, too; elsewhere it is not looked for in the temporary folder.
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{shared}/torchinductor_{user_name()}")
    return environment | {"TMPDIR": str(folder), leftovers.LEFTOVERS_VARIABLE: str(record.path)}, record


def _watch(worker: int, parent: int) -> int | None:
    """The worker's wait status; None if it is to be ended."""
    while True:
        heard = signal.sigwait(_HEARD)
        if (status := _reap(worker)) is not None:
            return status
        if heard == END_ALL or os.getppid() != parent:
            return None
        if heard != signal.SIGCHLD:
            os.kill(worker, heard)


def _reap(worker: int) -> int | None:
    """Reaps who has ended; the worker's wait status if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found = ended[1] if ended[0] == worker else found
    return found


def _kills_for_memory() -> int:
    """How many the kernel has killed for memory among those that are counted with this process."""
    return next((group.kills for group in memory_groups() if group.kills is not None), 0)


def _is_for_memory(status: int, kills_before: int) -> bool:
    """Whether a worker ended because it, or what it had started, was killed for memory."""
    if _kills_for_memory() == kills_before:
        return False
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        return True
    # It may also have failed for want of a process of its own; where others are counted with it, of theirs.
    mine = {os.getpid(), *descendants_of(os.getpid())}
    return (code < 0 or code == WorkerExit.ERROR) and next(memory_groups()).members <= mine


def _end_children(worker: int, status: int | None) -> int:
    """Ends all processes that are left: the children of each that dies come here. Python's trackers, which remove
    shared memory that others have made, end by themselves when these are gone."""
    started = time.monotonic()
    while children := children_of(os.getpid()):
        waited_s = time.monotonic() - started
        if waited_s > _END_TIMEOUT_S:
            print(f"these do not end, even by SIGKILL: {children}", file=sys.stderr)
            break
        for child in children:
            if waited_s > _TRACKER_GRACE_S or not _is_tracker(child):
                os.kill(child, signal.SIGKILL)  # ours until it is reaped, so the id is nobody else's
        signal.sigtimedwait((signal.SIGCHLD,), 0.05)
        found = _reap(worker)
        status = found if found is not None else status
    return int(signal.SIGKILL) if status is None else status


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _leave(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker's own is enough
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
