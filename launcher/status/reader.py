"""Where the evidence about trials comes from: their directories, one look at the queue, and Redis of those that run.

trial directory, queue, Redis --StatusReader--> Evidence --describe (pure)--> TrialStatus

A trial that has recorded its end costs a few small files; only those that may run are asked after in the queue and
Redis, several at a time. A directory that does not answer costs its own row, and no other.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from corral.experiments.trial.attempts import EndState, read_attempts, taken_away, why_not_another
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import LogState, TrialLogError
from corral.experiments.trial.mode import has_jobs
from corral.launcher.files.lookout import Lookout, Unanswered
from corral.launcher.slurm.client import answer_or
from corral.launcher.slurm.job_queue import LOOK_TIMEOUT_S, CachedQueue, QueueAnswer, SlurmQueue
from corral.launcher.slurm.own_jobs import OwnJobs
from corral.launcher.slurm.verdict import JobPhase
from corral.launcher.status.evidence import Evidence, ExtraJob, TrialJobs, find_jobs
from corral.launcher.status.judge import TrialStatus, describe, unreadable
from corral.launcher.trial.lock import is_locked
from corral.launcher.trial.view import TrialFacts, TrialView
from corral.launcher.trial.words import TrialState

_REDIS_TIMEOUT_S = 1.0
_READ_TIMEOUT_S = 60.0  # of a trial: at most five commands of SLURM, one after the other, and Redis
assert _READ_TIMEOUT_S > 5 * LOOK_TIMEOUT_S + 3 * _REDIS_TIMEOUT_S
_FULL_BYTES: Final = 4 << 20  # what is left at times where the next write of any size fails
_RECENT_S = 86400.0  # whose end nobody recorded a day ago is not asked after again and again

TrialRead = tuple[TrialStatus, Evidence | None]
"""What was read of one trial: its status, and what that rests on; None where its directory did not answer."""


class StatusReader:
    """Reads the status of trials; one look at the queue serves all trials of one read.

    Args:
        cluster: is asked about single jobs; None is the one that this machine reaches.
        queue: where the jobs come from; None asks the cluster each time, for who waits for one trial.
        lookout: looks at directories, which may hang.
    """

    def __init__(
        self,
        cluster: SlurmQueue | None = None,
        *,
        queue: CachedQueue | None = None,
        lookout: Lookout[Path] | None = None,
    ) -> None:
        self._cluster = cluster or SlurmQueue(timeout_s=LOOK_TIMEOUT_S)
        self._queue = queue
        self._lookout: Lookout[Path] = lookout or Lookout()

    def read(self, trials: Sequence[TrialFacts]) -> list[TrialStatus]:
        """Status of each trial."""
        return [status for status, _ in self.read_with_answer(trials)[0]]

    def read_with_answer(self, trials: Sequence[TrialFacts]) -> tuple[list[TrialRead], QueueAnswer]:
        """What is known of each trial, and what the cluster said; not asked if none of them may have jobs."""
        opened = self._lookout.look({facts.directory.path: partial(_open, facts) for facts in trials})
        whole = {path: one for path, one in opened.items() if not isinstance(one, Unanswered)}
        # Not older than the last submission.
        submissions = [one.submitted_at for one in whole.values() if _may_have_jobs(one)]
        answer = self._ask_queue(newer_than=max(submissions)) if submissions else QueueAnswer()
        # Cluster and Redis have deadlines of their own, which this one leaves room for.
        found = self._lookout.look(
            {path: partial(self._read_one, one, answer) for path, one in whole.items()}, patience_s=_READ_TIMEOUT_S
        )
        silent = {path: one for path, one in opened.items() if isinstance(one, Unanswered)}
        return [_known(facts.directory.path, (found | silent)[facts.directory.path]) for facts in trials], answer

    def _ask_queue(self, *, newer_than: float) -> QueueAnswer:
        if self._queue is None:
            return QueueAnswer().after_asking(self._cluster, time.time)
        return self._queue.look(newer_than=newer_than)

    def _read_one(self, opened: Evidence, answer: QueueAnswer) -> TrialRead:
        opened = replace(opened, queue=answer)
        evidence = (_gather_ended(opened) if opened.ended is not None else None) or self._gather(opened)
        return describe(evidence), evidence

    def _gather(self, opened: Evidence) -> Evidence:
        facts, directory, own_job_id, now = opened.facts, opened.facts.directory, opened.job_id, time.time()
        is_in_jobs = has_jobs(facts.mode)
        jobs = _jobs_of(opened, is_over=opened.attempt_ended is not None)
        is_recent = opened.attempt is not None and now - opened.view.last_sign_at < _RECENT_S
        job = jobs.head
        if is_in_jobs and job is None and own_job_id and is_recent and opened.queue.unreachable_since is None:
            job = answer_or(None, self._cluster.job, own_job_id)
        # The attempt has started, and its job, or the one that follows, waits.
        has_run = job is not None and (job.job_id != own_job_id or opened.has_run)
        if job is not None:
            job = self._cluster.look_closer(job, has_run=has_run)
        is_supervised = None if is_in_jobs else is_locked(directory)
        # Redis is worth asking if the job runs, or if nobody can say whether it does.
        may_have_job = is_in_jobs and (is_recent if job is None else job.phase is JobPhase.RUNNING)
        seen = _with_records(opened) if is_supervised or may_have_job else opened
        is_forgotten = is_in_jobs and job is None and is_recent and own_job_id
        # After Redis, which is taken down last: if it has just gone, the log already says why.
        log_state, log_damage = _read_log(opened)
        planned = opened.facts.planned_path
        has_moved = bool(is_supervised) and planned is not None and not planned.exists()
        moved = f"its folder was moved from {planned}, where its workers look for it; move it back" if has_moved else ""
        return replace(
            seen,
            now=now,
            ended=None,
            is_done=log_state.is_done,
            is_stopped=log_state.is_stopped and not log_state.is_handed_over,
            stop_request=_stop_request(directory),
            is_supervised=is_supervised,
            job=job,
            job_id=job.job_id if job else own_job_id,
            has_run=has_run,
            accounted=answer_or(None, self._cluster.accounted, own_job_id) if is_forgotten else None,
            extra_jobs=_read_extra_jobs(directory, jobs) if is_in_jobs else (),
            groups_kept_down=directory.read_groups_kept_down(),
            zombies=_zombies(jobs, seen),
            failure=opened.view.failure() if job is not None and job.state is TrialState.FAILED else None,
            damage=(opened.attempt.damage if opened.attempt else "", log_damage, why_no_room(directory.path), moved),
        )


def polite_reader() -> StatusReader:
    """For commands that look again and again: whatever their number, the cluster is asked rarely."""
    cluster = SlurmQueue(timeout_s=LOOK_TIMEOUT_S)
    return StatusReader(cluster, queue=CachedQueue(cluster))


def _known(path: Path, answer: TrialRead | Unanswered) -> TrialRead:
    return (unreadable(path, answer.about(path)), None) if isinstance(answer, Unanswered) else answer


def _open(facts: TrialFacts) -> Evidence:
    """The evidence about a trial before the cluster is asked."""
    view = TrialView.open(facts.directory)
    return Evidence(
        facts=facts,
        now=time.time(),
        view=view,
        attempt=view.record,
        submitted_at=view.submitted_at,
        lives=view.lives(facts.tasks),
        redis_started=view.last("redis_started") is not None,
        has_run=view.last("supervisor_started") is not None,
        job_id=view.job_id,
        ended=view.end if view.end is not None and view.end.is_final else None,
        attempt_ended=view.end,
        given_up=view.given_up(facts.tasks),
        history=view.history(),
        findings=view.findings(),
    )


def _may_have_jobs(opened: Evidence) -> bool:
    """Whether there may be a job of it: also of one that ended in trouble, which leaves them behind at times."""
    if not has_jobs(opened.facts.mode):
        return False
    ended = opened.ended
    return ended is None or (ended.state is not EndState.COMPLETE and time.time() - ended.ended_at < _RECENT_S)


def _jobs_of(opened: Evidence, *, is_over: bool) -> TrialJobs:
    own = OwnJobs(opened.facts.directory, opened.facts, claimed_by=opened.job_id)
    return find_jobs(opened.queue.index, own, job_id=opened.job_id, is_over=is_over)


def _gather_ended(opened: Evidence) -> Evidence | None:
    """A trial that has recorded its end; None if a job of it is there all the same, and would go on with it."""
    directory = opened.facts.directory
    jobs = _jobs_of(opened, is_over=False)
    waiting = (jobs.head,) if jobs.head and jobs.head.phase is JobPhase.WAITING else ()
    if waiting:
        attempts = read_attempts(directory)
        if why_not_another(attempts, _read_log(opened)[0], taken_away(directory, attempts)) is None:
            return None
    zombies = (*jobs.zombies, *waiting)
    has_failed = opened.ended is not None and opened.ended.state.is_failure
    return replace(
        opened,
        damage=(why_no_room(directory.path),) if has_failed else (),
        zombies=tuple(f"job {job.job_id} is still {job.word}; scancel {job.job_id}" for job in zombies),
        failure=opened.view.failure() if has_failed else None,
    )


def _with_records(opened: Evidence) -> Evidence:
    """With leased records and last records of the workers, and the clock of Redis, where it answers."""
    # Not at the top: redis takes longer to import than most answers take to give.
    from corral.launcher.trial.redis_server import connect_name_service, read_worker_records
    from corral.name_resolve.base import NameServiceError
    from corral.name_resolve.keys import LAST_SEEN_ROOT, WORKERS_ROOT

    facts = opened.facts
    try:
        with connect_name_service(facts.directory, facts.uuid, timeout_s=_REDIS_TIMEOUT_S) as names:
            last_seen = read_worker_records(names, LAST_SEEN_ROOT)
            records = read_worker_records(names, WORKERS_ROOT)
            return replace(opened, last_seen=last_seen, records=records, redis_now=names.clock())
    except (NameServiceError, OSError, ValueError):
        return opened


def _stop_request(directory: TrialDirectory) -> StopRequest | None:
    try:
        return directory.read_stop_request()
    except ValueError:
        return None


def _read_extra_jobs(directory: TrialDirectory, jobs: TrialJobs) -> tuple[ExtraJob, ...]:
    """The allocations beside the head, with the workers that the layout has there."""
    # Not at the top: it takes the schema of SLURM's options, and only trials with jobs have a layout.
    from corral.launcher.layout.layout import Layout

    try:
        layout = Layout.from_json(directory.layout_path.read_bytes())
        name_by_worker = {worker: layout.allocations[step.allocation].name for worker, step in layout.steps.items()}
    except (OSError, ValueError, IndexError):
        return ()
    return tuple(
        ExtraJob(
            allocation=one.name,
            is_elastic=one.role == "elastic",
            job=jobs.extra_jobs.get(one.name),
            workers=tuple(worker for worker, name in name_by_worker.items() if name == one.name),
        )
        for one in layout.allocations
        if one.role in ("group", "elastic")
    )


def _zombies(jobs: TrialJobs, seen: Evidence) -> tuple[str, ...]:
    notes = [
        f"job {job.job_id} of an earlier attempt is still {job.word}; scancel {job.job_id}" for job in jobs.zombies
    ]
    for worker, record in (seen.records or {}).items():
        if record.attempt != seen.attempt_number:
            notes.append(f"{worker} of attempt {record.attempt} still speaks, from {record.node or 'somewhere'}")
    return tuple(notes)


def _read_log(opened: Evidence) -> tuple[LogState, str]:
    """The state of the trial log, and its error."""
    attempt = opened.attempt
    try:
        state = TrialLog(opened.facts.directory.log_path).read()
    except TrialLogError as error:
        return LogState(), str(error)
    if attempt is not None and state.is_stopped and state.next_slot <= attempt.start_slot:
        return LogState(next_slot=state.next_slot), ""  # that Stop ended the attempt before this one
    return state, ""


def why_no_room(directory: Path) -> str:
    """What is full, and the way out; empty while there is room, or where nobody can say. A quota is not seen.

    Raises:
        OSError: the directory is not there, or does not answer.
    """
    file_system = os.statvfs(directory)
    if file_system.f_bavail * file_system.f_frsize < _FULL_BYTES:
        what = f"disk of {directory} is full: {_megabytes(file_system.f_bavail, file_system.f_frsize)} MB of "
        what += f"{_megabytes(file_system.f_blocks, file_system.f_frsize)} MB are free"
    elif file_system.f_files and not file_system.f_favail:
        what = f"disk of {directory} takes no more files: none of {file_system.f_files} is free"
    else:
        return ""
    return f"the {what}; make room, and the trial goes on by itself"


def _megabytes(blocks: int, block_bytes: int) -> str:
    return f"{blocks * block_bytes / 1e6:,.1f}"
