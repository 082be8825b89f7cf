"""Admission: which prompt is dealt to which rollout worker, and when.

                    ask                       the gate is open                finish
    rollout worker ─────► waiting, by load ──────────────────────► running ─────────────► spooled ──a commit──► trained,
                                 ▲               the next prompt      │ failed, its         │ rejected         dropped
                                 │                      ▲             │ worker is gone      │ worker stays away
                                 └── must report        └──── first ──┴─────────────────────┘

Prompts are dealt one at a time, those issued again first, then in the order of the seed; who runs least is served
first. No rollout worker owns any: workers come and go, and a prompt goes on elsewhere.

A manager that has just started, or whose trainer has gone back to an earlier commit, deals nothing until every living
rollout worker has reported what it runs and what is in its spool: the counts come from those who hold the samples,
never from the memory of a process that is gone.

Guarantee: no prompt is forgotten. The walk over all passes begins anew at each start and after each fall-back, and
passes over nothing but what the committed ledger holds or somebody has who was heard of; what somebody had comes back
when it ends otherwise than by a commit, which its worker says until it is answered, or when its worker is gone. That
none is trained twice is the master's business (`SequenceBuffer.put`): a prompt that two workers have by mistake costs
time. Pure.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from corral.name_resolve.base import MAX_BEAT_INTERVAL_S
from corral.scheduling.policy_version import PolicyVersion
from corral.scheduling.staleness import StalenessGate
from corral.workers.manager.least_loaded import LeastLoaded
from corral.workers.requests.manager_messages import Allocation, Outcome, WaitingFor

RECORD_GRACE_S: Final = 12.0  # a name service that lost everything has the manager's record back within 10 s
assert RECORD_GRACE_S > 2 * MAX_BEAT_INTERVAL_S
SPOOL_GRACE_S: Final = 60.0  # a worker that is started again delivers what it has made; then others make it anew


class PromptQueue:
    """All prompts in the order of the seed, and before them those that are issued again.

    Args:
        passes: gives all uids of all passes, in order, each time that it is called.
        is_settled: whether a uid is in the ledger, or somebody has it, and must not be dealt.
    """

    def __init__(self, passes: Callable[[], Iterable[str]], *, is_settled: Callable[[str], bool]) -> None:
        self._passes = passes
        self._is_settled = is_settled
        self._again: deque[str] = deque()
        self._fresh: Iterator[str] = iter(passes())
        self._next: str | None = None

    def peek(self) -> str | None:
        """The next prompt to deal, until it is settled; None if there is none at the moment."""
        while self._again and self._is_settled(self._again[0]):
            self._again.popleft()
        if self._again:
            return self._again[0]
        while self._next is None or self._is_settled(self._next):
            self._next = next(self._fresh, None)
            if self._next is None:
                return None
        return self._next

    def put_back(self, uid: str) -> None:
        """A prompt that was dealt failed, was rejected, or lost its worker: it is issued again, before all others."""
        self._again.append(uid)

    def start_over(self) -> None:
        """Something that was settled is so no longer: all passes are looked at again, from the beginning."""
        self._again.clear()
        self._fresh, self._next = iter(self._passes()), None


@dataclass(slots=True)
class _Holder:
    """A process of a rollout worker that has reported."""

    incarnation: str
    running: dict[str, int] = field(default_factory=dict)
    """Order by uid."""
    last: Allocation | None = None
    """Its last prompt, in case the answer was lost on its way."""


class Admission:
    """Decides which rollout worker gets the next prompt: the staleness gate, and the prompts of each worker.

    That the gate counts right is an optimisation: one that counts wrong makes samples that are too old, or too few, and
    the master trains on none of those that are too old, whatever was admitted (`ReadySamples` in
    scheduling/staleness.py).

    Example:
        admission.report("rollout_worker/0", incarnation="a", running={}, finished={}, dropped={})
        admission.ask("rollout_worker/0", incarnation="a", last=None)    # None: it waits for its turn
        list(admission.deal())                                           # [("rollout_worker/0", Allocation(...))]
    """

    def __init__(
        self,
        gate: StalenessGate,
        *,
        passes: Callable[[], Iterable[str]],
        is_committed: Callable[[str], bool],
        is_issued: Callable[[str], bool] = lambda _: True,
        trainer: str,
    ) -> None:
        """
        Args:
            passes: gives all uids of all passes, in order, each time that it is called.
            is_committed: whether a commit covers a uid, as trained or dropped.
            is_issued: whether a uid is among those of `passes` still; see `prompts_have_changed`.
            trainer: the worker whose versions open the gate.
        """
        self._gate = gate
        self._is_committed = is_committed
        self._is_issued = is_issued
        self._trainer = trainer
        self._holders: dict[str, _Holder] = {}
        self._spooled: dict[str, str] = {}
        """The worker that has finished or given up a prompt, by uid; no commit covers it."""
        self._missed: dict[str, float] = {}
        """Since when workers that have prompts are not connected."""
        self._waiting = LeastLoaded()
        self._unknown: dict[str, None] = {}
        """The workers that waited when their prompts were forgotten."""
        self._awaited: set[str] = set()
        self._tries = Counter[str]()
        """How often answers to a prompt have had no finite loss."""
        self._version: PolicyVersion | None = None
        self._prompts = PromptQueue(passes, is_settled=self._is_settled)

    @property
    def running(self) -> int:
        return self._gate.running

    def least_version(self, due_step: int) -> int:
        """The oldest version by which a prompt that was dealt may be begun."""
        return self._gate.least_version(due_step)

    def prompts_have_changed(self) -> None:
        """`passes` gives others than before."""
        self._prompts.start_over()

    def _is_settled(self, uid: str) -> bool:
        if not self._is_issued(uid):
            return True
        return self._gate.order_of(uid) is not None or uid in self._spooled or self._is_committed(uid)

    # Why a prompt is or is not dealt

    def waiting_for(self) -> WaitingFor | Literal[""]:
        """What the next prompt waits for; "" if it can be dealt."""
        if self._version is None:
            return "weights"
        if self._awaited:
            return "reports"
        return "prompts" if self._prompts.peek() is None else self._gate.limit() or ""

    def refusal(self) -> Allocation:
        """Why nothing is dealt, and the workers of which it waits for one."""
        match reason := self.waiting_for():
            case "weights":
                text, workers = "closed: the trainer has not published weights yet", [self._trainer]
            case "reports":
                workers = sorted(self._awaited)
                text = f"closed: waiting for reports of {', '.join(workers)}"
            case "prompts":
                text, workers = "to train on what was made: all prompts are dealt", [self._trainer]
            case "concurrency":
                workers = sorted(worker for worker, holder in self._holders.items() if holder.running)
                text = self._gate.explain()
            case _:
                text, workers = self._gate.explain(), [self._trainer] if reason else []
        return Allocation(waiting_for=reason, reason=text, waits_for=workers)

    # Rollout workers

    def ask(self, worker: str, *, incarnation: str, last: int | None) -> Allocation | None:
        """A rollout worker wants a prompt: None if it has to wait for its turn, see `deal`.

        Args:
            last: order number of the prompt that its process was dealt last.
        """
        holder = self._holders.get(worker)
        if holder is None or holder.incarnation != incarnation:
            # The process before it may be gone before anybody missed it: what that one ran nobody else speaks of.
            return Allocation(must_report=True)
        if (lost := holder.last) is not None and lost.order != last:
            if self._gate.order_of(lost.uid) == lost.order:
                return lost
            holder.running.pop(lost.uid, None)  # others have made it meanwhile
            holder.last = None
        self._waiting.put(worker, (len(holder.running),))
        return None

    def leave(self, worker: str) -> None:
        """It does not wait for a prompt any more."""
        self._waiting.remove(worker)
        self._unknown.pop(worker, None)

    def deal(self) -> Iterator[tuple[str, Allocation]]:
        """The answers for workers that wait. A worker that is not known any more gets a request to report."""
        while self._unknown:
            yield self._unknown.popitem()[0], Allocation(must_report=True)
        while (least := self._waiting.least()) is not None and not self.waiting_for():
            _, worker = least
            uid, due_step = self._prompts.peek(), self._gate.due_step
            order = None if uid is None else self._gate.admit(uid)
            if uid is None or order is None:
                raise AssertionError("the gate is open and there is a prompt")
            self._waiting.remove(worker)
            holder = self._holders[worker]
            holder.running[uid] = order
            holder.last = Allocation(uid=uid, order=order, due_step=due_step, tries=self._tries[uid])
            yield worker, holder.last

    def finish(self, worker: str, uid: str, *, order: int, outcome: Outcome) -> None:
        """A prompt ended; said of one that was dealt anew in the meantime, it changes nothing."""
        holder = self._holders.get(worker)
        if holder is not None and holder.running.get(uid) == order:
            del holder.running[uid]
            if worker in self._waiting:
                self._waiting.put(worker, (len(holder.running),))
        is_in_spool = self._gate.order_of(uid) is None and self._spooled.get(uid) == worker  # as given up
        if self._is_committed(uid) or not (is_in_spool or self._gate.order_of(uid) == order):
            return
        if outcome in ("again", "otherwise"):
            if outcome == "otherwise":
                self._tries[uid] += 1
            self._free(uid)
            return
        self._spooled[uid] = worker
        if outcome == "finished":
            self._gate.finish(uid)
        else:
            self._gate.drop(uid)

    def report(
        self,
        worker: str,
        *,
        incarnation: str,
        running: Mapping[str, int],
        finished: Mapping[str, int],
        dropped: Iterable[str] = (),
    ) -> None:
        """A rollout worker says what it holds, with order numbers: whenever it is asked to.

        What a commit covers is counted already, even if the rollout worker has not heard of it yet. Answers to a prompt
        that was dealt anew since do not count: the worker that got it last says what becomes of it.
        """
        self._awaited.discard(worker)
        holder = self._holders.get(worker)
        if holder is not None and holder.incarnation == incarnation:
            return
        here = {uid: order for uid, order in running.items() if not self._is_committed(uid)}
        finished = {uid: order for uid, order in finished.items() if (self._gate.order_of(uid) or 0) <= order}
        in_spool = {uid for uid in (*finished, *dropped) if not self._is_committed(uid)}
        before = [*holder.running] if holder else []
        before += [uid for uid, other in self._spooled.items() if other == worker]
        for uid in before:
            if uid not in here and uid not in in_spool:
                self._free(uid)
            elif uid not in here and uid not in finished:
                self._gate.drop(uid)
        self._holders[worker] = _Holder(incarnation, here)
        self._spooled |= dict.fromkeys(in_spool, worker)
        for uid in in_spool & finished.keys():
            self._gate.adopt(uid, order=finished[uid], is_finished=True)
        for uid, order in here.items():
            if (self._gate.order_of(uid) or 0) <= order:
                self._gate.adopt(uid, order=order, is_finished=False)

    def _free(self, uid: str) -> None:
        """Nobody has it any more: its place is free, and it is issued again."""
        self._gate.drop(uid)
        self._spooled.pop(uid, None)
        self._prompts.put_back(uid)

    def look(self, alive: Collection[str], *, now: float) -> list[str]:
        """Gives to others what the dead had; `alive` are the rollout workers that are connected.

        Args:
            now: of any clock that runs on, in seconds.

        Returns:
            Who is taken for gone from now on.
        """
        known = {*self._holders, *self._awaited, *self._spooled.values()}
        self._missed = {worker: self._missed.get(worker, now) for worker in sorted(known - set(alive))}
        gone = []
        for worker, since in self._missed.items():
            if now - since >= RECORD_GRACE_S and (worker in self._holders or worker in self._awaited):
                gone.append(worker)
                self._lose(worker)
            if now - since >= SPOOL_GRACE_S:
                for uid in [uid for uid, other in self._spooled.items() if other == worker]:
                    self._free(uid)
        return gone

    def _lose(self, worker: str) -> None:
        """What it ran is run by others; what it has finished is in its spool, and it may come back."""
        self._awaited.discard(worker)
        self._forget(worker)
        holder = self._holders.pop(worker, None)
        for uid, order in holder.running.items() if holder else ():
            if self._gate.order_of(uid) == order and uid not in self._spooled:
                self._free(uid)

    def _forget(self, worker: str) -> None:
        if worker in self._waiting:
            self._waiting.remove(worker)
            self._unknown[worker] = None

    # The trainer

    def at_version(
        self, version: PolicyVersion, *, consumed: int, workers: Iterable[str], starts_over: bool = False
    ) -> None:
        """The trainer has published weights.

        Args:
            consumed: samples trained by all commits; counts only where the gate starts anew.
            workers: the rollout workers that live; where the gate starts anew, each must report.
            starts_over: commits that were counted are rejected, so the gate starts anew whatever the version.
        """
        before, self._version = self._version, version
        if before is not None and version.step >= before.step and not starts_over:
            self._gate.set_version(version.step)
            return
        self._gate.rebuild(version=version.step, consumed=consumed)
        for waiting in list(self._waiting):
            self._forget(waiting)
        self._holders.clear()
        self._spooled.clear()
        self._awaited = set(workers)
        self._prompts.start_over()

    def note_commit(self, trained: Iterable[str], dropped: Iterable[str] = ()) -> None:
        """A commit covers these samples."""
        trained, dropped = list(trained), list(dropped)
        self._gate.consume(trained)
        for uid in dropped:
            self._gate.drop(uid)  # where two had it, the one who finished it has a place
        for uid in (*trained, *dropped):
            self._spooled.pop(uid, None)
            self._tries.pop(uid, None)
