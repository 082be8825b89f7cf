"""The jobs beside a trial's own, as a pure state machine: squeue's answers and the clock go in, requests come out.

One member, which is a group of layout `jobs` or an elastic worker:

    WANTED --asked for--> ASKED --sbatch--> QUEUED --SLURM starts it--> RUNNING --ends--> LEAVING
      ^                     |                 ^                            |                 |
      |                     | refused         +---- preempted, requeued ---+-----------------+
      +---------------------+-------------------- cancelled, timed out, failed (growing pause)

A place is given to workers while the job is RUNNING; the groups of a gang only get theirs together. What SLURM does not
answer changes nothing: the last known state stands. A supervisor that was started again adopts the jobs that its
predecessor asked for; those of an earlier attempt are cancelled.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from corral.launcher.extra_jobs.actions import (
    AskForJob,
    CancelJob,
    ClearJob,
    GivePlace,
    HoldPlace,
    JobSighting,
    MemberAction,
    MemberSpec,
    News,
    TakePlace,
)
from corral.launcher.extra_jobs.gang import GangGuard
from corral.launcher.slurm.verdict import judge_job
from corral.launcher.slurm.words import ENDED_WORDS, LEAVING_WORDS, PENDING_WORDS, RUNNING_WORDS

_FIRST_PAUSE_S = 5.0
_MAX_PAUSE_S = 600.0
_HEALTHY_S = 60.0
_QUICK_LOOK_S = 2.0
_SLOW_LOOK_S = 10.0
_QUICK_FOR_S = 60.0  # a job that has not started within a minute may take hours


class MemberState(StrEnum):
    """Where a member's job stands."""

    WANTED = "wanted"
    ASKED = "asked"
    QUEUED = "queued"
    RUNNING = "running"
    LEAVING = "leaving"
    RELEASED = "released"
    """Not wanted any more."""


@dataclass(slots=True)
class _Member:
    spec: MemberSpec
    state: MemberState = MemberState.WANTED
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
    """A run that is known to end, whatever squeue still says of it."""
    given: tuple[str, str] | None = None
    """The run whose place was given to the workers."""
    noted_reason: str = ""


