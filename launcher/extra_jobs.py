"""The supervisor's extra jobs: a thread of their own asks the cluster, so that nobody waits for its answers.

    Supervisor --drive(), check_nodes, give_up--> one thread, turn by turn: ExtraJobBook --its hands--> Cluster
        ^                                                                       |
        +-- NodesEvent: what the workers of an allocation may do ---------------+

While it lives the supervisor touches control/supervisor-alive; the extra jobs end by themselves when it stops.

ExtraJobBook is the state machine of these jobs: the queue and the clock go in, its hands do what follows.

One extra job, which is a group of layout `jobs` or an elastic worker:

    WANTED --asked for, taken--> QUEUED --gets its nodes--> RUNNING --ends--> LEAVING
      ^  +--refused-+              ^                            |                 |
      |             |              +---- preempted, requeued ---+-----------------+
      +-------------+------------------- cancelled, timed out, failed (growing pause)

Its nodes are granted to workers while the job is RUNNING; the groups of a gang only get theirs together. What the
cluster does not answer changes nothing: the last known state stands. A job of the gang that the cluster refuses, or
that cannot start while the trial holds its others, ends the trial after the gang's timeout. A supervisor that was
started again adopts the jobs that its predecessor asked for; those of an earlier attempt are cancelled.

GangGuard is for layout `jobs`: a trial never holds half of its nodes for long while it waits for the other half.

    EMPTY --first job runs--> FORMING --all run--> ASSEMBLED --one was lost--> FORMING
      ^                          |
      +-- gang_timeout_s over: all are given back, and asked for again after a random pause

    one is HOPELESS, which no waiting cures, for gang_timeout_s: it is given up, and the trial with it

Two trials that each hold what the other one needs would wait for ever. Both give back, and as their pauses differ, one
of them finds everything free. Each failure in a row doubles the pause. Pure: who runs, and the clock, come in.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

from corral.experiments.trial.directory import atomic_write, remove_file
from corral.launcher.layout.layout import Allocation, PlacedTrial, RunningAllocation, RunningAllocations
from corral.launcher.slurm.client import SlurmError, SlurmUnreachableError
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.slurm.own_jobs import JobNote, OwnJobs
from corral.launcher.slurm.sbatch import SUPERVISOR_SILENCE_S
from corral.launcher.slurm.verdict import Job, JobPhase
from corral.scheduling.restarts import growing_pause

_MIN_BACKOFF_S = 2.0  # several times what a cluster takes to start the jobs of the trial that comes first
_MAX_BACKOFF_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """All jobs of the gang have to go."""

    waited_s: float
    """Time since the first of them ran."""
    pause_s: float
    """Before they are asked for again."""
    missing: tuple[str, ...]
    """Those that did not run."""


@dataclass(slots=True)
class GangGuard:
    """Watches the jobs that a trial needs all of."""

    names: Sequence[str]
    _: KW_ONLY
    timeout_s: float
    """The longest time from the first to the last of them."""
    chance: random.Random
    """Of the pauses; each trial needs its own."""
    is_assembled: bool = False
    """Whether all have been there since they were last given back: steps may be started."""
    _forming_since: float | None = None
    _hopeless_since: float | None = None
    _failures: int = 0

    def look(
        self, running: Collection[str], now: float, *, hopeless: Collection[str] = ()
    ) -> GiveBack | Literal["give up"] | None:
        """What to do about it that just these run, and these cannot start whatever others do.

        Returns:
            "give up" if the gang will never be complete.
        """
        missing = tuple(name for name in self.names if name not in running)
        if not hopeless:
            self._hopeless_since = None
        elif self._hopeless_since is None:
            self._hopeless_since = now
        elif now - self._hopeless_since >= self.timeout_s:
            return "give up"
        if not missing:
            self.is_assembled = True
            self._failures = 0
        if not missing or len(missing) == len(self.names):
            self._forming_since = None
            return None
        if self._forming_since is None:
            self._forming_since = now
        waited_s = now - self._forming_since
        if waited_s < self.timeout_s or hopeless:  # to ask again for what cannot start helps nobody
            return None
        self._forming_since = None
        self.is_assembled = False
        self._failures += 1
        return GiveBack(waited_s=waited_s, pause_s=self._pause_s(), missing=missing)

    def _pause_s(self) -> float:
        first = max(_MIN_BACKOFF_S, self.timeout_s / 10.0)
        backoff_s = growing_pause(self._failures, first_s=first, longest_s=_MAX_BACKOFF_S)
        return backoff_s * self.chance.uniform(0.5, 1.5)


_FIRST_PAUSE_S = 5.0
_MAX_PAUSE_S = 600.0
_HEALTHY_S = 60.0
_QUICK_LOOK_S = 2.0
_SLOW_LOOK_S = 10.0
_QUICK_FOR_S = 60.0  # a job that has not started within a minute may take hours


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSighting:
    """A job of ours in the queue."""

    name: str
    """Of the allocation that it was asked for."""
    attempt: int
    """The attempt that asked for it."""
    job: Job
    never: str = ""
    """Why it cannot start beside the jobs that the trial needs; "" where waiting may cure it."""
    is_crowded_out: bool = False
    """Whether it cannot start beside those of the trial's elastic workers, which it can do without."""


