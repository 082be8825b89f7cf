"""One run of an async function of the user's: what it asks of servers and rewards has deadlines of its own; what else
it does has a deadline here.

    function ──generate, judge──► its own time stands still until they answer, then begins anew
      ├──anything else it awaits──► its own time runs ──timeout_s──► cancelled, LateError
      └──does not await──► the loop stands still ──timeout_s──► EventLoopBlockedError, raised where it stands

A function that does not end when it is cancelled is left behind: nobody waits for it. A function that blocks the loop
holds up everything, so a signal's handler raises into it; a library in C is interrupted only after its call.
"""

import asyncio
import logging
import os
import signal
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar

from corral.workers.user_code.blame import location_of
from corral.workers.user_code.checks import LateError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_LOOKS = 4  # in which the time is counted: as long as another run keeps the loop to itself there is at most one
_CANCEL_GRACE_S = 1.0  # a function that cleans up may say meanwhile where it was
_NAME: ContextVar[str] = ContextVar("user_code")
"""Of the function whose task runs, or that has started it."""


class EventLoopBlockedError(TimeoutError):
    """A function kept the event loop, and with it all other runs, to itself for too long."""


class Run:
    """Waits for a function as long as it goes on; used for one call of it.

    Example:
        run = Run("agent my.agents:chess", timeout_s=300.0, setting="rollout.agent_timeout_s")
        outcome = await run.wait(agent(task, Session(run.asks(model), language, run.asks(judge), prompt_ids)))
    """

    def __init__(self, name: str, *, timeout_s: float, setting: str, mark: Callable[[bool], None]) -> None:
        """
        Args:
            name: of the function, for the error's text: "agent my.agents:chess".
            timeout_s: how long the function may be at work of its own at a time.
            setting: the configuration's name of this time.
            mark: is called before and after each step of the function.
        """
        self._name, self._timeout_s, self._setting, self._mark = name, timeout_s, setting, mark
        self._may_ask = False
        self._num_asked = 0
        self._num_answers = 0

    def asks(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """The same function; while it runs, the user's function waits for others."""
        self._may_ask = True

        async def ask(*args: P.args, **kwargs: P.kwargs) -> T:
            self._num_asked += 1
            try:
                return await function(*args, **kwargs)
            finally:
                self._num_asked -= 1
                self._num_answers += 1

        return ask

    async def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the function returns, or raises.

        Raises:
            LateError: if it did not go on.
        """
        task = asyncio.create_task(_outcome(_Marked(coroutine, self._mark), self._name))
        looks, num_answers = 0, 0
        try:
            while not task.done() and looks < _LOOKS:
                await asyncio.wait([task], timeout=self._timeout_s / _LOOKS)
                looks = 0 if self._num_asked or self._num_answers > num_answers else looks + 1
                num_answers = self._num_answers
        finally:
            is_late = not task.done()
            if is_late:
                task.cancel()
                await asyncio.wait([task], timeout=_CANCEL_GRACE_S)
        if is_late:
            raise self._late(task)
        outcome = task.result()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _late(self, task: "asyncio.Task[T | BaseException]") -> LateError:
        outcome = task.result() if task.done() and not task.cancelled() else None
        location = location_of(outcome) if isinstance(outcome, BaseException) else ""
        text = f"no result within {self._timeout_s:g} s"
        if self._may_ask:
            text = (
                f"{self._name} waited {self._timeout_s:g} s ({self._setting}) for something that is neither an answer "
                "nor a reward"
            )
        return LateError(text + (f", in {location}" if location else ""))


class _Marked(Generic[T]):
    """Awaits a coroutine, and marks before and after each of its steps that it runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], mark: Callable[[bool], None]) -> None:
        self._coroutine, self._mark = coroutine, mark

    def __await__(self) -> Generator[Any, Any, T]:
        pid, step = os.getpid(), partial(self._coroutine.send, None)
        while True:
            self._mark(True)
            try:
                awaited = step()
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                if os.getpid() != pid:  # the function has forked, and the child comes back: the loop is not its own
                    os._exit(0)
                self._mark(False)
            try:
                yield awaited
                step = partial(self._coroutine.send, None)
            except BaseException as error:
                step = partial(self._coroutine.throw, error)


async def _outcome(awaited: Awaitable[T], name: str) -> T | BaseException:
    """What a function raises is a value, too: SystemExit of a task would end the loop that runs all the others."""
    _NAME.set(name)
    try:
        return await awaited
    except BaseException as error:
        return error


@contextmanager
def blocking_interrupted(timeout_s: float, *, setting: str) -> Iterator[Callable[[], None]]:
    """Raises EventLoopBlockedError in a function that keeps the event loop of this, the main thread to itself.

    Yields:
        What the loop calls as long as it runs, more often than `timeout_s`.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if name := _NAME.get(""):
            raise EventLoopBlockedError(
                f"{name} blocked the event loop for {timeout_s:g} s ({setting}); await what takes time, or give it to "
                "asyncio.to_thread"
            )
        logger.warning(
            "the event loop has stood still for %g s, for no function:\n%s",
            timeout_s,
            "".join(traceback.format_stack(frame)),
        )

    def wind() -> None:
        signal.setitimer(signal.ITIMER_REAL, timeout_s, timeout_s)  # and again, should the function not care

    before, timer = signal.signal(signal.SIGALRM, interrupt), signal.getitimer(signal.ITIMER_REAL)
    try:
        yield wind
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
