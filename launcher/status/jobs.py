"""What each of a trial's jobs is at the moment.

jobs of OwnJobs --+-- allocation head: this attempt's job, its successor, or a zombie of an earlier one
                  +-- another allocation: an extra job
jobs whose trial directory is gone: nobody's, but still ours
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.launcher.cluster.jobs import Job, JobPhase
from corral.launcher.cluster.own_jobs import HEAD, JobIndex, OwnJobs
from corral.launcher.status.evidence import ExtraJob
from corral.launcher.trial.find import TrialFacts

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


def own_jobs_of(facts: TrialFacts, *, claimed_by: str = "") -> OwnJobs:
    """Tells a trial's jobs from all others."""
    return OwnJobs(facts.directory, facts.experiment, facts.trial, facts.uuid, claimed_by)


def make_extra_jobs(names: Mapping[str, bool], jobs: TrialJobs) -> tuple[ExtraJob, ...]:
    """An extra job for each allocation beside the head.

    Args:
        names: whether it is elastic, by allocation.
    """
    return tuple(
        ExtraJob(allocation=name, is_elastic=is_elastic, job=jobs.extra_jobs.get(name))
        for name, is_elastic in names.items()
    )


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