@dataclass(frozen=True, slots=True)
class NodesEvent:
    """What follows for those who run in an extra job."""

    name: str
    """Of its allocation."""
    news: Literal["granted", "lost", "stay", "never come"]
    """granted: its workers may start; lost: they have lost their nodes; stay: whatever ended there ended by itself;
    never come: the trial needs these nodes, and cannot get them while it holds what it has."""
    cause: str = ""
    nodes: RunningAllocation | None = field(default=None, compare=False)
    """That are granted."""


_State = Literal["wanted", "queued", "running", "leaving", "released"]
"""Where an extra job stands; released: it is not wanted any more."""


@dataclass(slots=True)
class _ExtraJob:
    spec: Allocation
    state: _State = "wanted"
    job_id: str = ""
    hosts: tuple[str, ...] = ()
    reason: str = "its job has not been asked for yet"
    ask_at: float = float("-inf")
    ran_since: float | None = None
    failures: int = 0
    run: tuple[str, str] | None = None
    """Job and start of the present run."""
    left_run: tuple[str, str] | None = None
    """A run that is known to end, whatever the queue still says of it."""
    granted: tuple[str, str] | None = None
    """The run whose nodes were granted to the workers."""
    noted_reason: str = ""
    never: str = ""
    """Why it cannot start while the trial holds what it has, as the cluster said last."""

    @property
    def is_required(self) -> bool:
        """Whether it is a group of the gang; else an elastic worker."""
        return self.spec.role == "group"


