"""A trial's jobs among those of a user: found by the comment, or by id and name where a site rewrites comments.

submission --job id--> control/jobs/7.json   {"name": "exp.trial", "allocation": "head", "attempt": 0, "after": ""}

a job of the queue --comment of corral--> the trial of its uuid
             +--none, but a name like ours--> control/jobs/ID.json of the same name --> this trial
             +--else--> somebody else's

An id alone says nothing: another cluster with the same home folder numbers its jobs too, and ids begin anew some day.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from corral.experiments.trial.directory import TrialDirectory, atomic_write, list_names, validate_name
from corral.launcher.layout.layout import RunningAllocation, RunningAllocations
from corral.launcher.slurm.verdict import Job
from corral.scheduling.slurm_formats import expand_host_list

if TYPE_CHECKING:  # rl-status reads plans without the schema, which takes longer to import than it takes to answer
    from corral.experiments.plan import TrialIdentity
    from corral.launcher.trial.view import TrialFacts

HEAD = "head"
_MAX_JOB_NAME = 64
_STEM = 32  # of a name: what is cut off for SLURM's sake comes after it
_BY_NAME = attrgetter("name")
_LAST = "\U0010ffff"  # sorts after every other character


class JobNote(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was asked for."""

    name: str
    allocation: str
    """`head`, or the name of a job beside it."""
    attempt: int
    """That asked for it; -1 if the job does not say."""
    after: str = ""
    """The job after whose end it goes on with the trial; "" if it follows none."""


@dataclass(frozen=True, slots=True)
class JobIndex:
    """The jobs of one answer; each comment is read once, whatever the number of trials."""

    by_uuid: Mapping[str, Sequence[Job]]
    without_tag: Sequence[Job]
    """By name: a user may have thousands of jobs that are no trial's."""

    @classmethod
    def of(cls, jobs: Iterable[Job]) -> "JobIndex":
        by_uuid: dict[str, list[Job]] = {}
        without_tag: list[Job] = []
        for job in jobs:
            uuid = job.tag.get("trial_uuid")
            (by_uuid.setdefault(uuid, []) if isinstance(uuid, str) else without_tag).append(job)
        return cls(by_uuid, sorted(without_tag, key=_BY_NAME))

    def begins_with(self, stem: str) -> Sequence[Job]:
        """The jobs without a comment of ours whose names begin so."""
        first = bisect_left(self.without_tag, stem, key=_BY_NAME)
        return self.without_tag[first : bisect_left(self.without_tag, f"{stem}{_LAST}", lo=first, key=_BY_NAME)]


