"""The jobs beside a trial's own, as a pure state machine: the queue and the clock go in, requests come out.

One extra job, which is a group of layout `jobs` or an elastic worker:

    WANTED --asked for--> ASKED --taken--> QUEUED --gets its nodes--> RUNNING --ends--> LEAVING
      ^                     |                ^                            |                 |
      |                     | refused        +---- preempted, requeued ---+-----------------+
      +---------------------+-------------------- cancelled, timed out, failed (growing pause)

Its nodes are granted to workers while the job is RUNNING; the groups of a gang only get theirs together. What the
cluster does not answer changes nothing: the last known state stands. A job of the gang that the cluster refuses, or
that cannot start while the trial holds its others, ends the trial after the gang's timeout. A supervisor that was
started again adopts the jobs that its predecessor asked for; those of an earlier attempt are cancelled.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from corral.launcher.cluster.jobs import Job, JobPhase
from corral.launcher.extra_jobs.actions import (
    AskForJob,
    CancelJob,
    ClearJob,
    ExtraJobAction,
    ExtraJobSpec,
    JobSighting,
    News,
    NodesGranted,
    NodesLost,
    NodesNeverCome,
    NodesStay,
)
from corral.launcher.extra_jobs.gang import GangGuard, GiveUp

_FIRST_PAUSE_S = 5.0
_MAX_PAUSE_S = 600.0
_HEALTHY_S = 60.0
_QUICK_LOOK_S = 2.0
_SLOW_LOOK_S = 10.0
_QUICK_FOR_S = 60.0  # a job that has not started within a minute may take hours


class ExtraJobState(StrEnum):
    """Where an extra job stands."""

    WANTED = "wanted"
    ASKED = "asked"
    QUEUED = "queued"
    RUNNING = "running"
    LEAVING = "leaving"
    RELEASED = "released"
    """Not wanted any more."""


@dataclass(slots=True)
class _ExtraJob:
    spec: ExtraJobSpec
    state: ExtraJobState = ExtraJobState.WANTED
    job_id: str = ""
    hosts: tuple[str, ...] = ()
    reason: str = "its job has not been asked for yet"
    ask_at: float = float("-inf")
    ran_since: float | None = None
    failures: int = 0
    is_clear: bool = True
    run: tuple[str, str] | None = None
    """Job and start of the present run."""
    left_run: tuple[str, str] | None = None
    """A run that is known to end, whatever the queue still says of it."""
    granted: tuple[str, str] | None = None
    """The run whose nodes were granted to the workers."""
    noted_reason: str = ""
    never: str = ""
    """Why it cannot start while the trial holds what it has, as the cluster said last."""

    def news(self, event: str, **fields: object) -> News:
        return News(event, {"allocation": self.spec.name, "job_id": self.job_id, **fields})


@dataclass(slots=True)
class ExtraJobBook:
    """The decisions about all extra jobs of one attempt; every method returns what to do now."""

    specs: Sequence[ExtraJobSpec]
    attempt: int
    gang: GangGuard
    _extra_jobs: dict[str, _ExtraJob] = field(init=False)
    _cancelled: set[str] = field(default_factory=set)
    _has_looked: bool = False
    _changed_at: float = float("-inf")

    def __post_init__(self) -> None:
        self._extra_jobs = {spec.name: _ExtraJob(spec) for spec in self.specs}

    def nodes_of(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """Job id and hosts of the nodes that its workers were granted."""
        extra_job = self._extra_jobs[name]
        return (extra_job.job_id, extra_job.hosts) if extra_job.granted is not None else None

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

    def tick(self, now: float) -> list[ExtraJobAction]:
        """Time passed."""
        if not self._has_looked:  # a predecessor may have asked already
            return []
        actions = self._guard(now)
        # The gang first: where the number of jobs is limited, elastic workers get what it leaves.
        order = sorted(self._extra_jobs.values(), key=lambda one: (not one.spec.is_required, -one.spec.size))
        for extra_job in order:
            if extra_job.state is ExtraJobState.WANTED and now >= extra_job.ask_at:
                extra_job.state = ExtraJobState.ASKED
                actions.append(AskForJob(extra_job.spec.name))
        return actions

    def submitted(self, name: str, job_id: str, now: float) -> list[ExtraJobAction]:
        """The cluster has taken the job."""
        extra_job = self._extra_jobs[name]
        if extra_job.state is not ExtraJobState.ASKED:
            self._cancelled.add(job_id)
            return [CancelJob(job_id)]
        extra_job.state, extra_job.job_id, extra_job.reason, extra_job.is_clear = ExtraJobState.QUEUED, job_id, "", True
        extra_job.never = ""
        self._changed_at = now
        return [extra_job.news("extra_job_submitted")]

    def refused(self, name: str, why: str, now: float, *, is_word: bool = False) -> list[ExtraJobAction]:
        """The cluster has not taken the job; `is_word`: it was asked, and does not want it."""
        extra_job = self._extra_jobs[name]
        if extra_job.state is not ExtraJobState.ASKED:
            return []
        pause_s = self._want_again(extra_job, why, now)
        extra_job.never = why if is_word else ""
        return [News("extra_job_refused", {"allocation": name, "cause": why, "pause_s": pause_s})]

    def cleared(self, name: str, job_id: str, now: float) -> list[ExtraJobAction]:
        """Nothing of a predecessor runs in the adopted job any more."""
        if self._extra_jobs[name].job_id == job_id:
            self._extra_jobs[name].is_clear = True
        return self._announce()

    def seen(self, sightings: Iterable[JobSighting], now: float) -> list[ExtraJobAction]:
        """The cluster answered: these are all of the trial's extra jobs that it knows."""
        self._has_looked = True
        actions: list[ExtraJobAction] = []
        jobs_by_name: dict[str, dict[str, Job]] = {name: {} for name in self._extra_jobs}
        sightings = list(sightings)
        for seen in sightings:
            if seen.name not in self._extra_jobs or seen.attempt > self.attempt:
                continue
            if seen.attempt < self.attempt:
                actions += self._cancel(seen.job)
            else:
                jobs_by_name[seen.name][seen.job.job_id] = seen.job
        for name, jobs in jobs_by_name.items():
            actions += self._take_in(self._extra_jobs[name], jobs, now)
        by_job = {seen.job.job_id: seen for seen in sightings}
        for extra_job in self._extra_jobs.values():
            if (last := by_job.get(extra_job.job_id)) is not None:
                extra_job.never = last.never
                actions += self._make_room(extra_job, now) if last.is_crowded_out else []
        return actions + self._guard(now)

    def checked(self, name: str, job_id: str, *, is_leaving: bool, cause: str = "") -> list[ExtraJobAction]:
        """The cluster was asked about the nodes after something ended there."""
        extra_job = self._extra_jobs[name]
        if extra_job.job_id != job_id or extra_job.granted is None:
            return []  # they were lost in the meantime, and that is known
        if not is_leaving:
            return [NodesStay(name)]
        extra_job.state, extra_job.reason, extra_job.left_run = ExtraJobState.LEAVING, cause, extra_job.run
        return self._announce()

    def release(self, name: str) -> list[ExtraJobAction]:
        """The extra job is not wanted any more."""
        extra_job = self._extra_jobs[name]
        if extra_job.spec.is_required or extra_job.state is ExtraJobState.RELEASED:
            return []
        extra_job.state, extra_job.reason = ExtraJobState.RELEASED, "it was given up"
        actions: list[ExtraJobAction] = [CancelJob(extra_job.job_id)] if extra_job.job_id else []
        self._cancelled.add(extra_job.job_id)
        extra_job.job_id = ""
        return actions + self._announce()

    def _make_room(self, crowded_out: _ExtraJob, now: float) -> list[ExtraJobAction]:
        """Elastic workers leave for a job that the trial needs, and come back behind it."""
        actions: list[ExtraJobAction] = []
        for extra_job in self._extra_jobs.values():
            if extra_job.state is ExtraJobState.RUNNING and not extra_job.spec.is_required:
                self._cancelled.add(extra_job.job_id)
                actions.append(CancelJob(extra_job.job_id))
                actions += self._gone(extra_job, f"it made room for {crowded_out.spec.name}", now)
        return actions

    def _take_in(self, extra_job: _ExtraJob, jobs: dict[str, Job], now: float) -> list[ExtraJobAction]:
        actions: list[ExtraJobAction] = []
        alive = [job for job in jobs.values() if job.phase is not JobPhase.ENDED and job.job_id not in self._cancelled]
        if extra_job.state is ExtraJobState.WANTED and alive:
            best = min(alive, key=lambda job: (job.phase is not JobPhase.RUNNING, job.number))
            extra_job.state, extra_job.job_id, extra_job.is_clear = ExtraJobState.QUEUED, best.job_id, False
            actions.append(extra_job.news("extra_job_adopted"))
            actions.append(ClearJob(extra_job.spec.name, best.job_id))
        if extra_job.state is not ExtraJobState.ASKED:
            for job in alive:
                actions += self._cancel(job) if job.job_id != extra_job.job_id else []
        if extra_job.job_id:
            actions += self._update(extra_job, jobs.get(extra_job.job_id), now)
        return actions

    def _update(self, extra_job: _ExtraJob, job: Job | None, now: float) -> list[ExtraJobAction]:
        if job is None:
            return self._gone(extra_job, "the cluster does not know its job any more", now)
        match job.phase:
            case JobPhase.ENDED:
                return self._gone(extra_job, f"its job ended as {job.word}", now)
            case JobPhase.RUNNING:
                return self._runs(extra_job, job, now)
            case JobPhase.LEAVING:
                if extra_job.state is ExtraJobState.RUNNING:
                    extra_job.state, extra_job.reason = ExtraJobState.LEAVING, "its job is ending"
                return []
            case JobPhase.WAITING:
                return self._waits(extra_job, job, now)
            case JobPhase.UNKNOWN:
                return []  # a word that this version does not know changes nothing

    def _runs(self, extra_job: _ExtraJob, job: Job, now: float) -> list[ExtraJobAction]:
        run = (job.job_id, job.run)
        if run == extra_job.left_run:
            return []
        if job.hosts and len(job.hosts) < extra_job.spec.num_nodes:
            # With --no-kill a job outlives its nodes, but what was planned for them has no room in it.
            have = f"{len(job.hosts)} of {extra_job.spec.num_nodes} nodes"
            return [*self._cancel(job), *self._gone(extra_job, f"its job has {have} left", now)]
        if run != extra_job.run and job.hosts:
            extra_job.state, extra_job.run = ExtraJobState.RUNNING, run
            extra_job.hosts, extra_job.reason = job.hosts, ""
            extra_job.ran_since = self._changed_at = now
            return [extra_job.news("extra_job_running", nodes=",".join(job.hosts))]
        return []

    def _waits(self, extra_job: _ExtraJob, job: Job, now: float) -> list[ExtraJobAction]:
        actions: list[ExtraJobAction] = []
        if extra_job.state in (ExtraJobState.RUNNING, ExtraJobState.LEAVING):
            self._changed_at = now
            actions.append(extra_job.news("extra_job_gone", cause="preempted or requeued", pause_s=0))
        extra_job.state, extra_job.reason = ExtraJobState.QUEUED, job.reason
        if job.is_blocked and extra_job.noted_reason != job.reason:
            extra_job.noted_reason = job.reason
            actions.append(extra_job.news("extra_job_blocked", cause=job.reason))
        return actions

    def _gone(self, extra_job: _ExtraJob, cause: str, now: float) -> list[ExtraJobAction]:
        pause_s = self._want_again(extra_job, cause, now)
        news = extra_job.news("extra_job_gone", cause=cause, pause_s=pause_s)
        extra_job.job_id = ""
        return [news]

    def _want_again(self, extra_job: _ExtraJob, cause: str, now: float) -> float:
        if extra_job.ran_since is not None and now - extra_job.ran_since >= _HEALTHY_S:
            extra_job.failures = 0
        extra_job.failures += 1
        extra_job.ran_since = None
        pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(extra_job.failures - 1, 30))
        extra_job.state, extra_job.reason, extra_job.ask_at = ExtraJobState.WANTED, cause, now + pause_s
        extra_job.never = ""
        self._changed_at = now
        return pause_s

    def _guard(self, now: float) -> list[ExtraJobAction]:
        required = [extra_job for extra_job in self._extra_jobs.values() if extra_job.spec.is_required]
        running = {extra_job.spec.name for extra_job in required if extra_job.state is ExtraJobState.RUNNING}
        hopeless = {extra_job.spec.name: extra_job.never for extra_job in required if extra_job.never}
        given_back = self.gang.look(running, now, hopeless=hopeless) if required else None
        if isinstance(given_back, GiveUp):
            name = given_back.hopeless
            return [NodesNeverCome(name, f"{name} gets no nodes, and no waiting helps: {hopeless[name]}")]
        if given_back is None:
            return self._announce()
        reasons = {
            name: self._extra_jobs[name].reason or str(self._extra_jobs[name].state) for name in given_back.missing
        }
        actions: list[ExtraJobAction] = [
            News(
                "gang_given_back",
                {
                    "missing": reasons,
                    "waited_s": round(given_back.waited_s, 1),
                    "pause_s": round(given_back.pause_s, 1),
                },
            )
        ]
        for extra_job in required:
            if extra_job.job_id:
                actions.append(CancelJob(extra_job.job_id))
                self._cancelled.add(extra_job.job_id)
            extra_job.job_id, extra_job.state = "", ExtraJobState.WANTED
            extra_job.reason = "its gang was given back"
            extra_job.ask_at = now + given_back.pause_s
        self._changed_at = now
        return actions + self._announce()

    def _announce(self) -> list[ExtraJobAction]:
        """Says whose nodes were granted and whose were lost since the last time."""
        actions: list[ExtraJobAction] = []
        for extra_job in self._extra_jobs.values():
            is_there = extra_job.state is ExtraJobState.RUNNING and extra_job.is_clear
            may_start = is_there and (self.gang.is_assembled or not extra_job.spec.is_required)
            granted = extra_job.run if may_start else None
            if granted == extra_job.granted:
                continue
            if extra_job.granted is not None:
                actions.append(NodesLost(extra_job.spec.name, extra_job.reason or "its job was started anew"))
            if granted is not None:
                actions.append(NodesGranted(extra_job.spec.name))
            extra_job.granted = granted
        return actions

    def _cancel(self, job: Job) -> list[ExtraJobAction]:
        if job.phase is JobPhase.ENDED or job.job_id in self._cancelled:
            return []
        self._cancelled.add(job.job_id)
        return [CancelJob(job.job_id)]
