"""How far rollouts may run ahead of training: a gate where they start, a rule where they are consumed.

                  admit                     finish                    trained (by the master)
    prompt ────────────────► running ────────────────► accepted ────────────────► consumed
       ▲                        │ drop, abandon            │ drop (stale, malformed)
       └────────────────────────┴──────────────────────────┘  may be admitted again, as if new

The gate (StalenessGate, which workers/manager/admission.py holds) admits a prompt while

    running < max_concurrent   and   accepted + running < (eta + version + 1) * batch_size

where `accepted` counts every finished sample, trained or not, and `version` is the number of finished train steps.
Each step consumes one batch, so that a sample admitted at `version` is among the first (eta + version + 1) * batch_size
and is due at version + eta or before: trained in order, it is never more than eta versions old. But a slow sample can
be overtaken by younger ones and come later than it was due. Hence the rule at consumption (ReadySamples.take, which
workers/master/sample_source.py applies): what is older than eta by then is not trained on, but dropped and issued
again. The gate makes such drops rare; the rule makes the bound hold always.

Both are pure: events in, decisions out. Callers number the steps and send the messages.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum


class GateLimit(Enum):
    """What a closed gate waits for."""

    NONE = "none"
    """It is open."""
    STALENESS = "staleness"
    """The next version of the trainer."""
    CONCURRENCY = "concurrency"
    """The end of a prompt that runs."""


class StalenessGate:
    """Counts samples by uid and says whether another prompt may start. Every event may arrive twice.

    Example:
        gate = StalenessGate(batch_size=2, max_staleness=0, max_concurrent=8)
        gate.admit("0:a"), gate.admit("0:b")    # 0, 1: their order numbers
        gate.admit("0:c")                       # None: the batch of version 0 is full
        gate.finish("0:a"), gate.finish("0:b")
        gate.set_version(1)
        gate.admit("0:c")                       # 2
    """

    def __init__(self, *, batch_size: int, max_staleness: int, max_concurrent: int | None = None) -> None:
        """An open gate at version 0.

        Args:
            batch_size: prompts per train step.
            max_staleness: eta, in versions; 0 is synchronous training.
            max_concurrent: prompts that may run at the same time; None leaves it to the other rule.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be 0 or more, got {max_staleness}; 0 is synchronous training")
        if max_concurrent is not None and max_concurrent < 1:
            raise ValueError(f"max_concurrent must be at least 1, got {max_concurrent}; leave it out for no limit")
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._max_concurrent = max_concurrent
        self.version = 0
        self.consumed = 0
        """Samples that were trained."""
        self._running: dict[str, int] = {}
        self._finished: dict[str, int] = {}  # order by uid: accepted, and not known to be consumed
        self._next_order = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def accepted(self) -> int:
        """Samples that finished and were not dropped, including those trained already."""
        return self.consumed + len(self._finished)

    @property
    def capacity(self) -> int:
        """Prompts that would be admitted now, one after the other; 0 while the gate is closed."""
        ahead = (self._max_staleness + self.version + 1) * self._batch_size - self.accepted - self.running
        if self._max_concurrent is not None:
            ahead = min(ahead, self._max_concurrent - self.running)
        return max(0, ahead)

    def order_of(self, uid: str) -> int | None:
        """The order number of a running or accepted sample."""
        return self._running.get(uid, self._finished.get(uid))

    def admit(self, uid: str) -> int | None:
        """Let a prompt start if the gate is open.

        Returns:
            Its order number, by which older samples are trained first; None if it must ask again later (`explain` says
            why). A sample that runs already keeps its number: the first answer was lost on the way.

        Raises:
            ValueError: if the sample has finished already; it must be dropped before it can start again.
        """
        if uid in self._running:
            return self._running[uid]
        if uid in self._finished:
            raise ValueError(f"sample {uid!r} has finished already; it can start again only after it was dropped")
        if self.capacity == 0:
            return None
        order = self._next_order
        self._next_order += 1
        self._running[uid] = order
        return order

    def finish(self, uid: str) -> bool:
        """A running sample is complete and will be delivered. False if it was not running: the event came twice."""
        if uid not in self._running:
            return False
        self._finished[uid] = self._running.pop(uid)
        return True

    def drop(self, uid: str) -> bool:
        """A sample will not be trained (failed reward, too stale); its place is free. False if it had no place."""
        return self._running.pop(uid, None) is not None or self._finished.pop(uid, None) is not None

    def abandon(self, uid: str) -> bool:
        """Whoever ran it is gone; its place is free until it is admitted anew. A finished one stays, in its spool."""
        return self._running.pop(uid, None) is not None

    def consume(self, uids: Iterable[str]) -> int:
        """These samples were trained. Says how many of them counted; those that had no place were counted before."""
        consumed = 0
        for uid in uids:
            # A sample that still runs here was trained from a delivery that overtook its own finish event.
            if self._finished.pop(uid, None) is not None or self._running.pop(uid, None) is not None:
                consumed += 1
        self.consumed += consumed
        return consumed

    def adopt(self, uid: str, *, order: int, is_finished: bool) -> None:
        """Count a sample that an earlier manager admitted and that is reported only now; a closed gate does not matter.

        The caller leaves out what a commit covers: `rebuild` has counted it as consumed.
        """
        if uid not in self._finished:
            self._running.pop(uid, None)
            (self._finished if is_finished else self._running)[uid] = order
        self._next_order = max(self._next_order, order + 1)

    def set_version(self, version: int) -> bool:
        """A train step is done. Versions only grow until `rebuild`; an older one is a late message: nothing changes."""
        if version <= self.version:
            return False
        self.version = version
        return True

    def rebuild(self, *, version: int, consumed: int) -> None:
        """Start anew: the manager was started again, or training went back to an earlier commit; `adopt` does the rest.

        Args:
            version: of the commit; may be lower than before.
            consumed: samples that were trained up to that commit.
        """
        if version < 0 or consumed < 0:
            raise ValueError(f"version and consumed must be 0 or more, got version={version}, consumed={consumed}")
        self.version = version
        self.consumed = consumed
        self._finished.clear()
        self._running.clear()
        self._next_order = consumed  # consumed samples had numbers too, all different

    def limit(self) -> GateLimit:
        """What keeps the next prompt out."""
        if self.accepted + self.running >= (self._max_staleness + self.version + 1) * self._batch_size:
            return GateLimit.STALENESS
        if self._max_concurrent is not None and self.running >= self._max_concurrent:
            return GateLimit.CONCURRENCY
        return GateLimit.NONE

    def explain(self) -> str:
        """Why the next prompt is or is not admitted, with the numbers, for people."""
        sides = f"(eta {self._max_staleness} + version {self.version} + 1) x {self._batch_size}"
        match self.limit():
            case GateLimit.STALENESS:
                return f"closed: accepted {self.accepted} + running {self.running} >= {sides}"
            case GateLimit.CONCURRENCY:
                return f"closed: running {self.running} >= max_concurrent {self._max_concurrent}"
        return f"open for {self.capacity}: accepted {self.accepted} + running {self.running} < {sides}"


