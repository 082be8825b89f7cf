"""Admission: who may start a prompt, and who runs what.

    rollout worker ──allocate(uid)──► Admission ──order number, or why not──►
                   ──finish(uid, outcome)──►        trial log ──commit──► consumed
                   ──report(everything it holds)──► adopt, after the manager or a worker has restarted

A manager that has just started, or whose trainer has gone back to an earlier commit, admits nothing until every living
rollout worker has reported what it runs and what it has finished: the counts come from those who hold the samples,
never from the memory of a process that is gone. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from corral.scheduling.policy_version import PolicyVersion
from corral.scheduling.staleness import StalenessGate
from corral.workers.requests.manager_messages import Allocation


@dataclass
class _Holder:
    """What one rollout worker was seen to run."""

    incarnation: str
    running: set[str] = field(default_factory=set)


class Admission:
    """Who may start a prompt: the staleness gate and who runs what, so that nothing leaks when a process dies.

    Pure. All of it is an optimisation: a gate that counts wrong makes samples that are too old, or too few, and the
    master trains on none of those that are too old, whatever was admitted (`ReadySamples` in scheduling/staleness.py).
    """

    def __init__(self, gate: StalenessGate, *, trainer: str) -> None:
        """trainer: the worker whose versions open the gate."""
        self._gate = gate
        self._trainer = trainer
        self._holders: dict[str, _Holder] = {}
        self._awaited: set[str] = set()
        self._version: PolicyVersion | None = None

    @property
    def running(self) -> int:
        return self._gate.running

    def explain(self) -> str:
        """Why the next prompt is or is not admitted."""
        if self._version is None:
            return "closed: the trainer has not published weights yet"
        if self._awaited:
            return f"closed: waiting for reports of {', '.join(sorted(self._awaited))}"
        return self._gate.explain()

    def opened_by(self) -> tuple[str, ...]:
        """The workers of which the gate waits for one; none if it is open."""
        if self._version is None:
            return (self._trainer,)
        if self._awaited:
            return tuple(sorted(self._awaited))
        match self._gate.limit():
            case "staleness":
                return (self._trainer,)
            case "concurrency":
                return tuple(sorted(worker for worker, holder in self._holders.items() if holder.running))
            case None:
                return ()

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
        self._holders.clear()
        self._awaited = set(workers)

    def allocate(self, worker: str, uid: str, *, incarnation: str) -> Allocation:
        """A rollout worker wants to start a prompt.

        A process that was started again before anybody missed the one before reports, too: what that one ran has places
        which nobody asks for again, and a gate that they close stays closed.
        """
        holder = self._holders.get(worker)
        if holder is None or holder.incarnation != incarnation:
            return Allocation(reason=f"closed: {worker} has not reported yet", must_report=True)
        if self._version is None or self._awaited:
            return self._refusal()
        if self._gate.order_of(uid) is not None and uid not in holder.running:
            # It finished by our count; its worker wants it again, so the sample was rejected downstream.
            self._gate.drop(uid)
        order = self._gate.admit(uid)
        if order is None:
            return self._refusal()
        holder.running.add(uid)
        return Allocation(order=order)

    def _refusal(self) -> Allocation:
        return Allocation(reason=self.explain(), waits_for=list(self.opened_by()))

    def finish(self, worker: str, uid: str, *, delivered: bool) -> None:
        """A prompt ended: delivered to the trainer, or dropped (its place is free again)."""
        holder = self._holders.get(worker)
        if holder is not None:
            holder.running.discard(uid)
        if delivered:
            self._gate.finish(uid)
        else:
            self._gate.drop(uid)

    def report(self, worker: str, *, incarnation: str, running: Mapping[str, int], finished: Mapping[str, int]) -> None:
        """A rollout worker says what it holds: whenever it is asked to, and as long as it has nothing to ask for."""
        holder = self._holders.get(worker)
        if holder is None or holder.incarnation != incarnation:
            for uid in (holder.running if holder else set()) - set(running):
                self._gate.abandon(uid)
            self._holders[worker] = _Holder(incarnation, set(running))
            for uid, order in finished.items():
                self._gate.adopt(uid, order=order, is_finished=True)
            for uid, order in running.items():
                self._gate.adopt(uid, order=order, is_finished=False)
        self._awaited.discard(worker)

    def workers(self) -> set[str]:
        """The rollout workers that are known or awaited."""
        return set(self._holders) | self._awaited

    def lost(self, worker: str) -> None:
        """A rollout worker is gone: what it ran is not running any more, what it finished is in its spool."""
        holder = self._holders.pop(worker, None)
        for uid in holder.running if holder else set():
            self._gate.abandon(uid)
        self._awaited.discard(worker)

    def consumed(self, uids: Iterable[str]) -> None:
        """A commit covers these samples."""
        self._gate.consume(uids)
