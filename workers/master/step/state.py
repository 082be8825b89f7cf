"""StepState: how far each call of a train step has come with the step's batch.

    batch ──► remaining of each call ──next_go: n_seqs of them have its input keys──► a go ──finish_go──► output keys
                     ▲                                                                 │
                     └──────────────── until none remains: the call is over ◄──────────┘

Pure: which calls really run, on which ranks, at what time, is decided in step_runner.py. Every call takes every sample
of the batch exactly once, and never before all of its input keys exist: this is where that holds.
"""

from collections.abc import Iterable, Sequence

from corral.scheduling.dataflow import DataflowGraph


class StepState:
    """One train step on one batch.

    Example:
        state = StepState(graph, ["0:a", "0:b"])
        state.next_go("ref_inf")                    # ["0:a", "0:b"]
        state.next_go("actor_train")                # None: there are no ref_logprobs yet
        state.finish_go("ref_inf", ["0:a", "0:b"])
        state.next_go("actor_train")                # ["0:a", "0:b"]
    """

    def __init__(self, graph: DataflowGraph, batch: Sequence[str]) -> None:
        self._graph = graph
        self._remaining = {call.name: dict.fromkeys(batch) for call in graph.step_calls}
        """By call, what it has not taken yet, oldest first: its output keys exist for all others."""

    @property
    def is_done(self) -> bool:
        return not any(self._remaining.values())

    def is_over(self, name: str) -> bool:
        """Whether a call has taken the whole batch."""
        return not self._remaining[name]

    def is_last_go(self, name: str, uids: Sequence[str]) -> bool:
        """Whether nothing remains for a call after this go."""
        return len(uids) == len(self._remaining[name])

    def next_go(self, name: str) -> list[str] | None:
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

    def finish_go(self, name: str, uids: Sequence[str]) -> None:
        """A call has taken these samples, and made its output keys of them."""
        if self.is_last_go(name, uids):
            self._remaining[name].clear()
        else:
            for uid in uids:
                del self._remaining[name][uid]

    def drop(self, uids: Iterable[str]) -> None:
        """The step goes on without these samples."""
        for uid in uids:
            for remaining in self._remaining.values():
                remaining.pop(uid, None)

    def waits_for(self, name: str) -> list[str]:
        """The calls without which a call cannot go on, in topological order; empty if it can."""
        if self.is_over(name) or self.next_go(name) is not None:
            return []
        unfinished = [other for other in self._graph.predecessors(name) if not self.is_over(other)]
        return list(dict.fromkeys([*unfinished, *self._must_wait_for(name)]))

    def _must_wait_for(self, name: str) -> list[str]:
        return [other for other in self._graph.must_follow(name) if not self.is_over(other)]
