"""What can be known about a trial at one moment, as plain data: the reader fills it in, the judges only look at it.

jobs of OwnJobs --find_jobs--+-- allocation head: this attempt's job, its successor, or a zombie of an earlier one
                             +-- another allocation: an extra job
jobs whose trial directory is gone --find_strays--> nobody's, but still ours
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corral.experiments.trial.attempts import AttemptEnd, AttemptRecord
from corral.experiments.trial.directory import StopRequest
from corral.experiments.trial.worker_record import WorkerRecord
from corral.launcher.cluster.jobs import Job, JobPhase
from corral.launcher.cluster.own_jobs import HEAD, JobIndex, OwnJobs
from corral.launcher.slurm.cached_queue import QueueAnswer
from corral.launcher.trial.ends import End
from corral.launcher.trial.find import TrialFacts
from corral.launcher.trial.view import Finding, PastAttempt, TrialView, WorkerLife


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraJob:
    """A job of the trial beside its head: that of a group, or of one elastic worker."""

    allocation: str
    """Name in the layout: a kind of worker, or a worker."""
    is_elastic: bool
    job: Job | None
    """None while it is in no queue."""
    workers: tuple[str, ...] = ()
    """That run in it."""

    @property
    def is_running(self) -> bool:
        """Whether it has its nodes."""
        return self.job is not None and self.job.phase is JobPhase.RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known about a trial at one moment."""

    facts: TrialFacts
    now: float
    attempt: AttemptRecord | None
    lives: Mapping[str, WorkerLife]
    view: TrialView = TrialView(())
    """The files that say how attempts went."""
    ended: AttemptEnd | None = None
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
    submitted_at: float = 0.0
    """When its last job was submitted: what the cluster said before does not count."""
    queue: QueueAnswer = QueueAnswer()
    """What the cluster said about all jobs."""
    records: Mapping[str, WorkerRecord] | None = None
    """Worker records by worker; None if Redis cannot be asked."""
    last_seen: Mapping[str, WorkerRecord] = field(default_factory=dict)
    """The last record of each worker, which outlives its lease."""
    redis_now: float | None = None
    """The moment of the records by the clock of Redis, which is that of their beats."""
    attempt_ended: AttemptEnd | None = None
    """The last attempt's record of its end, where another one is to follow."""
    has_run: bool = False
    """Whether the job has run before: the cluster, or the supervisor, has put the trial back into the queue."""
    accounted: Job | None = None
    """What is on record of a job that the cluster has forgotten."""
    extra_jobs: tuple[ExtraJob, ...] = ()
    groups_kept_down: frozenset[str] = frozenset()
    """Kinds of worker that rl-stop keeps down."""
    given_up: Mapping[str, str] = field(default_factory=dict)
    """Workers and trackers that the trial goes on without, and why."""
    zombies: tuple[str, ...] = ()
    """What still lives of another attempt."""
    failure: End | None = None
    """The end of the task that ended a trial that failed."""
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
    def attempt_number(self) -> int:
        """Of the last attempt; 0 before the first."""
        return self.attempt.attempt if self.attempt else 0

    def extra_job_of(self, worker: str) -> ExtraJob | None:
        """The extra job that a worker runs in."""
        return next((extra_job for extra_job in self.extra_jobs if worker in extra_job.workers), None)


_HEADS = (None, "", HEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJobs:
    """The jobs of one trial."""

    head: Job | None
    """The job of the last attempt, or of the one that is to follow it."""
    extra_jobs: Mapping[str, Job]
    """By allocation; the newest."""
    zombies: tuple[Job, ...]
    """Jobs of earlier attempts that still run, or are going to."""


def find_jobs(jobs: JobIndex, own: OwnJobs, *, job_id: str, is_over: bool) -> TrialJobs:
    """Sorts a trial's jobs out.

    Args:
        jobs: everybody's.
        job_id: of the last attempt; "" if it is not known.
        is_over: whether that attempt has ended, so that another job may be waiting to go on.
    """
    ours = [(job, note) for job, note in own.select(jobs) if not job.part_of]  # the first one stands for all
    heads = sorted((job for job, note in ours if note.allocation == HEAD), key=lambda job: job.number)
    head = _choose_head(heads, job_id, is_over=is_over)
    extra_jobs: dict[str, Job] = {}
    zombies = [
        job for job in heads if job is not head and job.job_id != job_id and job.is_staying and _is_older(job, head)
    ]
    beside = [(job, note) for job, note in ours if note.allocation != HEAD]
    for job, note in sorted(beside, key=lambda one: (one[0].is_staying, one[0].number)):
        if note.allocation in extra_jobs and extra_jobs[note.allocation].is_staying:
            zombies.append(extra_jobs[note.allocation])
        extra_jobs[note.allocation] = job
    return TrialJobs(head=head, extra_jobs=extra_jobs, zombies=tuple(zombies))


def find_strays(jobs: Iterable[Job], known: Collection[str]) -> list[tuple[Job, Path]]:
    """Living head jobs of trials that are none of the known, by their uuids, with the directories that they name."""
    return [
        (job, Path(str(job.tag.get("directory"))))
        for job in jobs
        if job.tag.get("trial_uuid")
        and job.tag["trial_uuid"] not in known
        and job.tag.get("allocation") in _HEADS
        and not job.part_of
        and job.is_active
    ]


def is_of_trial(job: Job, name: str, fileroot: Path) -> bool:
    """Whether a job says that it is of the trial that somebody calls so: by its name, experiment/trial, or its path."""
    directory, path = Path(str(job.tag.get("directory", "/"))), Path(os.path.expanduser(name))
    if name.startswith(("/", ".", "~")):
        return directory == path.absolute()
    return directory.parents[1:2] == (fileroot.absolute(),) and name in (
        directory.name,
        f"{directory.parent.name}/{directory.name}",
    )


def _choose_head(heads: Sequence[Job], job_id: str, *, is_over: bool) -> Job | None:
    own = next((job for job in heads if job.job_id == job_id), None)
    if own is not None and own.is_active and (not is_over or own.phase is JobPhase.WAITING):
        return own
    living = [job for job in heads if job.is_active and job is not own]
    newer = [job for job in living if own is None or job.number > own.number]
    if newer:
        return newer[-1]
    return own if own is not None or job_id else (heads[-1] if heads else None)


def _is_older(job: Job, head: Job | None) -> bool:
    return head is None or job.number < head.number or not head.is_active
