"""How far rollouts may run ahead of training: a gate where they start, a rule where they are consumed.

                  admit                     finish                    trained (by the master)
    prompt ────────────────► running ────────────────► accepted ────────────────► consumed
       ▲                        │ drop                     │ drop (stale, malformed)
       └────────────────────────┴──────────────────────────┘  may be admitted again, as if new

The gate (StalenessGate, which workers/manager/admission.py holds) admits a prompt while

    running < max_concurrent   and   accepted + running < (eta + version + 1) * batch_size - overtaking

where `accepted` counts every finished sample, trained or not, and `version` is the number of finished train steps.
Each step consumes one batch, so that a sample admitted at `version` is due at version + eta or before: trained in order
of admission, or with at most `overtaking` younger ones before it, it is never more than eta versions old. That many a
ReorderWindow lets pass; without one `overtaking` is 0, and a slow sample may come later than it was due. Hence the rule
at consumption (ReadySamples.take, which workers/master/sample_source.py applies): what is older than eta by then is not
trained on, but dropped and issued again. Gate and window make such drops rare; the rule makes the bound hold always,
and `require_trainable` ends the trainer rather than train on anything else.

All are pure: events in, decisions out. Callers number the steps and send the messages. The proof is in docs/rollout.md.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Limit = Literal["staleness", "concurrency"]
"""What a closed gate waits for: the next version of the trainer, or the end of a prompt that runs."""


@dataclass(slots=True, kw_only=True)
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

    batch_size: int
    """Prompts per train step."""
    max_staleness: int
    """Eta, in versions; 0 is synchronous training."""
    max_concurrent: int
    """Prompts that may run at the same time."""
    overtaking: int = 0
    """Younger samples that may be trained before an older one."""
    version: int = 0
    consumed: int = 0
    """Samples that were trained."""
    _running: dict[str, int] = field(default_factory=dict)
    _finished: dict[str, int] = field(default_factory=dict)  # order by uid: accepted, and not known to be consumed
    _next_order: int = 0

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
        ahead = self._most_admitted - self._ahead
        return max(0, min(ahead, self.max_concurrent - self.running))

    @property
    def _most_admitted(self) -> int:
        return (self.max_staleness + self.version + 1) * self.batch_size - self.overtaking

    @property
    def _ahead(self) -> int:
        return self.accepted + self.running

    @property
    def due_step(self) -> int:
        """The train step, from 0, which trains on the next sample at the latest, if in order: what is ahead of it fills
        the steps before. While the gate is open it is `version` to `version` + eta, whatever was dropped or lost.
        """
        return max(self.version, (self._ahead + self.overtaking) // self.batch_size)

    def least_version(self, due_step: int) -> int:
        """The oldest version by which a sample may be begun: it is young enough when its turn comes, if in order."""
        return due_step - self.max_staleness

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
        if self.limit() is not None:
            return None
        order = self._next_order
        self._next_order += 1
        self._running[uid] = order
        return order

    def finish(self, uid: str) -> None:
        """A running sample is complete and will be delivered."""
        if uid in self._running:
            self._finished[uid] = self._running.pop(uid)

    def drop(self, uid: str) -> None:
        """A sample will not be trained (failed reward, too stale); its place is free."""
        self._running.pop(uid, None)
        self._finished.pop(uid, None)

    def consume(self, uids: Iterable[str]) -> None:
        """These samples were trained; those that have no place were counted before."""
        for uid in uids:
            # A sample that still runs here was trained from a delivery that overtook its own finish event.
            if self._finished.pop(uid, None) is not None or self._running.pop(uid, None) is not None:
                self.consumed += 1

    def adopt(self, uid: str, *, order: int, is_finished: bool) -> None:
        """Count a sample that an earlier manager admitted and that is reported only now; a closed gate does not matter.

        The caller leaves out what a commit covers: `rebuild` has counted it as consumed.
        """
        if uid not in self._finished:
            self._running.pop(uid, None)
            (self._finished if is_finished else self._running)[uid] = order
        self._next_order = max(self._next_order, order + 1)

    def set_version(self, version: int) -> None:
        """A train step is done. Versions only grow until `rebuild`; an older one is a late message: nothing changes."""
        self.version = max(self.version, version)

    def rebuild(self, *, version: int, consumed: int) -> None:
        """Start anew: the manager was started again, or training went back to an earlier commit; `adopt` does the rest.

        Args:
            version: of the commit; may be lower than before.
            consumed: samples that were trained up to that commit.
        """
        self.version = version
        self.consumed = consumed
        self._finished.clear()
        self._running.clear()
        self._next_order = consumed  # consumed samples had numbers too, all different

    def limit(self) -> Limit | None:
        """What keeps the next prompt out; None if the gate is open."""
        if self._ahead >= self._most_admitted:
            return "staleness"
        return "concurrency" if self.running >= self.max_concurrent else None

    def explain(self) -> str:
        """Why the next prompt is or is not admitted, with the numbers, for people."""
        sides = f"(eta {self.max_staleness} + version {self.version} + 1) x {self.batch_size}"
        sides += f" - overtaking {self.overtaking}" if self.overtaking else ""
        match self.limit():
            case "staleness":
                return f"closed: accepted {self.accepted} + running {self.running} >= {sides}"
            case "concurrency":
                return f"closed: running {self.running} >= max_concurrent {self.max_concurrent}"
        return f"open for {self.capacity}: accepted {self.accepted} + running {self.running} < {sides}"


def is_trainable(min_version: int, trainer_version: int, eta: int) -> bool:
    """Whether a trainer at `trainer_version` may train on a sample whose oldest token `min_version` made.

    Not on what is more than eta versions old; nor on what is from a version that this trainer has not made yet.
    """
    return 0 <= trainer_version - min_version <= eta


class StaleTokenError(RuntimeError):
    """A batch has a token that is too old to train on: the code that chose the batch counted wrongly."""


def require_trainable(uid: str, *, oldest: int, trainer_version: int, eta: int) -> None:
    """The last look at a sample before a train step consumes it.

    Guarantee: no token that is trained on is more than eta versions old; nothing that chose the sample is trusted.

    Raises:
        StaleTokenError: with the numbers.
    """
    if not is_trainable(oldest, trainer_version, eta):
        raise StaleTokenError(
            f"sample {uid} must not be trained on at version {trainer_version}: its oldest token is of version "
            f"{oldest}, {trainer_version - oldest} versions ago, and rollout.max_head_offpolicyness allows 0 to {eta}; "
            "the trainer starts again from its last commit"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDecision:
    """The decision about the samples that are ready."""

    batch: tuple[str, ...] | None
    """Samples to train on now, oldest first; None if there are too few."""
    stale: tuple[str, ...] = ()
    """Samples to drop and issue again: they are more than eta versions old and only grow older."""
    waiting_for: int = 0
    """Samples that are missing until there is a batch."""
    behind: str = ""
    """The older prompt that samples wait for which would make a batch."""


class ReorderWindow:
    """How far a sample may get ahead of older prompts that are still being answered, in prompts.

    A prompt has its position in the order of all passes, and keeps it when issued again: which positions are missing
    follows from what is settled and what is ready, whichever workers died or restarted in between.

    Example:
        window = ReorderWindow(2, ["0:a", "0:b", "0:c"], is_settled=lambda uid: False)
        window.oldest_missing(lambda uid: uid != "0:a")    # "0:a", 0: 0:b may be trained before it, and 0:c may not
    """

    def __init__(self, size: int, prompts: Iterable[str], *, is_settled: Callable[[str], bool]) -> None:
        """
        Args:
            size: 1 is strictly in order; the oldest prompt that is missing may be overtaken by one fewer.
            prompts: the uids of all passes in the order in which they are dealt.
            is_settled: whether a uid is trained or dropped.
        """
        self.size = size
        self._prompts = enumerate(prompts)
        self._is_settled = is_settled
        self._positions: dict[str, int] = {}  # in order, as far as the youngest that was asked about

    def position_of(self, uid: str) -> int:
        """The position of an unsettled prompt among all prompts.

        Raises:
            ValueError: if it is none of them, or was settled when it was passed by.
        """
        while uid not in self._positions:
            position, other = next(self._prompts, (0, ""))
            if not other:
                raise ValueError(f"sample {uid!r} is no prompt of this run that is still to be trained on")
            if not self._is_settled(other):
                self._positions[other] = position
        return self._positions[uid]

    def oldest_missing(self, is_ready: Callable[[str], bool]) -> tuple[str, float]:
        """The oldest prompt that is missing, and its position; "" and infinity if the oldest prompt is ready."""
        for uid, position in list(self._positions.items()):
            if self._is_settled(uid):
                del self._positions[uid]
            elif not is_ready(uid):
                return uid, position
        return "", math.inf


class ReadySamples:
    """Samples whose inputs have all arrived, until a batch or their age takes them out.

    They lie apart by the version of their oldest token. So as long as there is no batch, to ask for one costs a look at
    each version, however many samples are held.

    A window cannot block the trainer for good. What is missing is being answered, or its place is free and the gate
    deals it before any other; only after training went back may all places be taken without it. Then all that the gate
    lets be made ahead is here sooner or later, and the batch is taken from it as if there were no window.

    Example:
        ready = ReadySamples()
        ready.add("0:b", order=1, head_version=3), ready.add("0:a", order=0, head_version=2)
        ready.take(version=3, eta=1, batch_size=2, remaining=10).batch      # ("0:a", "0:b")
    """

    def __init__(self, window: ReorderWindow | None = None) -> None:
        self._window = window
        self._orders_by_version: defaultdict[int, dict[str, int]] = defaultdict(dict)

    def __len__(self) -> int:
        return sum(map(len, self._orders_by_version.values()))

    def __contains__(self, uid: str) -> bool:
        return any(uid in orders for orders in self._orders_by_version.values())

    def add(self, uid: str, *, order: int, head_version: int) -> None:
        """A sample is complete.

        Args:
            order: admission number: the lower, the longer it waits. Where there is a window, its place counts instead.
            head_version: policy version of its oldest token, over all answers.

        Raises:
            ValueError: if it is here already: then something was counted wrongly.
        """
        if uid in self:
            raise ValueError(f"sample {uid!r} is ready twice; the second copy had to be turned away")
        self._orders_by_version[head_version][uid] = self._window.position_of(uid) if self._window else order

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
        too_old = [head for head in self._orders_by_version if head < version - eta]
        stale = tuple(_oldest_first(self._orders_by_version.pop(head) for head in too_old))
        fresh = [orders for head, orders in self._orders_by_version.items() if is_trainable(head, version, eta)]
        needed = min(batch_size, remaining)
        num_fresh = sum(map(len, fresh))
        if needed == 0 or num_fresh < needed:
            return BatchDecision(batch=None, stale=stale, waiting_for=needed - num_fresh)
        batch, behind = tuple(_oldest_first(fresh)[:needed]), ""
        if self._window is not None and len(self) <= (eta + 1) * batch_size - self._window.size:
            behind, position = self._window.oldest_missing(self.__contains__)
            batch = tuple(_oldest_first(fresh, before=position + self._window.size)[:needed])
        if len(batch) < needed:
            return BatchDecision(batch=None, stale=stale, waiting_for=needed - len(batch), behind=behind)
        for orders in fresh:
            for uid in batch:
                orders.pop(uid, None)
        return BatchDecision(batch=batch, stale=stale)


def _oldest_first(orders_by_uid: Iterable[Mapping[str, int]], *, before: float = math.inf) -> list[str]:
    """The samples of all of these whose order numbers are lower, by these numbers."""
    ordered = sorted((order, uid) for orders in orders_by_uid for uid, order in orders.items() if order < before)
    return [uid for _, uid in ordered]
