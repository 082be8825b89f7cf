"""Threads for what an attempt reads and writes in its trial directory: a file system that hangs stops no loop.

loop --submit--> queue --the thread, in order--> Job: a result, or an error --wake_up--> loop
  +---run: waits for the job, up to a deadline; while the thread hangs, for none
"""

import errno
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

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


class Job(Generic[T]):
    """Work that was handed to the thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Event()
        self._results: list[T] = []
        self._error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it was done in time."""
        return self._done.wait(timeout_s)

    def result(self) -> T:
        """What the work returned, or raised; of a job that is done."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    def perform(self) -> None:
        """Called by the thread."""
        try:
            self._results.append(self._work())
        except Exception as error:  # it is the caller's, in the caller's thread
            self._error = error
        finally:
            self._done.set()


class FileThread:
    """Performs jobs one after the other, in a thread that does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Job[Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy_since: float | None = None
        self.wake_up: Callable[[], None] = lambda: None
        """Called in the thread after every job."""

    @property
    def hangs(self) -> bool:
        """Whether it has been at one job for too long."""
        since = self._busy_since
        return since is not None and time.monotonic() - since >= FILE_TIMEOUT_S

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Has it done some time."""
        job = Job(work)
        self._queue.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._perform, name=self._name, daemon=True)
            self._thread.start()
        return job

    def wait_for(self, job: Job[Any], timeout_s: float) -> bool:
        """Whether a job was done in time; a thread that hangs is not waited for again."""
        return job.is_done or (not self.hangs and job.wait(timeout_s))

    def run(self, work: Callable[[], T], what: str, *, timeout_s: float = FILE_TIMEOUT_S) -> T:
        """Has it done now. What comes too late is done all the same, when the file system answers.

        Args:
            what: it does, for an error's text.
            timeout_s: how long the file system may take.

        Raises:
            TimeoutError: if it took longer.
        """
        job = self.submit(work)
        if not self.wait_for(job, timeout_s):
            raise TimeoutError(f"the file system did not answer within {timeout_s:.0f} s: {what}")
        return job.result()

    def _perform(self) -> None:
        while True:
            job = self._queue.get()
            self._busy_since = time.monotonic()
            job.perform()
            self._busy_since = None
            self.wake_up()
