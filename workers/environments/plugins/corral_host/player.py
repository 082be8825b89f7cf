"""Player: an episode, from the task that the worker names to what came of it; and whose step is being made."""

import asyncio
import math
import mmap
import os
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from .packages import MAX_ERROR
from .relay import Played, Relay

_MARK_BYTES = 8
_RUN: ContextVar[int] = ContextVar("run", default=0)
"""Whose task this is."""
_LIMITS = {
    "max_turns": "turns",
    "max_input_tokens": "length",
    "max_output_tokens": "length",
    "max_total_tokens": "length",
}
"""Of an agent, by verifiers' words and ours."""
_STANDARD = str(Path(os.__file__).parent) + os.sep
_MAX_TRACEBACK = 8000  # characters


class Player:
    """Plays the episodes that the worker asks for, all at the same time."""

    def __init__(self, env: vf.Env, relay: Relay, context: vf.ModelContext, *, timeout_s: float) -> None:
        self._env = env
        self._timeout_s = timeout_s
        self._relay = relay
        self._context = context
        self._task_class = type(env.taskset).task_type()

    async def play(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """What came of one episode; an environment's failure is a value."""
        episode, traces = Played(run["endpoint"]["unix"], run["key"]), list[str]()

        def note(trace: vf.Trace) -> None:
            traces.append(trace.id)
            self._relay.episodes[trace.id] = episode

        try:
            data = self._task_class.data_type().model_validate(run["task"]["fields"]["task"])
            (slot,) = self._env.slots(self._task_class(data, self._env.config.taskset.task))
            _RUN.set(run["run"])
            playing = asyncio.ensure_future(_settled(self._env.run_slot(slot, self._context, on_trace=note)))
            try:
                while not playing.done() and (left_s := episode.left_s(self._timeout_s)) > 0.0:
                    await asyncio.wait([playing], timeout=left_s)
                if not playing.done():
                    text = f"it neither ended nor asked the model for {self._timeout_s:g} s (rollout.agent_timeout_s)"
                    verdict = failed("TimeoutError", text, "".join(_stack_of(playing)))
                elif isinstance(outcome := playing.result(), BaseException):
                    verdict = failed(type(outcome).__name__, str(outcome), "".join(traceback.format_exception(outcome)))
                else:
                    verdict = judged(outcome, episode)
            finally:
                playing.cancel()
        except Exception as error:
            verdict = failed(type(error).__name__, str(error), traceback.format_exc())
        finally:
            for trace in traces:
                self._relay.episodes.pop(trace, None)
        return {"done": run["run"], **verdict}


async def _settled(playing: Awaitable[vf.Episode]) -> vf.Episode | BaseException:
    """What comes of it, an error as a value: SystemExit of a task would end the loop that plays all the others."""
    try:
        return await playing
    except BaseException as error:
        return error


class Marked(Coroutine[Any, Any, Any]):
    """A coroutine that notes before each of its steps whose it is, and behind it that it is nobody's."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], mark: Callable[[int], None], number: int) -> None:
        self._coroutine, self._mark, self._number = coroutine, mark, number

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def _step(self, step: Callable[..., Any], *values: Any) -> Any:
        self._mark(self._number)
        try:
            return step(*values)
        finally:
            self._mark(0)


def mark_steps(descriptor: int) -> None:
    """Has every task of the running loop that comes from an episode note its steps."""
    memory = mmap.mmap(descriptor, _MARK_BYTES)

    def mark(number: int) -> None:
        memory[:] = number.to_bytes(_MARK_BYTES, "little")

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        number = _RUN.get()
        return asyncio.Task(Marked(coroutine, mark, number) if number else coroutine, loop=loop, **options)

    asyncio.get_running_loop().set_task_factory(make)


def _stack_of(task: "asyncio.Task[Any]") -> list[str]:
    """Where a task waits, as a traceback has it."""
    waits: Any = task.get_coro()
    lines: list[str] = []
    while waits is not None:
        waits = getattr(waits, "_coroutine", waits)
        if (frame := getattr(waits, "cr_frame", None)) is not None:
            lines += traceback.format_stack(frame, limit=1)
        waits = getattr(waits, "cr_await", None)
    return lines


def judged(episode: vf.Episode, played: Played) -> dict[str, Any]:
    """Reward and metrics of an episode: of several agents that learn, the mean of theirs."""
    errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    if errors or not episode.ok:
        error = errors[-1] if errors else None
        text = error.message if error else "the episode did not come to its end"
        return failed(error.type if error else "EnvError", text, (error.traceback if error else "") or "")
    taught = [trace for trace in episode.traces if trace.agent.trainable]
    learning = {trace.id for trace in taught}
    untrained = [turn for name, turns in played.turns.items() if name not in learning for turn in turns]
    if not taught:
        return failed("EnvError", "no agent of it learns anything", "")
    metrics = {"turns": float(sum(trace.num_turns for trace in taught))}
    for trace in taught:
        metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
        metrics |= {f"reward/{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
    reward = sum(trace.reward for trace in taught) / len(taught)
    if not math.isfinite(reward):
        return failed("ValueError", f"the reward is {reward}", "")
    ended = next((limit for trace in taught if (limit := _LIMITS.get(trace.stop_condition or ""))), "")
    return {"result": {"reward": reward, "metrics": metrics, "untrained": untrained, "ended": ended}}


def failed(kind: str, text: str, said: str) -> dict[str, Any]:
    """An episode without a reward."""
    # The last line of somebody's own: what catches and wraps is verifiers'.
    places = [line.strip() for line in said.splitlines() if line.lstrip().startswith("File ")]
    own = [place for place in places if _STANDARD not in place and f"{os.sep}verifiers{os.sep}" not in place] or places
    cause = " ".join(f"{kind}: {text}".split())[:MAX_ERROR] + (f" ({own[-1]})" if own else "")
    return {"error": {"kind": "failed", "cause": cause, "traceback": said[-_MAX_TRACEBACK:]}}
