"""Looks at many things at once, each with a deadline: a file system that is gone hangs one look, never all of them.

    calls by key --a few FileThreads--> answers by key
                          |
                          +-- not back within the patience --> Unanswered; another thread goes on with the others

A thread that hangs is left behind: nobody waits for it, at the end neither. Its key is not looked at again before it
comes back, so that a page which is drawn again and again leaves one thread behind, not one each time.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from corral.launcher.files.file_thread import FileThread

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_PATIENCE_S = 3.0  # a loaded file server answers within a second; one that is gone does not within minutes
_MAX_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Why a look led to nothing."""

    reason: str

    def about(self, path: Path) -> str:
        """For people."""
        return f"{path} cannot be read: {self.reason}; is its file system there?"


class Lookout(Generic[K]):
    """Looks, and remembers what does not come back; used by one thread at a time.

    Args:
        max_at_once: calls that run at the same time, without those that hang.
    """

    def __init__(self, *, max_at_once: int = _MAX_AT_ONCE) -> None:
        self._max_at_once = max_at_once
        self._idle: list[FileThread] = []
        self._stuck: dict[K, tuple[FileThread, Future[Any]]] = {}

    def look(self, calls: Mapping[K, Callable[[], T]], *, patience_s: float | None = None) -> dict[K, T | Unanswered]:
        """What each call answers; an OSError of it counts as no answer, any other exception is raised here.

        Args:
            calls: what is to be done, by what it is about.
            patience_s: how long each call may take from its beginning; a few seconds unless given.
        """
        patience_s = _PATIENCE_S if patience_s is None else patience_s
        silent = Unanswered(f"no answer within {patience_s:.0f} s")
        for key in [key for key, (_, future) in self._stuck.items() if future.done()]:
            self._idle.append(self._stuck.pop(key)[0])
        answers: dict[K, T | Unanswered] = {key: silent for key in calls if key in self._stuck}
        waiting = deque(key for key in calls if key not in self._stuck)
        running: dict[K, tuple[FileThread, Future[T], float]] = {}
        while waiting or running:
            while waiting and len(running) < self._max_at_once:
                thread = self._idle.pop() if self._idle else FileThread("lookout")
                running[waiting[0]] = thread, thread.submit(calls[waiting[0]]), time.monotonic()
                waiting.popleft()
            left_s = min(started for *_, started in running.values()) + patience_s - time.monotonic()
            wait([future for _, future, _ in running.values()], max(0.0, left_s), FIRST_COMPLETED)
            for key, (thread, future, started) in list(running.items()):
                if future.done():
                    error = future.exception()
                    answers[key] = Unanswered(str(error)) if isinstance(error, OSError) else future.result()
                    self._idle.append(thread)
                elif time.monotonic() - started >= patience_s:
                    answers[key] = silent
                    self._stuck[key] = thread, future
                else:
                    continue
                del running[key]
        return answers

    def look_once(self, key: K, call: Callable[[], T], *, patience_s: float | None = None) -> T | Unanswered:
        """What one call answers."""
        return self.look({key: call}, patience_s=patience_s)[key]
