"""How an attempt begins: a start of a job finds its attempt, or makes one, or learns that the trial is over.

keeper --open_attempt--> begin_attempt --record--> secrets, log folder --> supervisor
                             +--refused--> journal: trial_ended; the job ends at once and leaves nothing
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from corral.experiments.attempts import (
    AttemptClaim,
    AttemptRecord,
    AttemptRefusedError,
    begin_attempt,
    last_attempt,
    read_claim,
)
from corral.experiments.journal import Journal, read_journal
from corral.experiments.plan import RunPlan
from corral.experiments.secrets import TrialSecrets
from corral.experiments.trial_directory import TrialDirectory
from corral.experiments.trial_log import StoppedError, TrialLog
from corral.launcher.node_loss import nodes_that_are_down
from corral.launcher.processes import describe_this_process
from corral.launcher.slurm import SlurmClient, SlurmError

_ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStart:
    """One start of a job: what an attempt is claimed by."""

    job_id: str
    restart_count: int

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "JobStart":
        """Of the batch step that this process runs in; where there is no job, the process itself stands for it."""
        job_id = environment.get("SLURM_JOB_ID", "")
        if not job_id:
            own = describe_this_process()
            return cls(job_id=f"{own['host']}:{own['pid']}:{own['start_ticks']}", restart_count=0)
        return cls(job_id=job_id, restart_count=int(environment.get("SLURM_RESTART_COUNT", "0") or 0))


def open_attempt(directory: TrialDirectory, *, client: SlurmClient | None = None) -> AttemptRecord | None:
    """The attempt that this process is to supervise, with its files; None if the trial is over, which is recorded.

    Raises:
        ValueError: if a file of the trial is not what corral writes.
    """
    plan = RunPlan.from_json(directory.plan_path.read_bytes())
    start = JobStart.of_environment(os.environ if plan.mode == "slurm" else {})
    previous = last_attempt(directory)
    previous_claim = read_claim(directory, previous.attempt) if previous else None
    own = AttemptClaim(job_id=start.job_id, restart_count=start.restart_count)
    is_new = previous is not None and previous_claim is not None and previous_claim != own
    if previous is not None and is_new:
        state = _end_of_predecessor(directory, plan, previous, previous_claim, start, client)
    try:
        record = begin_attempt(
            directory,
            job_id=start.job_id,
            restart_count=start.restart_count,
            mode=plan.mode,
            max_attempts=plan.launch.max_attempts,
        )
    except AttemptRefusedError as error:
        if previous is not None and is_new:
            _record_refusal(directory, previous, start, state=state, cause=str(error))
        return None
    if is_new:
        TrialSecrets.destroy(directory.secrets_path)
        TrialSecrets.create(directory.secrets_path)
        directory.clear_stop_request()
        Journal(directory.journal_path).append("submitted", attempt=record.attempt, job_id=start.job_id)
    directory.start_attempt_logs(record.attempt)
    return record


def _end_of_predecessor(
    directory: TrialDirectory,
    plan: RunPlan,
    previous: AttemptRecord,
    claim: AttemptClaim | None,
    start: JobStart,
    client: SlurmClient | None,
) -> str:
    """How the attempt before ended; whoever wanted the trial to end there is heeded, by a stop in the trial log."""
    events = [event for event in read_journal(directory.journal_path) if event.get("attempt", -1) == previous.attempt]
    request = _final_request(directory)
    if request:
        _append_stop(directory, by=request, reason="asked for between two attempts")
    recorded = [event for event in events if event["event"] in ("attempt_ended", "trial_ended")]
    if plan.mode == "slurm" and claim is not None and claim.job_id != start.job_id:
        client = client or SlurmClient(timeout_s=_ASK_TIMEOUT_S)
        if _was_cancelled(client, claim.job_id):
            _append_stop(directory, by="scancel", reason=f"job {claim.job_id} was cancelled")
            return "CANCELLED"
    if recorded:
        return str(recorded[-1]["state"])
    state = "LOST"
    journal = Journal(directory.journal_path)
    if plan.mode == "slurm":
        hosts = sorted({str(event["node"]) for event in events if event["event"] == "worker_started"})
        hosts += [str(event["node"]) for event in events if event["event"] == "supervisor_started"]
        hosts += [str(event.get("host")) for event in events if event["event"] == "supervisor_started"]
        for node in nodes_that_are_down(client or SlurmClient(timeout_s=_ASK_TIMEOUT_S), sorted(set(hosts))):
            journal.append("node_failed", attempt=previous.attempt, node=node)
            state = "NODE_FAILED"
    cause = "a node failed" if state == "NODE_FAILED" else "it ended without a word"
    journal.append("attempt_ended", attempt=previous.attempt, state=state, cause=cause, then="requeue")
    return state


def _final_request(directory: TrialDirectory) -> str:
    """Who asked for the end of the trial between two attempts, or ""."""
    try:
        request = directory.read_stop_request()
    except ValueError:
        return ""
    return request.by if request is not None and not request.then else ""


def _was_cancelled(client: SlurmClient, job_id: str) -> bool:
    try:
        job = client.job(job_id)
    except SlurmError:
        return False
    return job is not None and job.get("JobState", "").startswith("CANCELLED")


def _append_stop(directory: TrialDirectory, *, by: str, reason: str) -> None:
    try:
        TrialLog(directory.log_path).request_stop(by, reason=reason)
    except StoppedError:
        return  # it is complete: there is nothing to stop


def _record_refusal(
    directory: TrialDirectory, previous: AttemptRecord, start: JobStart, *, state: str, cause: str
) -> None:
    """The start of this job was for nothing; the end of the trial is written down if nobody did."""
    journal = Journal(directory.journal_path)
    journal.append("attempt_refused", attempt=previous.attempt, job_id=start.job_id, cause=cause)
    TrialSecrets.destroy(directory.secrets_path)
    ended = [
        event
        for event in read_journal(directory.journal_path)
        if event["event"] == "trial_ended" and event.get("attempt") == previous.attempt
    ]
    if ended:
        return
    log = TrialLog(directory.log_path).read()
    if log.is_done:
        state, cause = "COMPLETE", ""
    elif log.is_stopped and not log.is_handed_over and state != "CANCELLED":
        state = "STOPPED"
    elif state != "CANCELLED":
        cause = f"{cause}; look at rl-logs --errors, then continue with rl-submit --resume"
    journal.append("trial_ended", attempt=previous.attempt, state=state, cause=cause)
