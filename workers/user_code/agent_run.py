"""One run of an agent: what it asks of servers and rewards has deadlines of its own, what else it does has one here.

    agent ──generate, judge──► own time stands still until they answer, then begins anew
      ├──anything else it awaits──► own time runs ──`rollout.agent_timeout_s`──► cancelled, AgentHangsError
      └──does not await──► the loop stands still ──`rollout.agent_timeout_s`──► AgentBlocksError, raised where it stands

An agent that does not end when it is cancelled is left behind: nobody waits for it. One that blocks the loop holds up
everything, so a signal's handler raises into it; what a library in C does to its end is interrupted only after that.
"""

import asyncio
import logging
import signal
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from types import FrameType
from typing import ParamSpec, TypeVar

from corral.workers.user_code.blame import place_of

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_CANCEL_GRACE_S = 1.0  # an agent that cleans up may say meanwhile where it was
_NAME: ContextVar[str] = ContextVar("agent")
"""Of the agent whose task runs, or that has started it."""


class AgentHangsError(TimeoutError):
    """An agent awaited something of its own for too long."""


class AgentBlocksError(TimeoutError):
    """An agent kept the event loop, and with it all other agents, to itself for too long."""


@dataclass(slots=True)
class AgentRun:
    """Waits for an agent as long as it goes on; used for one call of it.

    Example:
        run = AgentRun("my.agents:chess", timeout_s=300.0)
        outcome = await run.wait(agent(task, Session(run.asks(model), language, run.asks(judge), prompt_ids)))
    """

    name: str
    """The agent's import path, for the error's text."""
    _: KW_ONLY
    timeout_s: float
    """How long the agent may be at work of its own at a time."""
    _num_asked: int = field(default=0, init=False)
    _last_answer: float = field(default_factory=lambda: asyncio.get_running_loop().time(), init=False)

    def asks(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """The same function; while it runs, the agent waits for others."""

        async def ask(*args: P.args, **kwargs: P.kwargs) -> T:
            self._num_asked += 1
            try:
                return await function(*args, **kwargs)
            finally:
                self._num_asked -= 1
                self._last_answer = asyncio.get_running_loop().time()

        return ask

    async def wait(self, agent: Awaitable[T]) -> T:
        """What the agent returns, or raises.

        Raises:
            AgentHangsError: if it did not go on.
        """
        task = asyncio.create_task(_outcome(agent, self.name))
        try:
            while not task.done() and (left_s := self._left_s()) > 0.0:
                await asyncio.wait([task], timeout=left_s)
        finally:
            is_late = not task.done()
            if is_late:
                task.cancel()
                await asyncio.wait([task], timeout=_CANCEL_GRACE_S)
        if is_late:
            raise self._hangs(task)
        outcome = task.result()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _left_s(self) -> float:
        if self._num_asked:
            return self.timeout_s
        return self._last_answer + self.timeout_s - asyncio.get_running_loop().time()

    def _hangs(self, task: "asyncio.Task[T | BaseException]") -> AgentHangsError:
        outcome = task.result() if task.done() and not task.cancelled() else None
        place = place_of(outcome) if isinstance(outcome, BaseException) else ""
        return AgentHangsError(
            f"agent {self.name} waited {self.timeout_s:g} s (rollout.agent_timeout_s) for something that is neither "
            "an answer nor a reward" + (f", in {place}" if place else "")
        )


async def _outcome(agent: Awaitable[T], name: str) -> T | BaseException:
    """What an agent raises is a value, too: SystemExit of a task would end the loop that runs all the others."""
    _NAME.set(name)
    try:
        return await agent
    except BaseException as error:
        return error


@contextmanager
def blocking_interrupted(timeout_s: float) -> Iterator[Callable[[], Awaitable[None]]]:
    """Raises AgentBlocksError in an agent that keeps the event loop of this, the main thread to itself.

    Yields:
        What the loop awaits as long as it runs, more often than `timeout_s`.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if name := _NAME.get(""):
            raise AgentBlocksError(
                f"agent {name} blocked the event loop for {timeout_s:g} s (rollout.agent_timeout_s); await what takes "
                "time, or give it to asyncio.to_thread"
            )
        logger.warning(
            "the event loop has stood still for %g s, for no agent:\n%s",
            timeout_s,
            "".join(traceback.format_stack(frame)),
        )

    async def wind() -> None:
        signal.setitimer(signal.ITIMER_REAL, timeout_s, timeout_s)  # and again, should the agent not care

    before, timer = signal.signal(signal.SIGALRM, interrupt), signal.getitimer(signal.ITIMER_REAL)
    try:
        yield wind
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
