"""Looks at many things at once, each with a deadline: a file system that is gone hangs one look, never all of them.

    calls by key --a few daemon threads--> answers by key
                          |
                          +-- not back within the patience --> Unanswered; another thread goes on with the others

A thread that hangs is left behind: nobody waits for it, at the end neither. Its key is not looked at again before it
comes back, so that a page which is drawn again and again leaves one thread behind, not one each time.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_PATIENCE_S = 3.0  # a loaded file server answers within a second; one that is gone does not within minutes
_MAX_AT_ONCE = 32
_SLOW_S = 0.02


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
        self._stuck: set[K] = set()

    def look(self, calls: Mapping[K, Callable[[], T]], *, patience_s: float | None = None) -> dict[K, T | Unanswered]:
        """What each call answers; an OSError of it counts as no answer, any other exception is raised here.

        Args:
            calls: what is to be done, by what it is about.
            patience_s: how long each call may take from its beginning; a few seconds unless given.
        """
        patience_s = _PATIENCE_S if patience_s is None else patience_s
        silent = Unanswered(f"no answer within {patience_s:.0f} s")
        answers: dict[K, T | Unanswered] = {key: silent for key in calls if key in self._stuck}
        look = _Look({key: call for key, call in calls.items() if key not in self._stuck}, self._stuck)
        num_threads = 0
        while len(answers) < len(calls):
            # Quick answers are had soonest from few threads, which do not get into each other's way.
            if look.waiting and num_threads < self._max_at_once:
                look.add_thread()
                num_threads += 1
            answers |= dict.fromkeys(look.give_up(patience_s), silent)
            for key, answer in look.answered(patience_s):
                if isinstance(answer, BaseException):
                    raise answer
                answers[key] = answer
        return answers

    def look_once(self, key: K, call: Callable[[], T], *, patience_s: float | None = None) -> T | Unanswered:
        """What one call answers."""
        return self.look({key: call}, patience_s=patience_s)[key]


class _Look(Generic[K, T]):
    """The threads of one look; what was given up is not told any more."""

    def __init__(self, calls: Mapping[K, Callable[[], T]], stuck: set[K]) -> None:
        self._calls = calls
        self._stuck = stuck
        self._lock = threading.Lock()
        self._started: dict[K, float] = {}
        self.waiting = deque(calls)
        self._answers: queue.SimpleQueue[tuple[K, T | Unanswered | BaseException]] = queue.SimpleQueue()

    def add_thread(self) -> None:
        threading.Thread(target=self._work, name="lookout", daemon=True).start()

    def give_up(self, patience_s: float) -> list[K]:
        """What takes too long; other threads go on in place of those that do it."""
        with self._lock:
            now = time.monotonic()
            overdue = [key for key, started in self._started.items() if now - started >= patience_s]
            for key in overdue:
                del self._started[key]
            self._stuck.update(overdue)
        for _ in overdue if self.waiting else ():
            self.add_thread()
        return overdue

    def answered(self, patience_s: float) -> Iterator[tuple[K, T | Unanswered | BaseException]]:
        """What comes back, until nothing has for a moment, or something is overdue, or all has."""
        while True:
            with self._lock:
                oldest = min(self._started.values(), default=None)
                if oldest is None and not self.waiting and self._answers.empty():
                    return
            left_s = _SLOW_S if oldest is None else min(_SLOW_S, oldest + patience_s - time.monotonic())
            try:
                yield self._answers.get(timeout=max(0.0, left_s))
            except queue.Empty:
                return

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self.waiting:
                    return
                key = self.waiting.popleft()
                self._started[key] = time.monotonic()
            try:
                answer: T | Unanswered | BaseException = self._calls[key]()
            except OSError as error:
                answer = Unanswered(str(error))
            except BaseException as error:  # raised again by whoever looks
                answer = error
            with self._lock:
                self._stuck.discard(key)
                if self._started.pop(key, None) is None:
                    return  # given up, and replaced
            self._answers.put((key, answer))
