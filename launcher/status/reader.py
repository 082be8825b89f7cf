"""Where the evidence about trials comes from: their directories, one look at the queue, and Redis of those that run.

trial directory, queue, Redis --StatusReader--> Evidence --describe (pure)--> TrialStatus

A trial that has recorded its end costs a few small files; only those that may run are asked after in the queue and
Redis, several at a time. A directory that does not answer costs its own row, and no other.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from corral.experiments.trial.attempt_end_record import read_end
from corral.experiments.trial.attempts import (
    AttemptRecord,
    last_attempt,
    read_attempts,
    read_claim,
    taken_away,
    why_not_another,
)
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.journal import read_journal
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import LogState, TrialLogError
from corral.experiments.trial.mode import has_jobs
from corral.experiments.trial.worker_record import WorkerRecord
from corral.launcher.cluster.cached_queue import CachedQueue, DirectQueue, Queue, QueueAnswer
from corral.launcher.cluster.errors import ClusterError
from corral.launcher.cluster.job_queue import JobQueue, job_if_known
from corral.launcher.cluster.jobs import Job, JobPhase
from corral.launcher.clusters import queue_here
from corral.launcher.files.free_room import why_no_room
from corral.launcher.files.lookout import Lookout, Unanswered
from corral.launcher.layout.layout import Layout
from corral.launcher.status.evidence import Evidence, ExtraJob, TrialJobs, find_jobs, own_jobs_of
from corral.launcher.status.judge import TrialStatus, describe, unreadable
from corral.launcher.status.words import TrialState
from corral.launcher.trial.exits import is_consequence, read_exits
from corral.launcher.trial.find import TrialFacts
from corral.launcher.trial.history import JournalView
from corral.launcher.trial.lock import is_locked

_CLUSTER_TIMEOUT_S = 10.0
_REDIS_TIMEOUT_S = 1.0
_READ_TIMEOUT_S = 60.0
_RECENT_S = 86400.0  # whose end nobody recorded a day ago is not asked after again and again


class StatusReader:
    """Reads the status of trials; one look at the queue serves all trials of one read.

    Args:
        cluster: is asked about single jobs; None is the one that this machine reaches.
        queue: where the jobs come from; None asks the cluster each time.
        lookout: looks at directories, which may hang.
    """

    def __init__(
        self,
        cluster: JobQueue | None = None,
        *,
        queue: Queue | None = None,
        lookout: Lookout[Path] | None = None,
    ) -> None:
        self._cluster = cluster or queue_here(timeout_s=_CLUSTER_TIMEOUT_S)
        self._queue = queue or DirectQueue(self._cluster)
        self._lookout: Lookout[Path] = lookout or Lookout()

    def read(self, trials: Sequence[TrialFacts]) -> list[TrialStatus]:
        """Status of each trial."""
        return [one.status for one in self.read_with_answer(trials)[0]]

    def read_with_answer(self, trials: Sequence[TrialFacts]) -> tuple[list["TrialRead"], QueueAnswer]:
        """What is known of each trial, and what the cluster said; not asked if none of them may have jobs."""
        opened = self._lookout.look({facts.directory.path: partial(_open, facts) for facts in trials})
        whole = {path: one for path, one in opened.items() if not isinstance(one, Unanswered)}
        answer = self._look([one for one in whole.values() if one.may_have_jobs])
        # Cluster and Redis have deadlines of their own, which this one leaves room for.
        found = self._lookout.look(
            {path: partial(self._read_one, one, answer) for path, one in whole.items()}, patience_s=_READ_TIMEOUT_S
        )
        silent = {path: one for path, one in opened.items() if isinstance(one, Unanswered)}
        return [_known(facts, (found | silent)[facts.directory.path]) for facts in trials], answer

    def _read_one(self, trial: "_OpenTrial", answer: QueueAnswer) -> "TrialRead":
        evidence = (_gather_ended(trial, answer) if trial.ended is not None else None) or self._gather(trial, answer)
        return TrialRead(facts=trial.facts, status=describe(evidence), evidence=evidence)

    def _look(self, trials: Sequence["_OpenTrial"]) -> QueueAnswer:
        """The queue, if one of these trials may be in it; not older than the last submission."""
        if not trials:
            return QueueAnswer()
        return self._queue.look(newer_than=max(trial.submitted_at for trial in trials))

    def _gather(self, trial: "_OpenTrial", answer: QueueAnswer) -> Evidence:
        facts, attempt, view = trial.facts, trial.attempt, trial.view
        directory, now = facts.directory, time.time()
        own_job_id = trial.job_id
        is_in_jobs = has_jobs(facts.mode)
        jobs = find_jobs(
            answer.index,
            own_jobs_of(facts, claimed_by=own_job_id),
            job_id=own_job_id,
            is_over=trial.attempt_ended is not None,
        )
        is_recent = attempt is not None and now - _last_sign(directory, attempt) < _RECENT_S
        job = jobs.head
        if is_in_jobs and job is None and own_job_id and is_recent and answer.unreachable_since is None:
            job = job_if_known(self._cluster, own_job_id)
        # The attempt has started, and its job, or the one that follows, waits.
        has_run = job is not None and (job.job_id != own_job_id or view.last("supervisor_started") is not None)
        if job is not None:
            job = self._cluster.look_closer(job, has_run=has_run)
        is_supervised = None if is_in_jobs else is_locked(directory)
        # Redis is worth asking if the job runs, or if nobody can say whether it does.
        may_have_job = is_in_jobs and (is_recent if job is None else job.phase is JobPhase.RUNNING)
        seen = self._read_records(facts) if is_supervised or may_have_job else _UNSEEN
        # After Redis, which is taken down last: if it has just gone, the log already says why.
        log_state, log_damage = _read_log(directory, attempt)
        names, allocation_by_worker = _read_extra_jobs(directory) if is_in_jobs else ({}, {})
        return replace(
            trial.evidence(now),
            redis_started=view.last("redis_started") is not None,
            is_done=log_state.is_done,
            is_stopped=log_state.is_stopped and not log_state.is_handed_over,
            stop_request=_stop_request(directory),
            is_supervised=is_supervised,
            job=job,
            job_id=job.job_id if job else own_job_id,
            cluster_error=answer.error if is_in_jobs else "",
            records=seen.records,
            last_seen=seen.last_seen,
            redis_now=seen.redis_now,
            attempt_ended=trial.attempt_ended,
            has_run=has_run,
            accounted=self._ask_accounting(own_job_id) if is_in_jobs and job is None and is_recent else None,
            unreachable_since=answer.unreachable_since if is_in_jobs else None,
            jobs_known_at=answer.asked_at,
            extra_jobs=tuple(
                ExtraJob(allocation=name, is_elastic=is_elastic, job=jobs.extra_jobs.get(name))
                for name, is_elastic in names.items()
            ),
            allocation_by_worker=allocation_by_worker,
            groups_kept_down=directory.read_groups_kept_down(),
            given_up=view.given_up(facts.workers),
            zombies=_zombies(jobs, seen.records, view.attempt),
            failure=_read_failure(directory, view, has_failed=job is not None and job.state == "FAILED"),
            damage=tuple(
                text for text in (attempt.damage if attempt else "", log_damage, why_no_room(directory.path)) if text
            ),
        )

    def _ask_accounting(self, job_id: str) -> Job | None:
        try:
            return self._cluster.accounted(job_id) if job_id and self._queue.has_accounting() else None
        except ClusterError:
            return None

    def _read_records(self, facts: TrialFacts) -> "_Seen":
        # Not at the top: redis takes longer to import than most answers take to give.
        from corral.launcher.trial.rendezvous import connect_name_service, read_worker_records
        from corral.name_resolve.errors import NameServiceError
        from corral.name_resolve.keys import LAST_SEEN_ROOT, WORKERS_ROOT

        try:
            with connect_name_service(facts.directory, facts.uuid, timeout_s=_REDIS_TIMEOUT_S) as names:
                return _Seen(
                    last_seen=read_worker_records(names, LAST_SEEN_ROOT),
                    records=read_worker_records(names, WORKERS_ROOT),
                    redis_now=names.clock(),
                )
        except (NameServiceError, OSError, ValueError):
            return _UNSEEN


def polite_reader() -> StatusReader:
    """For commands that look again and again: whatever their number, the cluster is asked rarely."""
    cluster = queue_here(timeout_s=_CLUSTER_TIMEOUT_S)
    return StatusReader(cluster, queue=CachedQueue(cluster))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRead:
    """What was read of one trial."""

    facts: TrialFacts
    status: TrialStatus
    evidence: Evidence | None
    """None where its directory did not answer."""


def _known(facts: TrialFacts, answer: TrialRead | Unanswered) -> TrialRead:
    if not isinstance(answer, Unanswered):
        return answer
    path = facts.directory.path
    return TrialRead(facts=facts, status=unreadable(path, answer.about(path)), evidence=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Leased records and last records by worker, and the clock of Redis; nothing where it does not answer."""

    records: dict[str, WorkerRecord] | None
    last_seen: dict[str, WorkerRecord]
    redis_now: float | None