@dataclass(slots=True)
class ExtraJobBook:
    """The decisions about all extra jobs of one attempt."""

    specs: Sequence[Allocation]
    attempt: int
    gang: GangGuard
    hands: "ExtraJobs"
    _extra_jobs: dict[str, _ExtraJob] = field(init=False)
    _cancelled: set[str] = field(default_factory=set)
    _has_looked: bool = False
    _changed_at: float = float("-inf")

    def __post_init__(self) -> None:
        self._extra_jobs = {spec.name: _ExtraJob(spec) for spec in self.specs}

    def why_away(self, name: str) -> str:
        """Why its nodes are not there, for people."""
        extra_job = self._extra_jobs[name]
        its_job = f"its job {extra_job.job_id}" if extra_job.job_id else "its job"
        said = f"{its_job} is {extra_job.state}"
        return f"{said} ({extra_job.reason})" if extra_job.reason else said

    def jobs(self) -> list[str]:
        """Ids of all jobs that the cluster has taken and not yet ended."""
        return [extra_job.job_id for extra_job in self._extra_jobs.values() if extra_job.job_id]

    def look_interval_s(self, now: float) -> float:
        """How long the last answer is good for."""
        is_open = any(extra_job.granted is None for extra_job in self._extra_jobs.values())
        return _QUICK_LOOK_S if is_open and now - self._changed_at < _QUICK_FOR_S else _SLOW_LOOK_S

    def tick(self, now: float) -> None:
        """Time passed."""
        if not self._has_looked:  # a predecessor may have asked already
            return
        self._guard(now)
        # The gang first: where the number of jobs is limited, elastic workers get what it leaves.
        for extra_job in sorted(self._extra_jobs.values(), key=lambda one: (not one.is_required, -one.spec.size)):
            if extra_job.state == "wanted" and now >= extra_job.ask_at:
                self._ask_for(extra_job, now)

    def seen(self, sightings: Sequence[JobSighting], now: float) -> None:
        """The cluster answered: these are all of the trial's extra jobs that it knows."""
        self._has_looked = True
        for seen in sightings:
            if seen.attempt < self.attempt:
                self._cancel_if_there(seen.job)
        for name, extra_job in self._extra_jobs.items():
            own = [seen.job for seen in sightings if (seen.name, seen.attempt) == (name, self.attempt)]
            self._take_in(extra_job, {job.job_id: job for job in own}, now)
        by_job = {seen.job.job_id: seen for seen in sightings}
        for extra_job in self._extra_jobs.values():
            if (last := by_job.get(extra_job.job_id)) is not None:
                extra_job.never = last.never
                if last.is_crowded_out:
                    self._make_room(extra_job, now)
        self._guard(now)

    def check(self, name: str) -> None:
        """Something has ended on its nodes: are they still there?"""
        extra_job = self._extra_jobs[name]
        if extra_job.granted is None:
            return  # they were lost in the meantime, and that is known
        why_leaving = self.hands.why_leaving(extra_job.job_id)
        if why_leaving:
            extra_job.state, extra_job.reason, extra_job.left_run = "leaving", why_leaving, extra_job.run
            self._announce()
        elif why_leaving is not None:
            self.hands.tell(NodesEvent(name, "stay"))

    def release(self, name: str) -> None:
        """The extra job is not wanted any more."""
        extra_job = self._extra_jobs[name]
        if extra_job.is_required or extra_job.state == "released":
            return
        extra_job.state, extra_job.reason = "released", "it was given up"
        if extra_job.job_id:
            self._cancel(extra_job.job_id)
        extra_job.job_id = ""
        self._announce()

    def _ask_for(self, extra_job: _ExtraJob, now: float) -> None:
        try:
            job_id = self.hands.ask_for(extra_job.spec.name)
        except SlurmError as error:
            pause_s = self._want_again(extra_job, str(error), now)
            # One that does not answer, or cannot be asked, says nothing about the job.
            extra_job.never = "" if isinstance(error, SlurmUnreachableError) else str(error)
            self.hands.news("extra_job_refused", allocation=extra_job.spec.name, cause=str(error), pause_s=pause_s)
            return
        extra_job.state, extra_job.job_id, extra_job.reason, extra_job.never = "queued", job_id, "", ""
        self._changed_at = now
        self._news(extra_job, "extra_job_submitted")

    def _make_room(self, crowded_out: _ExtraJob, now: float) -> None:
        """Elastic workers leave for a job that the trial needs, and come back behind it."""
        for extra_job in self._extra_jobs.values():
            if extra_job.state == "running" and not extra_job.is_required:
                self._cancel(extra_job.job_id)
                self._gone(extra_job, f"it made room for {crowded_out.spec.name}", now)

    def _take_in(self, extra_job: _ExtraJob, jobs: dict[str, Job], now: float) -> None:
        alive = [job for job in jobs.values() if job.phase is not JobPhase.ENDED and job.job_id not in self._cancelled]
        if extra_job.state == "wanted" and alive:
            best = min(alive, key=lambda job: (job.phase is not JobPhase.RUNNING, job.number))
            extra_job.state, extra_job.job_id = "queued", best.job_id
            self._news(extra_job, "extra_job_adopted")
            self.hands.end_steps(best.job_id)
        for job in alive:
            if job.job_id != extra_job.job_id:
                self._cancel_if_there(job)
        if extra_job.job_id:
            self._update(extra_job, jobs.get(extra_job.job_id), now)

    def _update(self, extra_job: _ExtraJob, job: Job | None, now: float) -> None:
        if job is None:
            self._gone(extra_job, "the cluster does not know its job any more", now)
            return
        match job.phase:
            case JobPhase.ENDED:
                self._gone(extra_job, f"its job ended as {job.word}", now)
            case JobPhase.RUNNING:
                self._runs(extra_job, job, now)
            case JobPhase.LEAVING if extra_job.state == "running":
                extra_job.state, extra_job.reason = "leaving", "its job is ending"
            case JobPhase.WAITING:
                self._waits(extra_job, job, now)
            # A word that this version does not know changes nothing.

    def _runs(self, extra_job: _ExtraJob, job: Job, now: float) -> None:
        run = (job.job_id, job.run)
        if run == extra_job.left_run or not job.hosts:
            return
        if len(job.hosts) < extra_job.spec.num_nodes:
            # With --no-kill a job outlives its nodes, but what was planned for them has no room in it.
            self._cancel_if_there(job)
            have = f"{len(job.hosts)} of {extra_job.spec.num_nodes} nodes"
            self._gone(extra_job, f"its job has {have} left", now)
        elif run != extra_job.run:
            self._tell_left(extra_job)  # where it ended and began between two looks
            extra_job.state, extra_job.run = "running", run
            extra_job.hosts, extra_job.reason = job.hosts, ""
            extra_job.ran_since = self._changed_at = now
            self._news(extra_job, "extra_job_running", nodes=",".join(job.hosts))

    def _waits(self, extra_job: _ExtraJob, job: Job, now: float) -> None:
        if self._tell_left(extra_job):
            self._changed_at = now
        extra_job.state, extra_job.reason = "queued", job.reason
        if job.is_blocked and extra_job.noted_reason != job.reason:
            extra_job.noted_reason = job.reason
            self._news(extra_job, "extra_job_blocked", cause=job.reason)

    def _tell_left(self, extra_job: _ExtraJob) -> bool:
        """Tells of the end of a run, if there was one, whose job is still there."""
        if extra_job.state not in ("running", "leaving"):
            return False
        self._news(extra_job, "extra_job_gone", cause="preempted or requeued", pause_s=0)
        return True

    def _gone(self, extra_job: _ExtraJob, cause: str, now: float) -> None:
        pause_s = self._want_again(extra_job, cause, now)
        self._news(extra_job, "extra_job_gone", cause=cause, pause_s=pause_s)
        extra_job.job_id = ""

    def _want_again(self, extra_job: _ExtraJob, cause: str, now: float) -> float:
        if extra_job.ran_since is not None and now - extra_job.ran_since >= _HEALTHY_S:
            extra_job.failures = 0
        extra_job.failures += 1
        extra_job.ran_since = None
        pause_s = growing_pause(extra_job.failures, first_s=_FIRST_PAUSE_S, longest_s=_MAX_PAUSE_S)
        extra_job.state, extra_job.reason, extra_job.ask_at = "wanted", cause, now + pause_s
        extra_job.never = ""
        self._changed_at = now
        return pause_s

    def _guard(self, now: float) -> None:
        required = [extra_job for extra_job in self._extra_jobs.values() if extra_job.is_required]
        running = {extra_job.spec.name for extra_job in required if extra_job.state == "running"}
        hopeless = {extra_job.spec.name: extra_job.never for extra_job in required if extra_job.never}
        given_back = self.gang.look(running, now, hopeless=hopeless) if required else None
        if given_back == "give up":
            name = min(hopeless)
            cause = f"{name} gets no nodes, and no waiting helps: {hopeless[name]}"
            self.hands.tell(NodesEvent(name, "never come", cause))
            return
        if given_back is not None:
            self._give_back(required, given_back, now)
        self._announce()

    def _give_back(self, required: Sequence[_ExtraJob], given_back: GiveBack, now: float) -> None:
        missing = {name: self._extra_jobs[name].reason or self._extra_jobs[name].state for name in given_back.missing}
        waited_s, pause_s = round(given_back.waited_s, 1), round(given_back.pause_s, 1)
        self.hands.news("gang_given_back", missing=missing, waited_s=waited_s, pause_s=pause_s)
        for extra_job in required:
            if extra_job.job_id:
                self._cancel(extra_job.job_id)
            extra_job.job_id, extra_job.state = "", "wanted"
            extra_job.reason = "its gang was given back"
            extra_job.ask_at = now + given_back.pause_s
        self._changed_at = now

    def _announce(self) -> None:
        """Says whose nodes were granted and whose were lost since the last time."""
        for extra_job in self._extra_jobs.values():
            may_start = extra_job.state == "running" and (self.gang.is_assembled or not extra_job.is_required)
            before, extra_job.granted = extra_job.granted, extra_job.run if may_start else None
            if extra_job.granted == before:
                continue
            if before is not None:
                self.hands.tell(NodesEvent(extra_job.spec.name, "lost", extra_job.reason or "its job was started anew"))
            if extra_job.granted is not None:
                nodes = RunningAllocation(job_id=extra_job.job_id, het_group=None, hosts=extra_job.hosts)
                self.hands.tell(NodesEvent(extra_job.spec.name, "granted", nodes=nodes))

    def _cancel_if_there(self, job: Job) -> None:
        if job.phase is not JobPhase.ENDED and job.job_id not in self._cancelled:
            self._cancel(job.job_id)

    def _cancel(self, job_id: str) -> None:
        self._cancelled.add(job_id)
        self.hands.cancel(job_id)

    def _news(self, extra_job: _ExtraJob, event: str, **fields: object) -> None:
        self.hands.news(event, allocation=extra_job.spec.name, job_id=extra_job.job_id, **fields)


