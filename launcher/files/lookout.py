"""Looks at many things at once, each with a deadline: a file system that is gone hangs one look, never all of them.

    calls by key --one FileThread takes one after the other--> answers by key
                      |
                      +-- this process waits rather than computes --> another thread goes on beside it, up to a bound
                      +-- at one call for longer than the patience --> Unanswered; the others go on

Python runs one thread at a time: where no file system is slow, further threads only take turns with the first, which
takes longer than the calls. A thread that hangs is left behind: nobody waits for it, at the end neither. Its key is not
looked at again before it comes back, so that a page which is drawn again and again leaves one thread behind, not one
each time.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from corral.launcher.files.file_thread import FileThread

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_PATIENCE_S = 3.0  # a loaded file server answers within a second; one that is gone does not within minutes
_MOMENT_S = 0.01
_MAX_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Why a look led to nothing."""

    reason: str
    error: OSError | None = field(default=None, compare=False)
    """The error of the file system; None without one."""

    def about(self, path: Path) -> str:
        """For people."""
        return f"{path} cannot be read: {self.reason}; is its file system there?"


class _Looker(Generic[K]):
    """A thread, and the call that it is at."""

    def __init__(self, thread: FileThread) -> None:
        self.thread = thread
        self.at: tuple[K, float] | None = None
        """The key, and since when."""
        self.future: Future[None] = Future()

    def begin(self, waiting: "deque[tuple[K, Callable[[], T]]]", answers: "dict[K, T | Unanswered]") -> None:
        """Makes the calls that wait until none is left."""
        self.future = self.thread.submit(partial(self._look, waiting, answers))

    def _look(self, waiting: "deque[tuple[K, Callable[[], T]]]", answers: "dict[K, T | Unanswered]") -> None:
        while waiting:
            try:
                key, call = waiting.popleft()
            except IndexError:  # somebody else took it
                return
            self.at = key, time.monotonic()
            try:
                answers[key] = call()
            except OSError as error:
                answers[key] = Unanswered(error.strerror or str(error), error)

    def left_s(self, patience_s: float) -> float:
        """How long it may go on with what it is at; 0 or less where it is done, or hangs."""
        if self.future.done():
            return 0.0
        return patience_s if self.at is None else self.at[1] + patience_s - time.monotonic()


class Lookout(Generic[K]):
    """Looks, and remembers what does not come back; used by one thread at a time.

    Args:
        max_at_once: threads that look at the same time, without those that hang.
    """

    def __init__(self, *, max_at_once: int = _MAX_AT_ONCE) -> None:
        self._max_at_once = max_at_once
        self._idle: list[FileThread] = []
        self._stuck: dict[K, _Looker[K]] = {}

    def look(self, calls: Mapping[K, Callable[[], T]], *, patience_s: float | None = None) -> dict[K, T | Unanswered]:
        """What each call answers; an OSError of it counts as no answer, any other exception is raised here.

        Args:
            calls: what is to be done, by what it is about.
            patience_s: how long each call may take from its beginning; a few seconds unless given.
        """
        patience_s = _PATIENCE_S if patience_s is None else patience_s
        for key in [key for key, looker in self._stuck.items() if looker.future.done()]:
            self._idle.append(self._stuck.pop(key).thread)
        waiting = deque((key, call) for key, call in calls.items() if key not in self._stuck)
        answers: dict[K, T | Unanswered] = {}
        lookers: list[_Looker[K]] = []
        computed_s = 0.0
        while True:
            left_s = {looker: left for looker in lookers if (left := looker.left_s(patience_s)) > 0.0}
            may_begin = bool(waiting) and len(left_s) < self._max_at_once
            if may_begin and (not left_s or computed_s < _MOMENT_S / 2):
                looker = _Looker[K](self._idle.pop() if self._idle else FileThread("lookout"))
                looker.begin(waiting, answers)
                lookers.append(looker)
                left_s[looker] = patience_s
            if not left_s:
                break
            began_at = time.process_time()
            wait([looker.future for looker in left_s], _MOMENT_S if may_begin else min(left_s.values()))
            computed_s = time.process_time() - began_at
        for looker in lookers:
            if looker.future.done():
                looker.future.result()
                self._idle.append(looker.thread)
            elif looker.at is not None:
                self._stuck[looker.at[0]] = looker
        silent = Unanswered(f"no answer within {patience_s:.0f} s")
        return {key: answers.get(key, silent) for key in calls}
