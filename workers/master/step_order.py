"""The calls of a step on one batch, each as soon as its inputs are there and its ranks are free.

    ┌──► inputs of n_seqs samples ──► ranks of its mesh ──► MeshCalls ──► outputs noted ──┬──► push weights, publish
    │    (StepState)                  (RankLocks)                                         │ after its last slice
    └───────────────── until the whole batch was taken ◄──────────────────────────────────┘

For every call of the graph at the same time, in a coroutine of its own (StepRunner). Nothing waits for a level of the
graph: calls on ranks apart from each other run side by side, inference and training alike. What a call waits for is
always another call of the same step, whose requests have a deadline, so that no wait here needs one of its own.

    batch ──► remaining of each call ──next_slice: n_seqs have its input keys──► a slice ──finish_slice──► output keys
                     ▲                                                                │
                     └──────────────── until none remains: the call is over ◄─────────┘

Every call takes every sample of the batch exactly once, and never before all of its input keys exist: this is where
that holds.

    ask({0, 1}) ──► granted ─────────────────────────► free({0, 1}) ──► granted: {0, 1, 2} (asked first)
    ask({0, 1, 2}) ──► waits: 0 and 1 are taken                          waits:   {2}       (asked later, shares rank 2)
    ask({2}) ──► waits: who asked before it shares rank 2

Ranks are granted in the order in which they were asked for, so that a call on many ranks is not overtaken for ever by
calls on few. A rank works for one call at a time by this alone; that two ranks start the calls which they share in the
same order follows from it, and the order of request ids carries that guarantee even if this one failed.

What the calls did makes what the step did (StepOutcome):

    TrainReplies of every trained role ──► did all learn, none, or some?      statistics, with names that do not collide
    seconds of every call              ──► where the step's time went
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field

from corral.experiments.trial.spans import Span
from corral.scheduling.dataflow import DataflowGraph
from corral.scheduling.model_function_call import ModelFunctionCall, PublishWeightsHook, PushWeightsHook
from corral.workers.lifecycle.timeline import Record, unrecorded
from corral.workers.master.calls import MeshCalls
from corral.workers.requests.messages import TrainNotice, TrainReply
from corral.workers.streams.closing import all_or_first_error


@dataclass(slots=True)
class StepOutcome:
    """A step over its graph, as far as it has come.

    A step counts as a whole or not at all: its samples are consumed once, by all roles or by none.
    """

    graph: DataflowGraph
    train_replies: dict[str, list[TrainReply]] = field(default_factory=dict)
    """Of the train steps, by call; one per slice."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Where the time of each call's slices went, by metric: `time/CALL_s` while it ran, `time/CALL/inputs_s` until its
    input keys were there, `time/CALL/for_OTHER_s` by call that it waited for, `time/CALL/ranks_s` until its ranks had
    ended other calls."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Why the step went on without a sample, by uid."""

    @property
    def by_call(self) -> dict[str, TrainReply]:
        """What each train step did in all of its slices."""
        return {name: joined(replies) for name, replies in self.train_replies.items()}

    @property
    def num_nonfinite(self) -> int:
        return sum(reply.num_nonfinite for reply in self.by_call.values())

    @property
    def is_damaged(self) -> bool:
        """Whether some role's weights are no longer finite."""
        return any(reply.is_damaged for reply in self.by_call.values())

    @property
    def skipping(self) -> list[str]:
        """The train steps that changed nothing because nothing was finite."""
        return [name for name, reply in self.by_call.items() if reply.is_skipped]

    @property
    def is_skipped(self) -> bool:
        """Whether no role learned: the version stays, and the samples were not trained on."""
        return bool(self.by_call) and len(self.skipping) == len(self.by_call)

    @property
    def is_torn(self) -> bool:
        """Whether some roles learned from the samples and others did not: only an earlier state is one state."""
        return bool(self.skipping) and not self.is_skipped

    @property
    def notices(self) -> list[TrainNotice]:
        """What the train steps found out."""
        return [notice for reply in self.by_call.values() for notice in reply.notices]

    def metrics(self) -> dict[str, float]:
        """Statistics of the train steps, and times; those of all roles but the first one begin with the role."""
        values: dict[str, float] = {}
        trained = self.graph.trained_models
        for name, reply in self.by_call.items():
            role = self.graph.call(name).role
            is_first = role == trained[0].role
            values |= {_named(key, "" if is_first else role): value for key, value in reply.stats.items()}
        return values | self.seconds