logger = logging.getLogger(__name__)
T = TypeVar("T")

_ALIVE_INTERVAL_S = 10.0
assert _ALIVE_INTERVAL_S < SUPERVISOR_SILENCE_S / 4, "extra jobs end when the supervisor has been silent for that long"
_CLEAR_TIMEOUT_S = 15.0
_CLOSE_TIMEOUT_S = 15.0


@dataclass(slots=True, kw_only=True)
class ExtraJobs:
    """The jobs of one attempt's groups and elastic workers."""

    cluster: SlurmCluster
    trial: PlacedTrial
    attempt: int
    own: RunningAllocations
    """The allocations of the supervisor's own job."""
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
    """Of extra jobs, by index, as the supervisor knows them."""
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
        events = [self._events.popleft() for _ in range(len(self._events))]
        for event in events:
            if event.nodes is not None:
                self._running[self._index_by_name[event.name]] = event.nodes
            elif event.news == "lost":
                del self._running[self._index_by_name[event.name]]
        return events

    def check_nodes(self, name: str) -> None:
        """Find out whether the nodes of an allocation are still there."""
        self._wishes.append(partial(self._book.check, name))

    def give_up(self, name: str) -> None:
        """Nothing will be started any more in an allocation: its nodes are not needed."""
        self._wishes.append(partial(self._book.release, name))

    def allocations(self) -> RunningAllocations:
        """The allocations that run at the moment."""
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
        except SlurmError as error:
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
        except SlurmError:
            return one  # the next look asks again
        return replace(one, never=never, is_crowded_out=is_crowded_out)

    def _cancel_all(self) -> str:
        """Why some may be left, or "" if none is."""
        try:
            alive = {job.job_id for job, _ in self._our_jobs()}
            for job_id in sorted(alive.union(self._book.jobs())):
                self.cluster.cancel(job_id)
        except SlurmError as error:
            return str(error)
        return ""

    def _our_jobs(self) -> list[tuple[Job, JobNote]]:
        found = self._own_jobs.select(self.cluster.jobs())
        return [(job, note) for job, note in found if note.allocation in self._index_by_name]

    # The book's hands.

    def ask_for(self, name: str) -> str:
        """Submits the job of an allocation; returns its id.

        Raises:
            SlurmUnreachableError: if the cluster does not answer, or cannot be asked.
            SlurmError: if it does not want it.
        """
        try:
            job_id = self.cluster.submit_extra_job(
                self.trial, self._index_by_name[name], attempt=self.attempt, exclude_nodes=self.exclude_nodes
            )
        except (OSError, ValueError) as error:
            raise SlurmUnreachableError(str(error)) from error  # it could not be asked
        try:
            self._own_jobs.note(job_id, allocation=name, attempt=self.attempt)
        except OSError as error:
            logger.warning("job %s could not be noted in control/: %s", job_id, error)
        return job_id

    def cancel(self, job_id: str) -> None:
        """Ends a job, if the cluster does it."""
        _ask(partial(self.cluster.cancel, job_id), f"job {job_id} could not be cancelled")

    def end_steps(self, job_id: str) -> None:
        """Ends what a predecessor left in an adopted job."""
        end = partial(self.cluster.end_steps, job_id, timeout_s=_CLEAR_TIMEOUT_S)
        _ask(end, f"steps of job {job_id} could not be ended")

    def why_leaving(self, job_id: str) -> str | None:
        """Why a job will not be there much longer; "" if it stays, None if the cluster does not say."""
        # The supervision waits for this no longer than its own deadline.
        return _ask(partial(self.cluster.why_leaving, job_id), f"job {job_id} could not be asked for")

    def tell(self, event: NodesEvent) -> None:
        """Something has become of the nodes of those who run in an extra job."""
        self._events.append(event)

    def news(self, event: str, **fields: object) -> None:
        """A line of the journal."""
        self._news.append((event, fields))


def _ask(cluster: Callable[[], T], failure: str) -> T | None:
    """The cluster's answer; None if there is none, which the log says."""
    try:
        return cluster()
    except SlurmError as error:
        logger.warning("%s: %s", failure, error)
        return None