@dataclass(slots=True)
class OwnJobs:
    """Tells the jobs of one trial from all others.

    Args:
        whose: jobs they are.
        claimed_by: the job that has claimed its last attempt, which is its head whether it was noted or not.
    """

    directory: TrialDirectory
    whose: "TrialIdentity | TrialFacts"
    claimed_by: str = ""
    _notes: dict[str, JobNote | None] = field(default_factory=dict)

    def note(self, job_id: str, *, allocation: str = HEAD, attempt: int, after: str = "") -> None:
        """Remembers a job that the cluster has taken.

        Raises:
            OSError: if it cannot be written; the comment still tells, where the site leaves it alone.
        """
        name = job_name(self.whose.experiment, self.whose.trial, allocation)
        note = JobNote(name=name, allocation=allocation, attempt=attempt, after=after)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        atomic_write(self._folder / f"{job_id}.json", msgspec.json.encode(note))
        self._notes[job_id] = note

    def successor_of(self, job_id: str) -> str:
        """The job that was noted to go on after the end of this one, by an earlier supervisor or before a requeue."""
        noted = [other for name in list_names(self._folder) if (other := name.removesuffix(".json")).isdecimal()]
        followers = [other for other in noted if (note := self._note_of(other)) is not None and note.after == job_id]
        return max(followers, key=int, default="")

    def identify(self, job: Job) -> JobNote | None:
        """The role of a job in this trial; None if it is somebody else's."""
        tag = job.tag
        if tag:
            if tag.get("trial_uuid") != self.whose.uuid:
                return None
            allocation, attempt = tag.get("allocation") or HEAD, tag.get("attempt")
            return JobNote(
                name=job.name, allocation=str(allocation), attempt=attempt if isinstance(attempt, int) else -1
            )
        if not job.name.startswith(self._stem):
            return None
        note = self._note_of(job.job_id)
        return note if note is not None and note.name == job.name else None

    def select(self, jobs: Iterable[Job] | JobIndex) -> list[tuple[Job, JobNote]]:
        """The trial's own among all, with what they are to it."""
        if isinstance(jobs, JobIndex):
            jobs = [*jobs.by_uuid.get(self.whose.uuid, ()), *jobs.begins_with(self._stem)]
        return [(job, note) for job in jobs if (note := self.identify(job)) is not None]

    @property
    def _folder(self) -> Path:
        return self.directory.control_path / "jobs"

    @property
    def _stem(self) -> str:
        """The prefix of the names of all its jobs."""
        return f"{self.whose.experiment}.{self.whose.trial}"[:_STEM]

    def _note_of(self, job_id: str) -> JobNote | None:
        if job_id not in self._notes:
            path = self._folder / f"{job_id}.json"
            try:
                self._notes[job_id] = msgspec.json.decode(path.read_bytes(), type=JobNote)
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
                # Not kept: it may be written in the next moment.
                name = job_name(self.whose.experiment, self.whose.trial)
                head = JobNote(name=name, allocation=HEAD, attempt=-1)
                return head if job_id == self.claimed_by else None
        return self._notes[job_id]


def job_name(experiment: str, trial: str, allocation: str = HEAD) -> str:
    """What the queue shows; identity is the uuid in the comment, or the job id with this."""
    name = f"{validate_name(experiment, what='experiment name')}.{validate_name(trial, what='trial name')}"
    suffix = "" if allocation == HEAD else "." + allocation.replace("/", "-")
    return name[: _MAX_JOB_NAME - len(suffix)] + suffix


# The job that this process runs in.


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnJob:
    """One start of the job that an attempt runs in."""

    job_id: str
    restart_count: int
    """How often the cluster had put it back before."""
    host: str
    """The node of this process, as the cluster calls it."""
    allocations: RunningAllocations

    @property
    def hosts(self) -> tuple[str, ...]:
        """All nodes of the job."""
        return tuple(host for allocation in self.allocations.values() for host in allocation.hosts)


def own_job(environment: Mapping[str, str]) -> OwnJob | None:
    """The job whose batch step has this environment; None where it is no step of a job."""
    if not environment.get("SLURM_JOB_ID"):
        return None
    allocations = _batch_allocations(environment)
    return OwnJob(
        job_id=environment["SLURM_JOB_ID"],
        restart_count=int(environment.get("SLURM_RESTART_COUNT", "0") or 0),
        host=environment.get("SLURMD_NODENAME") or next(iter(allocations[0].hosts), ""),
        allocations=allocations,
    )


def _batch_allocations(environment: Mapping[str, str]) -> RunningAllocations:
    """The head, and the components of its heterogeneous job."""
    size = int(environment.get("SLURM_HET_SIZE", "0"))
    if size == 0:
        hosts = tuple(expand_host_list(environment.get("SLURM_JOB_NODELIST", "")))
        return {0: RunningAllocation(job_id=environment["SLURM_JOB_ID"], het_group=None, hosts=hosts)}
    return {
        group: RunningAllocation(
            job_id=environment["SLURM_JOB_ID_HET_GROUP_0"],
            het_group=group,
            hosts=tuple(expand_host_list(environment[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"])),
            own_job_id=environment[f"SLURM_JOB_ID_HET_GROUP_{group}"],
        )
        for group in range(size)
    }