def joined(replies: Sequence[TrainReply]) -> TrainReply:
    """Several slices as one: means of the statistics, sums of the counts."""
    names = dict.fromkeys(name for reply in replies for name in reply.stats)
    means = {name: [reply.stats[name] for reply in replies if name in reply.stats] for name in names}
    return TrainReply(
        stats={name: sum(values) / len(values) for name, values in means.items()},
        num_updates=sum(reply.num_updates for reply in replies),
        num_nonfinite=sum(reply.num_nonfinite for reply in replies),
        is_damaged=any(reply.is_damaged for reply in replies),
        notices=[notice for reply in replies for notice in reply.notices],
    )


def _named(key: str, role: str) -> str:
    """The statistic of a role, whose name it may begin with already."""
    return key if not role or key.startswith(f"{role}/") else f"{role}/{key}"


@dataclass
class StepRunner:
    """The calls of one graph on one batch: one coroutine for each, which waits for its own inputs and ranks.

    Example:
        outcome = await StepRunner(graph, calls, batch, version=12, publish=weights_of_version_13).run()
    """

    graph: DataflowGraph
    calls: MeshCalls
    batch: Sequence[str]
    _: KW_ONLY
    version: int
    """Of the policy before this step."""
    publish: Callable[[], Awaitable[None]]
    """Makes the weights that have just changed known to the generation servers."""
    on_progress: Callable[[Sequence[str], Mapping[str, Sequence[str]]], None] = lambda running, waits_for: None
    """Called whenever a call starts or ends, with the calls that run, and for each other call those it waits for."""
    record: Record = unrecorded
    """Has what each call did and waited for, in a lane of its own."""

    def __post_init__(self) -> None:
        self._state = StepState(self.graph, self.batch)
        self._outcome = StepOutcome(self.graph)
        self._locks = RankLocks()
        self._running: set[str] = set()
        self._changed = asyncio.Event()
        """Set when a slice has ended, and then replaced."""

    async def run(self) -> StepOutcome:
        """Run every call on the whole batch.

        Raises: what the first call that fails raises; the others are cancelled.
        """
        await all_or_first_error(*(self._run_call(call) for call in self.graph.step_calls))
        return self._outcome

    async def _run_call(self, call: ModelFunctionCall) -> None:
        """Slice after slice of a call: wait for inputs, then for ranks, run, and hand on weights after the last slice.

        What follows a call depends on how its slices ended, not on whether one of them was known to be the last: calls
        before it may drop all samples that it had still to take. Then a slice without samples ends it.
        """
        name, state, outcome, ranks = call.name, self._state, self._outcome, self.calls.ranks_of(call)
        outcome.seconds |= dict.fromkeys([f"time/{name}{part}" for part in ("_s", "/inputs_s", "/ranks_s")], 0.0)
        is_ended = True  # a call that takes nothing is followed by nothing
        while not (state.is_over(name) and is_ended):
            while (uids := state.next_slice(name)) is None and not state.is_over(name):
                waits_for, started = state.waits_for(name), time.monotonic()
                await self._changed.wait()
                parts = ["/inputs", *(f"/for_{other}" for other in waits_for)]
                self._note(call, f"wait for {', '.join(waits_for)}", started, time.monotonic(), parts=parts)
            if not uids and is_ended:
                return  # all that remained was dropped meanwhile
            uids = uids or []

            asked = time.monotonic()
            async with self._locks.hold(name, ranks):
                started = time.monotonic()
                self._running.add(name)
                self._report()
                is_ended = state.is_last_slice(name, uids)
                trained, dropped = await self.calls.run_call(call, uids, version=self.version, is_last_slice=is_ended)
                if trained is not None:
                    outcome.train_replies.setdefault(name, []).append(trained)
                replies = outcome.train_replies.get(name) if is_ended else None
                if replies and not (learned := joined(replies)).is_skipped and not learned.is_damaged:
                    for hook in call.post_hooks:
                        if isinstance(hook, PublishWeightsHook):
                            await self.publish()
                        elif isinstance(hook, PushWeightsHook):
                            await self.calls.reallocate(call.model_name, hook.target, eta=hook.eta)
                self._running.remove(name)
            self._note(call, "wait for ranks", asked, started, parts=["/ranks"])
            self._note(call, name, started, time.monotonic(), parts=[""])
            state.finish_slice(name, uids)
            state.drop(dropped)
            outcome.dropped.update(dropped)
            self._report()
            self._changed.set()
            self._changed = asyncio.Event()

    def _note(self, call: ModelFunctionCall, what: str, start_s: float, end_s: float, *, parts: Sequence[str]) -> None:
        """Where the time of a call went: in these parts of its metrics, and in its lane."""
        for part in parts:
            self._outcome.seconds[f"time/{call.name}{part}_s"] += end_s - start_s
        self.record(Span(lane=call.name, name=what, start_s=start_s, end_s=end_s))

    def _report(self) -> None:
        waiting = {
            call.name: self._state.waits_for(call.name) or self._locks.holders(self.calls.ranks_of(call))
            for call in self.graph.step_calls
            if call.name not in self._running and not self._state.is_over(call.name)
        }
        self.on_progress(sorted(self._running), waiting)


