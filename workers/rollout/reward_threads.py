"""RewardThreads: a few threads that run calls of user code; one that hangs is replaced, so that it blocks nobody else.

    submit ──► waiting ──a thread is free──► running ──► done
                  │ cancelled                   │ abandon()
                  └──► never run                └──► abandoned: a new thread takes its place; nobody hears its result

A thread cannot be ended from outside. So an abandoned one stays until its call returns, if ever, and too many of them
at a time are an error: only a new process is rid of them.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

_MAX_ABANDONED: Final = 64  # each holds a stack and whatever its call holds, such as a connection or an open file


class ThreadsHangError(RuntimeError):
    """So many calls hang that only a new process can go on."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of user code. Both futures may be awaited with `asyncio.wrap_future`."""

    function: Callable[[], float]
    started: "Future[None]" = field(default_factory=Future)
    """Done when a thread has taken it up; cancel it and the call never runs."""
    outcome: "Future[float | BaseException]" = field(default_factory=Future)
    """What it returned or raised; never done once the call is abandoned. An exception is a value here: StopIteration
    and SystemExit do not travel through futures."""
    is_abandoned: bool = False


class RewardThreads:
    """Runs calls in the order in which they came. Every method may be called from any thread.

    Example:
        threads = RewardThreads(4)
        call = threads.submit(lambda: reward(problem, text))
        call.started.result()                # every call before it has a deadline
        try:
            call.outcome.result(timeout=15)
        except TimeoutError:
            threads.abandon(call)
    """

    def __init__(self, num_threads: int, *, max_abandoned: int = _MAX_ABANDONED) -> None:
        """
        Args:
            num_threads: calls that run at a time, abandoned ones not counted.
            max_abandoned: with so many abandoned calls that still run, `submit` raises.
        """
        self._num_threads = num_threads
        self._max_abandoned = max_abandoned
        self._num_abandoned = 0
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        for _ in range(num_threads):
            self._start_thread()

    def submit(self, function: Callable[[], float]) -> Call:
        """Queue a call.

        Raises:
            ThreadsHangError: if too many calls hang.
        """
        if self._num_abandoned >= self._max_abandoned:
            raise ThreadsHangError(
                f"{self._num_abandoned} calls of user code have not returned after their deadline; threads cannot be "
                "ended, so this process has to: give the function a time limit of its own"
            )
        call = Call(function)
        self._waiting.put(call)
        return call

    def abandon(self, call: Call) -> None:
        """Wait for a call no longer, whether it waits or runs; one that has ended is left as it is."""
        with self._lock:
            if call.started.cancel() or call.outcome.done() or call.is_abandoned:
                return
            call.is_abandoned = True
            self._num_abandoned += 1
        self._start_thread()

    def close(self) -> None:
        """Cancel what waits; the threads end after the calls that they run."""
        try:
            while (call := self._waiting.get_nowait()) is not None:
                call.started.cancel()
        except queue.Empty:
            pass
        for _ in range(self._num_threads):
            self._waiting.put(None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="reward", daemon=True).start()

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            if not call.started.set_running_or_notify_cancel():
                continue
            call.outcome.set_running_or_notify_cancel()  # from here on nobody who waits for it can cancel it
            call.started.set_result(None)
            if not self._run(call):
                return  # another thread has this one's place

    def _run(self, call: Call) -> bool:
        """Run one call; False if it was abandoned meanwhile."""
        outcome: float | BaseException
        try:
            outcome = call.function()
        except BaseException as error:  # user code may raise SystemExit, which would end this thread in silence
            outcome = error
        with self._lock:
            if call.is_abandoned:
                self._num_abandoned -= 1
            else:
                call.outcome.set_result(outcome)
            return not call.is_abandoned
