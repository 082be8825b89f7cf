"""Locks on files: one supervisor per trial, one submission at a time, one question to SLURM for all who look.

The supervisor's lock file is kept open by its holder, and names the holder to everyone else. Some file systems have no
locks (Lustre mounted without `flock`); there each caller says what decides instead.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from corral.experiments.trial.directory import TrialDirectory, write_all
from corral.experiments.trial.flocks import opened
from corral.launcher.trial.processes import describe_this_process, is_process_alive

PAGE_TIMEOUT_S = 60.0
"""Of the page of a trial that has ended, which its supervisor draws after it has recorded the end."""
LEAVING_TIMEOUT_S = PAGE_TIMEOUT_S + 15.0
"""How long a supervisor that has recorded the end may still be there."""
_PATIENCE_S = 0.5  # is_locked() of an onlooker holds the lock for a moment
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class LockAnswer(Enum):
    """The result of an attempt to lock."""

    TAKEN = "taken"
    """The lock is ours until the file is closed."""
    BUSY = "busy"
    """Somebody else has it."""
    NO_LOCKS = "no locks"
    """This file system has none."""


class SubmissionRunsError(RuntimeError):
    """Somebody else submits the same trial at this moment."""


class SupervisorRunsError(RuntimeError):
    """Another supervisor holds the trial."""


def lock_path(directory: TrialDirectory) -> Path:
    """The supervisor's lock file."""
    return directory.control_path / "supervisor.lock"


def lock_supervisor(
    directory: TrialDirectory, *, patience_s: float = _PATIENCE_S, claim_decides: bool = False, **details: Any
) -> int:
    """Takes the supervisor's lock and writes who holds it; what the file says stays, for `rl-status`.

    Args:
        patience_s: how long a holder may take to leave.
        claim_decides: where there are no locks, the holder that the file names may live on another host, where
            nobody can look. If this start of a job has no attempt yet, it goes on: it gets an attempt of its own by
            a claim, and the trial log admits no other master beside that attempt's.

    Returns:
        The open file. The lock ends with its last holder, whatever kills them; children may inherit it.

    Raises:
        SupervisorRunsError: naming the holder.
        OSError: if the file system refuses; it may be tried again.
    """
    path = lock_path(directory)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait_for(descriptor, path, patience_s, claim_decides=claim_decides)
        content = json.dumps({**describe_this_process(), **details}).encode()
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        write_all(descriptor, content)
        os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)  # and with it the lock: the same process may try again
        raise
    return descriptor


def _wait_for(descriptor: int, path: Path, patience_s: float, *, claim_decides: bool) -> None:
    deadline = time.monotonic() + patience_s
    while (answer := try_lock(descriptor)) is not LockAnswer.TAKEN:
        way_out = ""
        if answer is LockAnswer.NO_LOCKS:
            if not _is_held_by_name(path, claim_decides=claim_decides):
                return
            way_out = f"; if that host is gone, delete {path}"
        if time.monotonic() > deadline:
            raise SupervisorRunsError(_who_holds(path) + way_out)
        time.sleep(0.02)


def _is_held_by_name(path: Path, *, claim_decides: bool) -> bool:
    """Whether the holder that the file names lives, or may live where we cannot look, and no claim decides."""
    holder = read_lock(path)
    if holder is None or describe_this_process().items() <= holder.items():
        return False  # it may name us though we have not got it, because its disk failed half-way
    is_alive = is_process_alive(holder)
    return not claim_decides if is_alive is None else is_alive


def read_lock(path: Path) -> dict[str, Any] | None:
    """The process that holds the lock, or held it last; None before the first."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


@contextmanager
def submitting(directory: TrialDirectory) -> Iterator[None]:
    """For the length of a submission nobody else submits this trial.

    Raises:
        SubmissionRunsError: if somebody does.
    """
    with opened(directory.control_path / "submit.lock") as descriptor:
        if try_lock(descriptor) is LockAnswer.BUSY:
            raise SubmissionRunsError(f"another rl-submit of {directory.path} is at work; rl-status shows it")
        yield


def is_locked(directory: TrialDirectory) -> bool:
    """Whether a supervisor of this trial runs, as far as this host can see."""
    try:
        with lock_path(directory).open("r+b") as file:
            answer = try_lock(file.fileno())
    except FileNotFoundError:
        return False
    if answer is not LockAnswer.NO_LOCKS:
        return answer is LockAnswer.BUSY
    holder = read_lock(lock_path(directory))
    return holder is not None and is_process_alive(holder) is True


def try_lock(descriptor: int) -> LockAnswer:
    """Asks for the lock of an open file, without waiting for it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return LockAnswer.BUSY
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
        return LockAnswer.NO_LOCKS
    return LockAnswer.TAKEN


def _who_holds(path: Path) -> str:
    holder = read_lock(path) or {}
    who = f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}"
    return f"a supervisor of this trial runs already ({who}, lock {path}); rl-status shows it, rl-stop ends it"