_UNSEEN = _Seen(records=None, last_seen={}, redis_now=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenTrial:
    """What is read of a trial before the cluster is asked."""

    facts: TrialFacts
    attempt: AttemptRecord | None
    view: JournalView
    job_id: str
    """Of the job that runs the last attempt, or is to run it."""
    ended: Mapping[str, Any] | None
    """The record of its end, if it has one."""
    attempt_ended: Mapping[str, Any] | None
    """How the last attempt ended."""

    def evidence(self, now: float) -> Evidence:
        """What is known of it so far."""
        return Evidence(
            facts=self.facts,
            now=now,
            attempt=self.attempt,
            lives=self.view.lives(self.facts.workers),
            redis_started=True,
            job_id=self.job_id,
            history=self.view.history(),
            findings=self.view.findings(),
        )

    @property
    def may_have_jobs(self) -> bool:
        """Whether there may be a job of it: also of one that ended in trouble, which leaves them behind at times."""
        if not has_jobs(self.facts.mode):
            return False
        if self.ended is None:
            return True
        return self.ended["state"] != TrialState.COMPLETE and time.time() - float(self.ended["time"]) < _RECENT_S

    @property
    def submitted_at(self) -> float:
        """When its last job was submitted: what the cluster said before does not count."""
        submissions = [
            float(event["time"])
            for event in self.view.events
            if event["event"] in ("submitted", "successor_submitted", "extra_job_submitted")
        ]
        return max([*submissions[-1:], self.attempt.submitted_at if self.attempt else 0.0])


def _open(facts: TrialFacts) -> _OpenTrial:
    attempt = last_attempt(facts.directory)
    events = read_journal(facts.directory.journal_path)
    view = JournalView(events, attempt.attempt if attempt else 0)
    told, attempt_told = view.last("trial_ended"), view.last("attempt_ended")
    record = read_end(facts.directory, view.attempt)
    if attempt is None:
        ended, attempt_ended = None, None
    elif record is None:  # whoever ended it could not write it down
        ended, attempt_ended = told, attempt_told or told
    else:
        # What is in control/ decides; the journal knows when.
        event = told or attempt_told
        moment = event["time"] if event is not None else _last_sign(facts.directory, attempt)
        attempt_ended = {"attempt": record.attempt, "state": record.state, "cause": record.cause, "time": moment}
        ended = attempt_ended if record.is_final else None
    job_id = _job_id(facts.directory, view)
    return _OpenTrial(facts=facts, attempt=attempt, view=view, job_id=job_id, ended=ended, attempt_ended=attempt_ended)


def _gather_ended(trial: _OpenTrial, answer: QueueAnswer) -> Evidence | None:
    """A trial that has recorded its end; None if a job of it is there all the same, and would go on with it."""
    directory = trial.facts.directory
    own = own_jobs_of(trial.facts, claimed_by=trial.job_id)
    jobs = find_jobs(answer.index, own, job_id=trial.job_id, is_over=False)
    waiting = (jobs.head,) if jobs.head and jobs.head.phase is JobPhase.WAITING else ()
    attempts = read_attempts(directory)
    log = _read_log(directory, trial.attempt)[0]
    if waiting and why_not_another(attempts, log, taken_away(directory, attempts)) is None:
        return None
    zombies = (*jobs.zombies, *waiting)
    has_failed = trial.ended is not None and trial.ended["state"] == TrialState.FAILED
    return replace(
        trial.evidence(time.time()),
        ended=trial.ended,
        zombies=tuple(f"job {job.job_id} is still {job.word}; scancel {job.job_id}" for job in zombies),
        failure=_read_failure(directory, trial.view, has_failed=has_failed),
    )


def _job_id(directory: TrialDirectory, view: JournalView) -> str:
    """The job that runs the last attempt, or is to run it."""
    try:
        claim = read_claim(directory, view.attempt)
    except ValueError:
        claim = None
    if claim is not None and claim.job_id.isdigit():
        return claim.job_id
    submitted = view.last("submitted")
    return str(submitted.get("job_id", "")) if submitted else ""


def _last_sign(directory: TrialDirectory, attempt: AttemptRecord) -> float:
    try:
        return max(directory.journal_path.stat().st_mtime, attempt.submitted_at)
    except FileNotFoundError:
        return attempt.submitted_at


def _stop_request(directory: TrialDirectory) -> StopRequest | None:
    try:
        return directory.read_stop_request()
    except ValueError:
        return None


def _read_extra_jobs(directory: TrialDirectory) -> tuple[dict[str, bool], dict[str, str]]:
    """Whether each allocation beside the head is elastic, and which workers run in it."""
    try:
        layout = Layout.from_json(directory.layout_path.read_bytes())
        name_by_worker = {worker: layout.allocations[step.allocation].name for worker, step in layout.steps.items()}
    except (OSError, ValueError, IndexError):
        return {}, {}
    names = {one.name: one.role == "elastic" for one in layout.allocations if one.role in ("group", "elastic")}
    return names, {worker: name for worker, name in name_by_worker.items() if name in names}


def _zombies(jobs: TrialJobs, records: Mapping[str, WorkerRecord] | None, attempt: int) -> tuple[str, ...]:
    notes = [
        f"job {job.job_id} of an earlier attempt is still {job.word}; scancel {job.job_id}" for job in jobs.zombies
    ]
    for worker, record in (records or {}).items():
        if record.attempt != attempt:
            notes.append(f"{worker} of attempt {record.attempt} still speaks, from {record.node or 'somewhere'}")
    return tuple(notes)


def _read_failure(directory: TrialDirectory, view: JournalView, *, has_failed: bool) -> dict[str, Any] | None:
    """The earliest failure of the attempt that is not the consequence of another."""
    if not has_failed:
        return None
    failures = [
        record for record in read_exits(directory) if record.get("attempt") == view.attempt and record["returncode"]
    ]
    causes = [record for record in failures if not is_consequence(record)]
    return next(iter(causes or failures), None)


def _read_log(directory: TrialDirectory, attempt: AttemptRecord | None) -> tuple[LogState, str]:
    """What the trial log says of this attempt, and what is wrong with it."""
    try:
        state = TrialLog(directory.log_path).read()
    except TrialLogError as error:
        return LogState(), str(error)
    if attempt is not None and state.is_stopped and state.next_slot <= attempt.start_slot:
        return LogState(next_slot=state.next_slot), ""  # that Stop ended the attempt before this one
    return state, ""