def is_trainable(min_version: int, trainer_version: int, eta: int) -> bool:
    """Whether a trainer at `trainer_version` may train on a sample whose oldest token `min_version` made.

    Not on what is more than eta versions old; nor on what is from a version that this trainer has not made yet.
    """
    return 0 <= trainer_version - min_version <= eta


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDecision:
    """What to do with the samples that are ready."""

    batch: tuple[str, ...] | None
    """Samples to train on now, oldest first; None if there are too few."""
    stale: tuple[str, ...] = ()
    """Samples to drop and issue again: they are more than eta versions old and only grow older."""
    waiting_for: int = 0
    """Samples that are missing until there is a batch."""


class ReadySamples:
    """Samples whose inputs have all arrived, until a batch or their age takes them out.

    They lie in one heap per version of their oldest token. So a batch costs what it takes out and at most eta + 1 looks
    besides, however many samples are held.

    Example:
        ready = ReadySamples()
        ready.add("0:b", order=1, head_version=3), ready.add("0:a", order=0, head_version=2)
        ready.take(version=3, eta=1, batch_size=2, remaining=10).batch      # ("0:a", "0:b")
    """

    def __init__(self) -> None:
        self._uids: set[str] = set()
        self._heap_by_version: dict[int, list[tuple[int, str]]] = {}

    def __len__(self) -> int:
        return len(self._uids)

    def add(self, uid: str, *, order: int, head_version: int) -> None:
        """A sample is complete.

        Args:
            order: admission number: the lower, the longer it waits.
            head_version: policy version of its oldest token, over all answers.

        Raises:
            ValueError: if it is here already: then something was counted wrongly.
        """
        if uid in self._uids:
            raise ValueError(f"sample {uid!r} is ready twice; the second copy had to be turned away")
        self._uids.add(uid)
        heapq.heappush(self._heap_by_version.setdefault(head_version, []), (order, uid))

    def take(self, *, version: int, eta: int, batch_size: int, remaining: int) -> BatchDecision:
        """Choose the samples of the next train step, and forget them and what is stale.

        Samples of a version that the trainer has not reached are held back.

        Args:
            version: of the policy that will train on them.
            eta: most versions between a token and the policy that trains on it.
            batch_size: prompts per step.
            remaining: prompts that are neither trained nor given up in the whole run, including those that are ready.
                Where fewer than a batch remain, they are the last, smaller one.

        Raises:
            ValueError: if more samples are ready than remain: then something was counted wrongly.
        """
        if remaining < len(self):
            raise ValueError(
                f"{len(self)} samples are ready but only {remaining} remain in the run; one was delivered after "
                "training"
            )
        stale = self._take_stale(version - eta)
        fresh = [heap for head, heap in self._heap_by_version.items() if is_trainable(head, version, eta)]
        needed = min(batch_size, remaining)
        num_fresh = sum(len(heap) for heap in fresh)
        if needed == 0 or num_fresh < needed:
            return BatchDecision(batch=None, stale=stale, waiting_for=needed - num_fresh)
        batch = tuple(_pop_oldest(fresh, needed))
        self._uids.difference_update(batch)
        return BatchDecision(batch=batch, stale=stale)

    def _take_stale(self, oldest_version: int) -> tuple[str, ...]:
        """Samples from before this version, oldest first."""
        too_old = [head for head in self._heap_by_version if head < oldest_version]
        taken = sorted(entry for head in too_old for entry in self._heap_by_version.pop(head))
        stale = tuple(uid for _, uid in taken)
        self._uids.difference_update(stale)
        return stale


def _pop_oldest(heaps: Iterable[list[tuple[int, str]]], count: int) -> Iterator[str]:
    """The smallest entries of all heaps together, in order."""
    heads = [(heap[0], heap) for heap in heaps if heap]
    heapq.heapify(heads)
    for _ in range(count):
        (_, uid), heap = heads[0]
        heapq.heappop(heap)
        if heap:
            heapq.heapreplace(heads, (heap[0], heap))
        else:
            heapq.heappop(heads)
        yield uid
