"""The supervisor's extra jobs: a thread of their own asks the cluster, so that nobody waits for its answers.

    Supervisor --drive(), check_nodes, give_up--> one thread, turn by turn: ExtraJobBook --its hands--> Cluster
        ^                                                                       |
        +-- NodesEvent: what the workers of an allocation may do ---------------+

While it lives the supervisor touches control/supervisor-alive; the extra jobs end by themselves when it stops.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from corral.experiments.trial.directory import atomic_write, remove_file
from corral.launcher.cluster.errors import ClusterError, ClusterUnreachableError
from corral.launcher.cluster.jobs import Job, JobPhase
from corral.launcher.cluster.own_jobs import JobNote, OwnJobs
from corral.launcher.extra_jobs.book import ExtraJobBook, JobSighting, NodesEvent
from corral.launcher.extra_jobs.gang import GangGuard
from corral.launcher.layout.layout import PlacedTrial, RunningAllocation, RunningAllocations
from corral.launcher.slurm.cluster import SlurmCluster

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ALIVE_INTERVAL_S = 10.0
_CLEAR_TIMEOUT_S = 15.0
_CLOSE_TIMEOUT_S = 15.0


@dataclass(slots=True, kw_only=True)
class ExtraJobs:
    """The jobs of one attempt's groups and elastic workers."""

    cluster: SlurmCluster
    trial: PlacedTrial
    attempt: int
    own: RunningAllocations
    """What the supervisor's own job has."""
    record: Callable[..., None]
    """Adds a line to the journal."""
    exclude_nodes: Sequence[str] = ()
    """Nodes that failed under this trial."""
    _own_jobs: OwnJobs = field(init=False)
    _index_by_name: dict[str, int] = field(init=False)
    _gang: set[str] = field(init=False)
    _book: ExtraJobBook = field(init=False)
    _thread: ThreadPoolExecutor = field(init=False)
    _turn: Future[None] | None = None
    _running: dict[int, RunningAllocation] = field(default_factory=dict)
    """Of extra jobs, by index, as the supervisor has been told."""
    _wishes: deque[Callable[[], None]] = field(default_factory=deque)
    """For the next turn."""
    _news: deque[tuple[str, dict[str, object]]] = field(default_factory=deque)
    _events: deque[NodesEvent] = field(default_factory=deque)
    _looked_at: float = float("-inf")
    _touched_at: float = float("-inf")
    _is_unseen: bool = False

    def __post_init__(self) -> None:
        plan = self.trial.plan
        self._own_jobs = OwnJobs(self.trial.directory, plan.trial)
        own = {index: one for index, one in enumerate(self.trial.layout.allocations) if one.is_extra_job}
        self._index_by_name = {allocation.name: index for index, allocation in own.items()}
        self._gang = {allocation.name for allocation in own.values() if allocation.role == "group"}
        gang = GangGuard(
            sorted(self._gang),
            timeout_s=plan.launch.gang_timeout_s,
            chance=random.Random(f"{plan.seed} {plan.trial.uuid}"),  # noqa: S311 - spreads load, protects nothing
        )
        self._book = ExtraJobBook(specs=[*own.values()], attempt=self.attempt, gang=gang, hands=self)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="extra-jobs")

    def drive(self, now: float) -> list[NodesEvent]:
        """One turn of the loop: has the next turn taken once the last is over; returns what became of the nodes."""
        if not self._index_by_name:
            return []
        self._touch(now)
        if self._turn is None or self._turn.done():
            if self._turn is not None:
                self._turn.result()
            self._turn = self._thread.submit(self._take_turn, now)
        self._record_news()
        told = [self._events.popleft() for _ in range(len(self._events))]
        for event in told:
            if event.nodes is not None:
                self._running[self._index_by_name[event.name]] = event.nodes
            elif event.news == "lost":
                del self._running[self._index_by_name[event.name]]
        return told

    def check_nodes(self, name: str) -> None:
        """Find out whether the nodes of an allocation are still there."""
        self._wishes.append(partial(self._book.check, name))

    def give_up(self, name: str) -> None:
        """Nothing will be started any more in an allocation: its nodes are not needed."""
        self._wishes.append(partial(self._book.release, name))

    def allocations(self) -> RunningAllocations:
        """What runs at the moment."""
        return {**self.own, **self._running}

    def why_away(self, allocation: int) -> str:
        """Why an allocation is not there, for an error's text."""
        name = self.trial.layout.allocations[allocation].name
        return self._book.why_away(name) if name in self._index_by_name else "it is no job of its own"

    def close(self) -> None:
        """Cancels every extra job, in bounded time; what is left then ends by itself."""
        if not self._index_by_name:
            return
        last = self._thread.submit(self._cancel_all)
        done, _ = wait([last], timeout=_CLOSE_TIMEOUT_S)
        left = f"the cluster did not answer within {_CLOSE_TIMEOUT_S:.0f} s" if not done else last.result()
        self._record_news()
        if left:
            self.record("extra_jobs_left", jobs=sorted(self._book.jobs()), cause=left)
        remove_file(self.trial.directory.supervisor_alive_path)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _record_news(self) -> None:
        while self._news:
            event, fields = self._news.popleft()
            self.record(event, **fields)

    def _touch(self, now: float) -> None:
        if now - self._touched_at < _ALIVE_INTERVAL_S:
            return
        self._touched_at, path = now, self.trial.directory.supervisor_alive_path
        try:
            atomic_write(path, f"{time.time()}\n".encode())
        except OSError as error:
            logger.warning("cannot touch %s: %s", path, error)

    # In the thread, which alone changes the book.

    def _take_turn(self, now: float) -> None:
        while self._wishes:
            self._wishes.popleft()()
        if now - self._looked_at >= self._book.look_interval_s(now):
            self._looked_at = now
            self._look(now)
        self._book.tick(now)

    def _look(self, now: float) -> None:
        try:
            sightings = self._sightings()
        except ClusterError as error:
            if not self._is_unseen:
                self.news("extra_jobs_unseen", cause=str(error))
            self._is_unseen = True
            return
        if self._is_unseen:
            self.news("extra_jobs_seen_again")
        self._is_unseen = False
        self._book.seen(sightings, now)

    def _sightings(self) -> list[JobSighting]:
        seen = [JobSighting(name=note.allocation, attempt=note.attempt, job=job) for job, note in self._our_jobs()]
        gang = [one for one in seen if one.name in self._gang and one.attempt == self.attempt and one.job.is_staying]
        needed = [*(allocation.steps_job_id for allocation in self.own.values()), *(one.job.job_id for one in gang)]
        elastic = [one.job.job_id for one in seen if one.name not in self._gang and one.job.phase is JobPhase.RUNNING]
        return [
            self._with_doubts(one, [other for other in needed if other != one.job.job_id], elastic)
            if one in gang and one.job.phase is JobPhase.WAITING
            else one
            for one in seen
        ]

    def _with_doubts(self, one: JobSighting, needed: Sequence[str], elastic: Sequence[str]) -> JobSighting:
        try:
            never = self.cluster.why_never(one.job, beside=needed)
            is_crowded_out = not never and bool(elastic and self.cluster.why_never(one.job, beside=[*needed, *elastic]))
        except ClusterError:
            return one  # the next look asks again
        return replace(one, never=never, is_crowded_out=is_crowded_out)

    def _cancel_all(self) -> str:
        """Why some may be left, or "" if none is."""
        try:
            alive = {job.job_id for job, _ in self._our_jobs()}
            for job_id in sorted(alive.union(self._book.jobs())):
                self.cluster.cancel(job_id)
        except ClusterError as error:
            return str(error)
        return ""

    def _our_jobs(self) -> list[tuple[Job, JobNote]]:
        found = self._own_jobs.select(self.cluster.jobs())
        return [(job, note) for job, note in found if note.allocation in self._index_by_name]

    # The book's hands.

    def ask_for(self, name: str) -> str:
        try:
            job_id = self.cluster.submit_extra_job(
                self.trial, self._index_by_name[name], attempt=self.attempt, exclude_nodes=self.exclude_nodes
            )
        except (OSError, ValueError) as error:
            raise ClusterUnreachableError(str(error)) from error  # it could not be asked
        try:
            self._own_jobs.note(job_id, allocation=name, attempt=self.attempt)
        except OSError as error:
            logger.warning("job %s could not be noted in control/: %s", job_id, error)
        return job_id

    def cancel(self, job_id: str) -> None:
        _ask(partial(self.cluster.cancel, job_id), f"job {job_id} could not be cancelled")

    def end_steps(self, job_id: str) -> None:
        end = partial(self.cluster.end_steps, job_id, timeout_s=_CLEAR_TIMEOUT_S)
        _ask(end, f"steps of job {job_id} could not be ended")

    def why_leaving(self, job_id: str) -> str | None:
        # The supervision waits for this no longer than its own deadline.
        return _ask(partial(self.cluster.why_leaving, job_id), f"job {job_id} could not be asked for")

    def tell(self, event: NodesEvent) -> None:
        self._events.append(event)

    def news(self, event: str, **fields: object) -> None:
        self._news.append((event, fields))


def _ask(cluster: Callable[[], T], failure: str) -> T | None:
    """The cluster's answer; None if there is none, which the log says."""
    try:
        return cluster()
    except ClusterError as error:
        logger.warning("%s: %s", failure, error)
        return None