class StepState:
    """One train step on one batch.

    Example:
        state = StepState(graph, ["0:a", "0:b"])
        state.next_slice("ref_inf")                    # ["0:a", "0:b"]
        state.next_slice("actor_train")                # None: there are no ref_logprobs yet
        state.finish_slice("ref_inf", ["0:a", "0:b"])
        state.next_slice("actor_train")                # ["0:a", "0:b"]
    """

    def __init__(self, graph: DataflowGraph, batch: Sequence[str]) -> None:
        self._graph = graph
        self._remaining = {call.name: dict.fromkeys(batch) for call in graph.step_calls}
        """By call, what it has not taken yet, oldest first: its output keys exist for all others."""

    def is_over(self, name: str) -> bool:
        """Whether a call has taken the whole batch."""
        return not self._remaining[name]

    def is_last_slice(self, name: str, uids: Sequence[str]) -> bool:
        """Whether nothing remains for a call after this slice."""
        return len(uids) == len(self._remaining[name])

    def next_slice(self, name: str) -> list[str] | None:
        """The samples that a call can take now, oldest first; None while there are not enough, or others must end."""
        if self.is_over(name) or self._must_wait_for(name):
            return None
        remaining = self._remaining[name]
        ready = list(remaining)
        for producer in self._graph.predecessors(name):
            if lacking := self._remaining[producer]:
                ready = [uid for uid in ready if uid not in lacking]
        wanted = min(self._graph.call(name).n_seqs, len(remaining))
        return ready[:wanted] if len(ready) >= wanted else None

    def finish_slice(self, name: str, uids: Sequence[str]) -> None:
        """A call has taken these samples, and made its output keys of them."""
        for uid in uids:
            del self._remaining[name][uid]

    def drop(self, uids: Iterable[str]) -> None:
        """The step goes on without these samples."""
        for uid in uids:
            for remaining in self._remaining.values():
                remaining.pop(uid, None)

    def waits_for(self, name: str) -> list[str]:
        """The calls without which a call cannot go on, in topological order; empty if it can."""
        if self.is_over(name) or self.next_slice(name) is not None:
            return []
        unfinished = [other for other in self._graph.predecessors(name) if not self.is_over(other)]
        return list(dict.fromkeys([*unfinished, *self._must_wait_for(name)]))

    def _must_wait_for(self, name: str) -> list[str]:
        return [other for other in self._graph.must_follow(name) if not self.is_over(other)]


@dataclass(slots=True, eq=False)
class _LockRequest:
    name: str
    ranks: frozenset[int]
    granted: asyncio.Event = field(default_factory=asyncio.Event)


class RankLocks:
    """Exclusive use of sets of ranks.

    Example:
        async with locks.hold("actor_train", mesh.ranks):
            ...
    """

    def __init__(self) -> None:
        self._lock_requests: list[_LockRequest] = []
        """Granted or not, in the order in which they were made."""

    @asynccontextmanager
    async def hold(self, name: str, ranks: Collection[int]) -> AsyncIterator[None]:
        """Wait for the ranks, and have them while the block runs; the deadline is the caller's."""
        request = _LockRequest(name, frozenset(ranks))
        self._lock_requests.append(request)
        self._grant()
        try:
            await request.granted.wait()
            yield
        finally:
            self._lock_requests.remove(request)
            self._grant()

    def holders(self, ranks: Collection[int]) -> list[str]:
        """The calls that have one of these ranks now."""
        return sorted(
            {
                request.name
                for request in self._lock_requests
                if request.granted.is_set() and not request.ranks.isdisjoint(ranks)
            }
        )

    def _grant(self) -> None:
        spoken_for: set[int] = set()
        for request in self._lock_requests:
            if request.ranks.isdisjoint(spoken_for):  # nobody who asked before shares a rank with it, or waits for one
                request.granted.set()
            spoken_for |= request.ranks
