"""What can be known about a trial at one moment, as plain data: the reader fills it in, the judges only look at it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.experiments.trial.attempts import AttemptRecord
from corral.experiments.trial.directory import StopRequest
from corral.experiments.trial.worker_record import WorkerRecord
from corral.launcher.cluster.jobs import Job
from corral.launcher.trial.find import TrialFacts
from corral.launcher.trial.history import Finding, PastAttempt, WorkerLife


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraJob:
    """A job of the trial beside its head: that of a group, or of one elastic worker."""

    allocation: str
    """Name in the layout: a kind of worker, or a worker."""
    is_elastic: bool
    job: Job | None
    """None while it is in no queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known about a trial at one moment."""

    facts: TrialFacts
    now: float
    attempt: AttemptRecord | None
    lives: Mapping[str, WorkerLife]
    ended: Mapping[str, Any] | None = None
    """The trial's own record of its end."""
    redis_started: bool
    is_done: bool = False
    is_stopped: bool = False
    stop_request: StopRequest | None = None
    is_supervised: bool | None = None
    """Whether the supervisor runs; None if that cannot be seen from here."""
    job: Job | None = None
    """The head's job: that of the last attempt, or of the one that is to follow it."""
    job_id: str
    cluster_error: str = ""
    """Why the cluster does not answer now."""
    records: Mapping[str, WorkerRecord] | None = None
    """Worker records by worker; None if Redis cannot be asked."""
    last_seen: Mapping[str, WorkerRecord] = field(default_factory=dict)
    """The last record of each worker, which outlives its lease."""
    redis_now: float | None = None
    """The moment of the records by the clock of Redis, which is that of their beats."""
    attempt_ended: Mapping[str, Any] | None = None
    """The last attempt's record of its end, where another one is to follow."""
    has_run: bool = False
    """Whether the job has run before: the cluster, or the supervisor, has put the trial back into the queue."""
    accounted: Job | None = None
    """What is on record of a job that the cluster has forgotten."""
    unreachable_since: float | None = None
    jobs_known_at: float | None = None
    """When the cluster last told about the jobs."""
    extra_jobs: tuple[ExtraJob, ...] = ()
    allocation_by_worker: Mapping[str, str] = field(default_factory=dict)
    """Of the workers that run in an extra job."""
    groups_kept_down: frozenset[str] = frozenset()
    """Kinds of worker that rl-stop keeps down."""
    given_up: Mapping[str, str] = field(default_factory=dict)
    """Workers that the trial goes on without, and why."""
    zombies: tuple[str, ...] = ()
    """What still lives of another attempt."""
    failure: Mapping[str, Any] | None = None
    """The exit record of the worker that failed first, of a trial that failed."""
    history: tuple[PastAttempt, ...] = ()
    findings: tuple[Finding, ...] = ()
    """What train steps have found out."""
    damage: tuple[str, ...] = ()
    """What is wrong with the trial's files, and the way out."""

    @property
    def trial_now(self) -> float:
        """The moment by the clock of the trial's own processes, where that is known: supervisor and Redis share it."""
        return self.now if self.redis_now is None else self.redis_now

    @property
    def extra_job_by_allocation(self) -> dict[str, ExtraJob]:
        """The extra jobs by the name of their allocation."""
        return {extra_job.allocation: extra_job for extra_job in self.extra_jobs}
