"""Where the evidence about trials comes from: their directories, one squeue call for all, and Redis of those that run.

trial directory, squeue, Redis --StatusReader--> Evidence --describe (pure)--> TrialStatus
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from corral.experiments.attempts import AttemptRecord, last_attempt
from corral.experiments.journal import read_journal
from corral.experiments.trial_directory import TrialDirectory
from corral.experiments.trial_log import LogState, TrialLog, TrialLogError
from corral.launcher.lock import is_locked
from corral.launcher.slurm import QueuedJob, SlurmClient, SlurmError
from corral.launcher.status import Evidence, TrialStatus, WorkerLife, describe
from corral.launcher.trials import TrialFacts


class StatusReader:
    """Reads the status of trials; one squeue call serves all trials of one look."""

    def __init__(self, client: SlurmClient | None = None, *, redis_timeout_s: float = 1.0) -> None:
        self._client = client or SlurmClient(timeout_s=10.0)
        self._redis_timeout_s = redis_timeout_s

    def read(self, trials: Sequence[TrialFacts]) -> list[TrialStatus]:
        """Status of each trial."""
        jobs: list[QueuedJob] = []
        slurm_error = ""
        open_trials = [facts for facts in trials if facts.mode == "slurm" and not _has_ended(facts.directory)]
        if open_trials:
            try:
                jobs = self._client.queue()
            except SlurmError as error:
                slurm_error = str(error).partition("\n")[0]
        return [describe(self._gather(facts, jobs, slurm_error)) for facts in trials]

    def _gather(self, facts: TrialFacts, jobs: Sequence[QueuedJob], slurm_error: str) -> Evidence:
        directory = facts.directory
        attempt = last_attempt(directory)
        number = attempt.attempt if attempt else 0
        events = [event for event in read_journal(directory.journal_path) if event.get("attempt", number) == number]
        ended = next((event for event in reversed(events) if event["event"] == "trial_ended"), None)
        job_id = next((str(event.get("job_id", "")) for event in reversed(events) if event["event"] == "submitted"), "")
        job = _find_job(jobs, facts.uuid, number, job_id)
        is_supervised = None if facts.mode == "slurm" else is_locked(directory)
        may_run = ended is None and (is_supervised or (job is not None and job.state == "RUNNING"))
        records = self._read_records(facts) if may_run else None
        # After Redis, which is taken down last: if it has just gone, the log already says why.
        log_state = _read_log(directory, attempt)
        try:
            request = directory.read_stop_request()
        except ValueError:
            request = None
        return Evidence(
            facts=facts,
            now=time.time(),
            attempt=attempt,
            lives={worker: _life(worker, events) for worker in facts.workers},
            ended=ended,
            redis_started=any(event["event"] == "redis_started" for event in events),
            is_done=log_state.is_done,
            is_stopped=log_state.is_stopped and (attempt is None or log_state.next_slot > attempt.start_slot),
            stop_requested_by=request.by if request else None,
            is_supervised=is_supervised,
            job=job,
            job_id=job.job_id if job else job_id,
            slurm_error=slurm_error if facts.mode == "slurm" else "",
            records=records,
        )

    def _read_records(self, facts: TrialFacts) -> dict[str, dict[str, Any]] | None:
        # Not at the top: redis takes longer to import than most answers take to give.
        from corral.launcher.trial_redis import connect_name_service
        from corral.name_resolve.errors import NameServiceError
        from corral.name_resolve.keys import TrialKeys

        root = TrialKeys(facts.uuid).workers_root()
        try:
            with connect_name_service(facts.directory, facts.uuid, timeout_s=self._redis_timeout_s) as names:
                texts = names.get_subtree(root)
        except (NameServiceError, OSError, ValueError):
            return None
        records = {}
        for name, text in texts.items():
            try:
                record = json.loads(text)
            except ValueError:
                continue
            if isinstance(record, dict):
                records[name.removeprefix(f"{root}/")] = record
        return records


def _life(worker: str, events: Sequence[Mapping[str, Any]]) -> WorkerLife:
    starts = [event for event in events if event["event"] == "worker_started" and event.get("worker") == worker]
    exits = [event for event in events if event["event"] == "worker_exited" and event.get("worker") == worker]
    if not starts:
        return WorkerLife()
    started, ended = starts[-1], exits[-1] if exits else None
    is_over = ended is not None and len(exits) >= len(starts)
    return WorkerLife(
        pid=None if is_over else started.get("pid"),
        node=str(started.get("node") or ""),
        started_at=float(started["time"]),
        restarts=len(starts) - 1,
        exit=_exit_text(int(ended["returncode"])) if ended is not None and is_over else "",
        ended_at=float(ended["time"]) if ended is not None and is_over else None,
    )


def _exit_text(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit {returncode}"


def _find_job(jobs: Sequence[QueuedJob], uuid: str, attempt: int, job_id: str) -> QueuedJob | None:
    by_id = [job for job in jobs if job.job_id == job_id]
    tagged = [job for job in jobs if job.tag.get("trial_uuid") == uuid and job.tag.get("allocation") == "head"]
    # Every attempt's job carries the same tag: the newest one is this attempt's.
    return max(by_id or tagged, key=lambda job: int(job.job_id), default=None)


def _has_ended(directory: TrialDirectory) -> bool:
    attempt = last_attempt(directory)
    events = read_journal(directory.journal_path)
    return attempt is not None and any(
        event["event"] == "trial_ended" and event.get("attempt") == attempt.attempt for event in events
    )


def _read_log(directory: TrialDirectory, attempt: AttemptRecord | None) -> LogState:
    log = TrialLog(directory.log_path)
    try:
        state = log.read()
    except TrialLogError:
        return LogState()
    if attempt is not None and state.is_stopped and state.next_slot <= attempt.start_slot:
        return LogState(next_slot=state.next_slot)  # that Stop ended the attempt before this one
    return state
