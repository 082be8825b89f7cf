"""The supervisor's hands for its extra jobs: the cluster is asked in a thread, so that nobody waits for its answers.

    Supervisor --drive()--> ExtraJobBook (pure) --ask_for, cancel, ...--> one thread: Cluster
        ^                        |   ^                                           |
        |                        |   +--------------- answers, in order ---------+
        +-- NodesEvent: what the workers of an allocation may do

While it lives the supervisor touches control/supervisor-alive; the extra jobs end by themselves when it stops.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory, atomic_write
from corral.experiments.trial.removal import remove_file
from corral.launcher.cluster.cluster import Cluster, supervisor_alive_path
from corral.launcher.cluster.errors import ClusterError, ClusterUnreachableError
from corral.launcher.cluster.jobs import Job, JobPhase
from corral.launcher.cluster.own_jobs import JobNote, OwnJobs, own_jobs_of_plan
from corral.launcher.extra_jobs.book import ExtraJobBook, JobSighting, NodesEvent
from corral.launcher.extra_jobs.gang import GangGuard
from corral.launcher.layout.layout import Layout, RunningAllocation, RunningAllocations

logger = logging.getLogger(__name__)

_ALIVE_INTERVAL_S = 10.0
_CLEAR_TIMEOUT_S = 15.0
_CLOSE_TIMEOUT_S = 15.0

T = TypeVar("T")
Answer = Callable[[float], None]
"""What the state machine makes of a finished request; takes the time."""


@dataclass(slots=True, kw_only=True)
class ExtraJobs:
    """The jobs of one attempt's groups and elastic workers."""

    cluster: Cluster
    plan: RunPlan
    layout: Layout
    directory: TrialDirectory
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
    _requests: list[Future[Answer]] = field(default_factory=list)
    _look: Future[Answer] | None = None
    _events: list[NodesEvent] = field(default_factory=list)
    _looked_at: float = float("-inf")
    _touched_at: float = float("-inf")
    _is_unseen: bool = False

    def __post_init__(self) -> None:
        self._own_jobs = own_jobs_of_plan(self.plan, self.directory)
        own = {index: one for index, one in enumerate(self.layout.allocations) if one.is_extra_job}
        self._index_by_name = {allocation.name: index for index, allocation in own.items()}
        self._gang = {allocation.name for allocation in own.values() if allocation.role == "group"}
        gang = GangGuard(
            sorted(self._gang),
            timeout_s=self.plan.launch.gang_timeout_s,
            chance=random.Random(f"{self.plan.seed} {self.plan.trial.uuid}"),  # noqa: S311 - spreads load, protects nothing
        )
        self._book = ExtraJobBook(specs=[*own.values()], attempt=self.attempt, gang=gang, hands=self)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="extra-jobs")

    def drive(self, now: float) -> list[NodesEvent]:
        """One turn of the loop: takes in answers, asks for more; returns what became of the nodes."""
        if not self._index_by_name:
            return []
        self._touch(now)
        while self._requests and self._requests[0].done():
            self._requests.pop(0).result()(now)
        self._book.tick(now)
        if (self._look is None or self._look.done()) and now - self._looked_at >= self._book.look_interval_s(now):
            self._looked_at = now
            self._look = self._request(self._sightings, self._seen)
        events, self._events = self._events, []
        return events

    def check_nodes(self, name: str) -> None:
        """Find out whether the nodes of an allocation are still there."""
        nodes = self._book.nodes_of(name)
        if nodes is not None:
            self._request(partial(self.cluster.why_leaving, nodes[0]), partial(self._checked, name, nodes[0]))

    def give_up(self, name: str) -> None:
        """Nothing will be started any more in an allocation: its nodes are not needed."""
        self._book.release(name)

    def allocations(self) -> RunningAllocations:
        """What runs at the moment."""
        running = dict(self.own)
        for name, index in self._index_by_name.items():
            nodes = self._book.nodes_of(name)
            if nodes is not None:
                running[index] = RunningAllocation(job_id=nodes[0], het_group=None, hosts=nodes[1])
        return running

    def why_away(self, allocation: int) -> str:
        """Why an allocation is not there, for an error's text."""
        name = self.layout.allocations[allocation].name
        return self._book.why_away(name) if name in self._index_by_name else "it is no job of its own"

    def close(self) -> None:
        """Cancels every extra job, in bounded time; what is left then ends by itself."""
        if not self._index_by_name:
            return
        for request in self._requests:
            request.cancel()  # whatever has not begun
        known = set(self._book.jobs())
        last = self._thread.submit(lambda: self._cancel_all(known))
        done, _ = wait([last], timeout=_CLOSE_TIMEOUT_S)
        left = f"the cluster did not answer within {_CLOSE_TIMEOUT_S:.0f} s" if not done else last.result()
        if left:
            self.record("extra_jobs_left", jobs=sorted(known), cause=left)
        remove_file(supervisor_alive_path(self.directory))
        self._thread.shutdown(wait=False, cancel_futures=True)

    # The book's hands.

    def ask_for(self, name: str) -> None:
        self._request(partial(self._submit, name), partial(self._submitted, name))

    def cancel(self, job_id: str) -> None:
        self._request(partial(self.cluster.cancel, job_id), partial(_warn, f"job {job_id} could not be cancelled"))

    def clear(self, name: str, job_id: str) -> None:
        end_steps = partial(self.cluster.end_steps, job_id, timeout_s=_CLEAR_TIMEOUT_S)
        self._request(end_steps, partial(self._cleared, name, job_id))

    def tell(self, event: NodesEvent) -> None:
        self._events.append(event)

    def _request(self, ask: Callable[[], T], hear: Callable[[T | ClusterError, float], None]) -> "Future[Answer]":
        """Asks in the thread; the answer is heard in the supervisor's, which alone touches the state machine."""

        def asked() -> Answer:
            try:
                return partial(hear, ask())
            except ClusterError as error:
                return partial(hear, error)

        future = self._thread.submit(asked)
        self._requests.append(future)
        return future

    def _touch(self, now: float) -> None:
        if now - self._touched_at < _ALIVE_INTERVAL_S:
            return
        self._touched_at = now
        try:
            atomic_write(supervisor_alive_path(self.directory), f"{time.time()}\n".encode())
        except OSError as error:
            logger.warning("cannot touch %s: %s", supervisor_alive_path(self.directory), error)

    # In the thread.

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

    def _submit(self, name: str) -> str:
        try:
            job_id = self.cluster.submit_extra_job(
                self.plan,
                self.layout,
                self._index_by_name[name],
                self.directory,
                attempt=self.attempt,
                exclude_nodes=self.exclude_nodes,
            )
        except (OSError, ValueError) as error:
            raise ClusterUnreachableError(str(error)) from error  # it could not be asked
        try:
            self._own_jobs.note(job_id, allocation=name, attempt=self.attempt)
        except OSError as error:
            logger.warning("job %s could not be noted in control/: %s", job_id, error)
        return job_id

    def _cancel_all(self, known: set[str]) -> str:
        """Why some may be left, or "" if none is."""
        try:
            alive = {job.job_id for job, _ in self._our_jobs()}
            for job_id in sorted(known | alive):
                self.cluster.cancel(job_id)
        except ClusterError as error:
            return str(error)
        return ""

    def _our_jobs(self) -> list[tuple[Job, JobNote]]:
        found = self._own_jobs.select(self.cluster.jobs())
        return [(job, note) for job, note in found if note.allocation in self._index_by_name]

    # Back in the supervisor's thread.

    def _seen(self, answer: list[JobSighting] | ClusterError, now: float) -> None:
        if isinstance(answer, ClusterError):
            if not self._is_unseen:
                self.record("extra_jobs_unseen", cause=str(answer))
            self._is_unseen = True
            return
        if self._is_unseen:
            self.record("extra_jobs_seen_again")
        self._is_unseen = False
        self._book.seen(answer, now)

    def _submitted(self, name: str, answer: str | ClusterError, now: float) -> None:
        if isinstance(answer, ClusterError):
            # One that does not answer, or cannot be asked, says nothing about the job.
            is_word = not isinstance(answer, ClusterUnreachableError)
            self._book.refused(name, str(answer), now, is_word=is_word)
        else:
            self._book.submitted(name, answer, now)

    def _cleared(self, name: str, job_id: str, answer: None | ClusterError, now: float) -> None:
        _warn(f"steps of job {job_id} could not be ended", answer, now)
        self._book.cleared(name, job_id)

    def _checked(self, name: str, job_id: str, answer: str | ClusterError, now: float) -> None:
        if isinstance(answer, ClusterError):  # the supervision waits no longer than its own deadline
            _warn(f"job {job_id} could not be asked for", answer, now)
        else:
            self._book.checked(name, job_id, why_leaving=answer)


def _warn(what: str, answer: None | ClusterError, now: float) -> None:
    if answer is not None:
        logger.warning("%s: %s", what, answer)
