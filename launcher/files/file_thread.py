"""Threads for what an attempt reads and writes in its trial directory: a file system that hangs stops no loop.

loop --submit--> queue --the thread, in order--> Future: a result, or an error
  +---run: waits for it, up to a deadline; while the thread hangs, for none

Files of a trial, for commands that a person waits for: a mount that hangs costs a message, never the terminal.

command --run--> one piece of work with files, in a thread --> its result
                    +-- silent for too long --> TimeoutError that names the path, and says what to do

A file is read in pieces, each with that deadline: a long log may take its time, a silent one not.
"""

import errno
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

FILE_TIMEOUT_S = 5.0
"""How long a loop waits for a file system that should answer at once."""
_MOMENTARY = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ESTALE,
    errno.EIO,
    errno.EROFS,  # what a local file system becomes after EIO, until it is mended
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.ENOTCONN,
    errno.EREMOTEIO,
    errno.EBUSY,
    errno.EAGAIN,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}


def is_momentary(error: OSError) -> bool:
    """Whether the same may succeed later by itself: what was short, or away, may be there again."""
    return isinstance(error, TimeoutError) or error.errno in _MOMENTARY


class FileThread:
    """Does one piece of work after the other, in a thread that does not keep the process alive."""

    def __init__(self, name: str, *, patience_s: float = FILE_TIMEOUT_S, advice: str = "") -> None:
        """
        Args:
            patience_s: how long the file system may take for one piece of work that somebody waits for.
            advice: for who reads that it did not answer.
        """
        self._name, self._patience_s, self._advice = name, patience_s, advice
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy_since: float | None = None

    @property
    def hangs(self) -> bool:
        """Whether it has been at one piece of work for too long."""
        since = self._busy_since
        return since is not None and time.monotonic() - since >= FILE_TIMEOUT_S

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Has it done some time."""
        future: Future[T] = Future()
        self._queue.put(partial(_perform, work, future))
        if self._thread is None:
            self._thread = threading.Thread(target=self._perform, name=self._name, daemon=True)
            self._thread.start()
        return future

    def wait_for(self, future: Future[Any], timeout_s: float) -> bool:
        """Whether it was done in time; a thread that hangs is not waited for again."""
        return future.done() or (not self.hangs and bool(wait([future], timeout_s).done))

    def run(self, work: Callable[[], T], path: Path) -> T:
        """Has it done now. What comes too late is done all the same, when the file system answers.

        Args:
            work: one bounded piece; it asks nobody but the file system.
            path: what it is about, for an error's text.

        Raises:
            TimeoutError: if the file system does not answer.
        """
        future = self.submit(work)
        if not self.wait_for(future, self._patience_s):
            raise TimeoutError(
                f"{path} does not answer: nothing came back within {self._patience_s:g} s; is its file system there?"
                + self._advice
            )
        return future.result()

    def _perform(self) -> None:
        while True:
            perform = self._queue.get()
            self._busy_since = time.monotonic()
            perform()
            self._busy_since = None


def _perform(work: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(work())
    except Exception as error:  # it is the caller's, in the caller's thread
        future.set_exception(error)


_COMMANDS_PATIENCE_S = (
    10.0  # all exit records of a trial that restarted often take a loaded file server a second or two
)
_COMMANDS_ADVICE = " Try again once ls answers there; on SLURM, scancel ends a job without a checkpoint"


class PatientFiles(FileThread):
    """A thread of a command's own; once that hangs, nobody waits for it again."""

    def __init__(self) -> None:
        super().__init__("patient-files", patience_s=_COMMANDS_PATIENCE_S, advice=_COMMANDS_ADVICE)

    def size(self, path: Path) -> int:
        """Bytes of a file; raises as `run`."""
        return self.run(partial(_size, path), path)

    def read(self, path: Path, start: int, num_bytes: int) -> bytes:
        """What a file has from a place on, at most so much; raises as `run`."""
        return self.run(partial(_read, path, start, num_bytes), path)


# Opened anew each time: over NFS that is what makes another node's writes visible.


def _size(path: Path) -> int:
    with path.open("rb") as file:
        return file.seek(0, os.SEEK_END)


def _read(path: Path, start: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(num_bytes)
