"""StepRunner: one coroutine for each call of a train step; each waits for its own inputs and for its own ranks.

    for every call of the graph, at the same time:

        ┌──► inputs of n_seqs samples ──► ranks of its mesh ──► request to them ──► outputs noted ──┐
        │    (StepState, state.py)     (RankLocks)           (TrainerGang)                       │
        └───────────────── until the whole batch was taken ◄────────────────────────────────────────┘

Nothing waits for a level of the graph: calls on ranks apart from each other run side by side as soon as their inputs
are there, inference and training alike. What a call waits for is always another call of the same step, whose requests
have a deadline, so that no wait here needs one of its own.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from corral.scheduling.dataflow import DataflowGraph
from corral.scheduling.model_function_call import ModelFunctionCall
from corral.workers.master.step.all_or_first import all_or_first_error
from corral.workers.master.step.rank_locks import RankLocks
from corral.workers.master.step.state import StepState
from corral.workers.requests.messages import TrainReply


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What one go of a call did, beside the keys that it made."""

    trained: TrainReply | None = None
    """What it did to the weights, if it is a train step."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Samples that the step goes on without, and why; no other call of the step may have taken them before."""


class CallRunner(Protocol):
    """Runs calls on the model workers."""

    async def run_call(
        self, call: ModelFunctionCall, uids: Sequence[str], *, version: int, is_last_go: bool
    ) -> CallResult:
        """Run a call on some samples of the batch.

        Args:
            version: policy version before this step.
            is_last_go: whether the step has no more samples for this call, so that its model may leave. Without `uids`
                it is known only now, since the samples of what was to be the last go were dropped.
        """

    async def end_call(self, call: ModelFunctionCall, replies: Sequence[TrainReply]) -> None:
        """What follows a call on the whole batch.

        Args:
            replies: of its goes, if it is a train step.
        """


@dataclass(slots=True)
class CallTimes:
    """Where the time of one call's goes went, in seconds."""

    inputs_s: float = 0.0
    """Until its input keys were there."""
    ranks_s: float = 0.0
    """Until its ranks had ended other calls."""
    run_s: float = 0.0
    waited_for: dict[str, float] = field(default_factory=dict)
    """Seconds by call that it waited for."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a train step did."""

    train_replies: dict[str, list[TrainReply]]
    """Of the train steps, by call; one per go."""
    times: dict[str, CallTimes]
    """By call."""
    dropped: dict[str, str]
    """Why the step went on without a sample, by uid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Which calls of the present step run, and which wait for which others; for whoever looks on."""

    running: tuple[str, ...]
    waiting: Mapping[str, Sequence[str]]
    """Calls that a call waits for, by call."""


class StepRunner:
    """Runs train steps of one graph, one after the other.

    Example:
        runner = StepRunner(graph, gang, ranks_of=gang.ranks_of)
        result = await runner.run(batch, version=12)
    """

    def __init__(
        self,
        graph: DataflowGraph,
        runner: CallRunner,
        *,
        ranks_of: Callable[[ModelFunctionCall], Collection[int]],
        on_progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """
        Args:
            ranks_of: the ranks that a call needs for itself, those of parameter reallocations included.
            on_progress: told whenever a call starts or ends.
        """
        self._graph = graph
        self._runner = runner
        self._ranks_of = ranks_of
        self._on_progress = on_progress
        self._locks = RankLocks()

    async def run(self, batch: Sequence[str], *, version: int) -> StepResult:
        """Run every call on the whole batch.

        Raises: what the first call that fails raises; the others are cancelled.
        """
        step = _Step(StepState(self._graph, batch), version=version)
        await all_or_first_error(*(self._run_call(call, step) for call in self._graph.step_calls))
        return StepResult(step.train_replies, step.times, step.dropped)

    async def _run_call(self, call: ModelFunctionCall, step: "_Step") -> None:
        times = step.times.setdefault(call.name, CallTimes())
        is_ended = True  # a call that takes nothing is followed by nothing
        while not step.state.is_over(call.name):
            if uids := await self._inputs(call, step, times):
                is_ended = await self._go(call, uids, step, times)
        if not is_ended:
            await self._go(call, [], step, times)

    async def _go(self, call: ModelFunctionCall, uids: Sequence[str], step: "_Step", times: CallTimes) -> bool:
        """One go of a call, and what follows it if it is the last; whether it is.

        What follows a call depends on how its goes ended, not on whether one of them was known to be the last: calls
        before it may drop all samples that it had still to take.
        """
        asked = time.monotonic()
        async with self._locks.hold(call.name, self._ranks_of(call)):
            started = time.monotonic()
            step.running.add(call.name)
            self._report(step)
            is_last_go = step.state.is_last_go(call.name, uids)
            result = await self._runner.run_call(call, uids, version=step.version, is_last_go=is_last_go)
            if result.trained is not None:
                step.train_replies.setdefault(call.name, []).append(result.trained)
            if is_last_go:
                await self._runner.end_call(call, step.train_replies.get(call.name, ()))
            step.running.remove(call.name)
        times.ranks_s += started - asked
        times.run_s += time.monotonic() - started
        step.state.finish_go(call.name, uids)
        step.state.drop(result.dropped)
        step.dropped.update(result.dropped)
        self._report(step)
        step.changed.set()
        step.changed = asyncio.Event()
        return is_last_go

    async def _inputs(self, call: ModelFunctionCall, step: "_Step", times: CallTimes) -> list[str]:
        """The samples of the next go; none if all that remained was dropped meanwhile."""
        while (uids := step.state.next_go(call.name)) is None and not step.state.is_over(call.name):
            waits_for, started = step.state.waits_for(call.name), time.monotonic()
            await step.changed.wait()
            waited_s = time.monotonic() - started
            times.inputs_s += waited_s
            for other in waits_for:
                times.waited_for[other] = times.waited_for.get(other, 0.0) + waited_s
        return uids or []

    def _report(self, step: "_Step") -> None:
        waiting = {
            call.name: step.state.waits_for(call.name) or self._locks.holders(self._ranks_of(call))
            for call in self._graph.step_calls
            if call.name not in step.running and not step.state.is_over(call.name)
        }
        self._on_progress(Progress(running=tuple(sorted(step.running)), waiting=waiting))


@dataclass(slots=True)
class _Step:
    """What the coroutines of one step share."""

    state: StepState
    version: int = field(kw_only=True)
    train_replies: dict[str, list[TrainReply]] = field(default_factory=dict)
    times: dict[str, CallTimes] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a go has ended, and then replaced."""