@dataclass(slots=True)
class MemberJobs:
    """The decisions about all members of one attempt; every method returns what to do now."""

    specs: Sequence[MemberSpec]
    attempt: int
    gang: GangGuard
    _members: dict[str, _Member] = field(init=False)
    _cancelled: set[str] = field(default_factory=set)
    _has_looked: bool = False
    _changed_at: float = float("-inf")

    def __post_init__(self) -> None:
        self._members = {spec.name: _Member(spec) for spec in self.specs}

    def place(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """Job id and hosts of a place that was given to its workers."""
        member = self._members[name]
        return (member.job_id, member.hosts) if member.given is not None else None

    def why_away(self, name: str) -> str:
        """Why a place is not there, for people."""
        member = self._members[name]
        job = f"its job {member.job_id} is {member.state}" if member.job_id else f"its job is {member.state}"
        return f"{job} ({member.reason})" if member.reason else job

    def jobs(self) -> list[str]:
        """Every job that the members have at the moment."""
        return [member.job_id for member in self._members.values() if member.job_id]

    def look_interval_s(self, now: float) -> float:
        """How long squeue's last answer is good for."""
        is_open = any(member.given is None for member in self._members.values())
        return _QUICK_LOOK_S if is_open and now - self._changed_at < _QUICK_FOR_S else _SLOW_LOOK_S

    def tick(self, now: float) -> list[MemberAction]:
        """Time passed."""
        if not self._has_looked:  # a predecessor may have asked already
            return []
        actions = self._guard(now)
        for member in sorted(self._members.values(), key=lambda member: -member.spec.size):
            if member.state is MemberState.WANTED and now >= member.ask_at:
                member.state = MemberState.ASKED
                actions.append(AskForJob(member.spec.name))
        return actions

    def submitted(self, name: str, job_id: str, now: float) -> list[MemberAction]:
        """SLURM has taken the job."""
        member = self._members[name]
        if member.state is not MemberState.ASKED:
            self._cancelled.add(job_id)
            return [CancelJob(job_id)]
        member.state, member.job_id, member.reason, member.is_clear = MemberState.QUEUED, job_id, "", True
        self._changed_at = now
        return [News("member_submitted", {"allocation": name, "job_id": job_id})]

    def refused(self, name: str, why: str, now: float) -> list[MemberAction]:
        """SLURM has not taken the job."""
        member = self._members[name]
        if member.state is not MemberState.ASKED:
            return []
        pause_s = self._want_again(member, why, now)
        return [News("member_refused", {"allocation": name, "cause": why, "pause_s": pause_s})]

    def cleared(self, name: str, job_id: str, now: float) -> list[MemberAction]:
        """Nothing of a predecessor runs in the adopted job any more."""
        if self._members[name].job_id == job_id:
            self._members[name].is_clear = True
        return self._announce()

    def seen(self, sightings: Iterable[JobSighting], now: float) -> list[MemberAction]:
        """SLURM answered: these are all jobs of the trial's members that it knows."""
        self._has_looked = True
        actions: list[MemberAction] = []
        jobs_by_name: dict[str, dict[str, JobSighting]] = {name: {} for name in self._members}
        for job in sightings:
            if job.name not in self._members or job.attempt > self.attempt:
                continue
            if job.attempt < self.attempt:
                actions += self._cancel(job)
            else:
                jobs_by_name[job.name][job.job_id] = job
        for name, jobs in jobs_by_name.items():
            actions += self._take_in(self._members[name], jobs, now)
        return actions + self._guard(now)

    def checked(self, name: str, job_id: str, *, is_leaving: bool, cause: str = "") -> list[MemberAction]:
        """SLURM was asked about a place after something ended there."""
        member = self._members[name]
        if member.job_id != job_id or member.given is None:
            return []  # it was taken in the meantime, and that is known
        if not is_leaving:
            return [HoldPlace(name)]
        member.state, member.reason, member.left_run = MemberState.LEAVING, cause, member.run
        return self._announce()

    def release(self, name: str) -> list[MemberAction]:
        """The member is not wanted any more."""
        member = self._members[name]
        if member.spec.is_required or member.state is MemberState.RELEASED:
            return []
        member.state, member.reason = MemberState.RELEASED, "it was given up"
        actions: list[MemberAction] = [CancelJob(member.job_id)] if member.job_id else []
        self._cancelled.add(member.job_id)
        member.job_id = ""
        return actions + self._announce()

    def _take_in(self, member: _Member, jobs: dict[str, JobSighting], now: float) -> list[MemberAction]:
        actions: list[MemberAction] = []
        alive = [job for job in jobs.values() if job.head_word not in ENDED_WORDS and job.job_id not in self._cancelled]
        if member.state is MemberState.WANTED and alive:
            best = min(alive, key=lambda job: (job.head_word not in RUNNING_WORDS, int(job.job_id)))
            member.state, member.job_id, member.is_clear = MemberState.QUEUED, best.job_id, False
            actions.append(News("member_adopted", {"allocation": member.spec.name, "job_id": best.job_id}))
            actions.append(ClearJob(member.spec.name, best.job_id))
        if member.state is not MemberState.ASKED:
            for job in alive:
                actions += self._cancel(job) if job.job_id != member.job_id else []
        if member.job_id:
            actions += self._update(member, jobs.get(member.job_id), now)
        return actions

    def _update(self, member: _Member, job: JobSighting | None, now: float) -> list[MemberAction]:
        if job is None:
            return self._gone(member, "SLURM does not know its job any more", now)
        word = job.head_word
        if word in ENDED_WORDS:
            return self._gone(member, f"its job ended as {job.word}", now)
        if word in RUNNING_WORDS:
            return self._runs(member, job, now)
        if word in LEAVING_WORDS:
            if member.state is MemberState.RUNNING:
                member.state, member.reason = MemberState.LEAVING, "its job is ending"
        elif word in PENDING_WORDS:
            return self._waits(member, job, now)
        return []  # a word that this version does not know changes nothing

    def _runs(self, member: _Member, job: JobSighting, now: float) -> list[MemberAction]:
        name, run = member.spec.name, (job.job_id, job.start)
        if run == member.left_run:
            return []
        if job.hosts and len(job.hosts) < member.spec.num_nodes:
            # With --no-kill a job outlives its nodes, but what was planned for them has no place in it.
            have = f"{len(job.hosts)} of {member.spec.num_nodes} nodes"
            return [*self._cancel(job), *self._gone(member, f"its job has {have} left", now)]
        if run != member.run and job.hosts:
            member.state, member.run, member.hosts, member.reason = MemberState.RUNNING, run, job.hosts, ""
            member.ran_since = self._changed_at = now
            fields = {"allocation": name, "job_id": job.job_id, "nodes": ",".join(job.hosts)}
            return [News("member_running", dict(fields))]
        return []

    def _waits(self, member: _Member, job: JobSighting, now: float) -> list[MemberAction]:
        actions: list[MemberAction] = []
        if member.state in (MemberState.RUNNING, MemberState.LEAVING):
            self._changed_at = now
            cause = "preempted or requeued"
            actions.append(
                News(
                    "member_gone", {"allocation": member.spec.name, "job_id": job.job_id, "cause": cause, "pause_s": 0}
                )
            )
        member.state, member.reason = MemberState.QUEUED, job.reason
        is_blocked = judge_job(job.word, job.reason).state == "BLOCKED"
        if is_blocked and member.noted_reason != job.reason:
            member.noted_reason = job.reason
            fields = {"allocation": member.spec.name, "job_id": job.job_id, "cause": job.reason}
            actions.append(News("member_blocked", dict(fields)))
        return actions

    def _gone(self, member: _Member, cause: str, now: float) -> list[MemberAction]:
        job_id, member.job_id = member.job_id, ""
        pause_s = self._want_again(member, cause, now)
        fields = {"allocation": member.spec.name, "job_id": job_id, "cause": cause, "pause_s": pause_s}
        return [News("member_gone", dict(fields))]

    def _want_again(self, member: _Member, cause: str, now: float) -> float:
        if member.ran_since is not None and now - member.ran_since >= _HEALTHY_S:
            member.failures = 0
        member.failures += 1
        member.ran_since = None
        pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(member.failures - 1, 30))
        member.state, member.reason, member.ask_at = MemberState.WANTED, cause, now + pause_s
        self._changed_at = now
        return pause_s

    def _guard(self, now: float) -> list[MemberAction]:
        required = [member for member in self._members.values() if member.spec.is_required]
        running = {member.spec.name for member in required if member.state is MemberState.RUNNING}
        given_back = self.gang.look(running, now) if required else None
        if given_back is None:
            return self._announce()
        reasons = {name: self._members[name].reason or str(self._members[name].state) for name in given_back.missing}
        actions: list[MemberAction] = [
            News(
                "gang_given_back",
                {
                    "missing": reasons,
                    "waited_s": round(given_back.waited_s, 1),
                    "pause_s": round(given_back.pause_s, 1),
                },
            )
        ]
        for member in required:
            if member.job_id:
                actions.append(CancelJob(member.job_id))
                self._cancelled.add(member.job_id)
            member.job_id, member.state = "", MemberState.WANTED
            member.reason = "its gang was given back"
            member.ask_at = now + given_back.pause_s
        self._changed_at = now
        return actions + self._announce()

    def _announce(self) -> list[MemberAction]:
        """Gives and takes places, as they have changed since the last time."""
        actions: list[MemberAction] = []
        for member in self._members.values():
            is_there = member.state is MemberState.RUNNING and member.is_clear
            may_start = is_there and (self.gang.is_assembled or not member.spec.is_required)
            place = member.run if may_start else None
            if place == member.given:
                continue
            if member.given is not None:
                actions.append(TakePlace(member.spec.name, member.reason or "its job was started anew"))
            if place is not None:
                actions.append(GivePlace(member.spec.name))
            member.given = place
        return actions

    def _cancel(self, job: JobSighting) -> list[MemberAction]:
        if job.head_word in ENDED_WORDS or job.job_id in self._cancelled:
            return []
        self._cancelled.add(job.job_id)
        return [CancelJob(job.job_id)]
