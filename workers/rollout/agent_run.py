"""One run of an agent: what it asks of servers and rewards has deadlines of its own, what else it does has one here.

    agent ──sample_group, judge──► own time stands still until they answer, then begins anew
      └──anything else it awaits──► own time runs ──`rollout.agent_timeout_s`──► cancelled, AgentHangsError

An agent that does not end when it is cancelled is left behind, as a reward's thread is: nobody waits for it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import ParamSpec, TypeVar

from corral.workers.user_code.blame import place_of

P = ParamSpec("P")
T = TypeVar("T")

_CANCEL_GRACE_S = 1.0  # an agent that cleans up may say meanwhile where it was


class AgentHangsError(TimeoutError):
    """An agent awaited something of its own for too long."""


@dataclass(slots=True)
class AgentRun:
    """Waits for an agent as long as it goes on; used for one call of it.

    Example:
        run = AgentRun("my.agents:chess", timeout_s=300.0)
        group = await run.wait(agent(problem, prompt_ids, run.asks(sample_group), run.asks(judge)))
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
        task = asyncio.create_task(_outcome(agent))
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
        if isinstance(outcome, _Raised):
            raise outcome.error
        return outcome

    def _left_s(self) -> float:
        if self._num_asked:
            return self.timeout_s
        return self._last_answer + self.timeout_s - asyncio.get_running_loop().time()

    def _hangs(self, task: "asyncio.Task[T | _Raised]") -> AgentHangsError:
        outcome = task.result() if task.done() and not task.cancelled() else None
        place = place_of(outcome.error) if isinstance(outcome, _Raised) else ""
        return AgentHangsError(
            f"agent {self.name} waited {self.timeout_s:g} s (rollout.agent_timeout_s) for something that is neither "
            "an answer nor a reward" + (f", in {place}" if place else "")
        )


class _Raised:
    """What an agent raised. It is a value: SystemExit of a task would end the loop that runs all the others."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _outcome(agent: Awaitable[T]) -> T | _Raised:
    try:
        return await agent
    except BaseException as error:
        return _Raised(error)
