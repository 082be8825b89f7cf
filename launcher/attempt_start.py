"""How an attempt begins: a start of a job finds its attempt, or makes one, or learns that the trial is over.

keeper --open_attempt--> begin_attempt --record--> secrets, log folder --> supervisor
                             +--refused--> control/end-N.json, journal: trial_ended; the job ends at once

How the attempt before ended is read from control/, and asked of SLURM; the journal is only told.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from corral.experiments.attempt_ends import AttemptEndRecord, read_end, write_end
from corral.experiments.attempts import (
    AttemptClaim,
    AttemptRecord,
    AttemptRefusedError,
    WhyNot,
    begin_attempt,
    last_attempt,
    read_claim,
)
from corral.experiments.journal import Journal
from corral.experiments.plan import RunPlan
from corral.experiments.secrets import TrialSecrets
from corral.experiments.trial_directory import TrialDirectory
from corral.experiments.trial_log import StoppedError, TrialLog
from corral.launcher.node_loss import nodes_that_are_down, note_failed_node
from corral.launcher.processes import describe_this_process
from corral.launcher.slurm import SlurmClient, SlurmError
from corral.scheduling.slurm_formats import expand_host_list

_ASK_TIMEOUT_S = 5.0
_NODE_LISTS = ("SLURM_JOB_NODELIST", "SLURM_JOB_NODELIST_HET_GROUP_")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStart:
    """One start of a job: what an attempt is claimed by."""

    job_id: str
    restart_count: int
    nodes: tuple[str, ...] = ()
    """In SLURM's words, one text per component."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "JobStart":
        """Of the batch step that this process runs in; where there is no job, the process itself stands for it."""
        job_id = environment.get("SLURM_JOB_ID", "")
        if not job_id:
            own = describe_this_process()
            return cls(job_id=f"{own['host']}:{own['pid']}:{own['start_ticks']}", restart_count=0)
        whole, component = _NODE_LISTS
        components = sorted(name for name in environment if name.startswith(component)) or [whole]
        return cls(
            job_id=job_id,
            restart_count=int(environment.get("SLURM_RESTART_COUNT", "0") or 0),
            nodes=tuple(environment[name] for name in components if environment.get(name)),
        )


def claim_decides(directory: TrialDirectory) -> bool:
    """Whether this is a start of a job that has no attempt yet: it gets one, whoever seems to run the last."""
    previous = last_attempt(directory)
    if previous is None or previous.mode != "slurm":
        return False
    start, claim = JobStart.of_environment(os.environ), read_claim(directory, previous.attempt)
    return claim is None or not claim.is_of(start.job_id, start.restart_count)


def open_attempt(directory: TrialDirectory, *, client: SlurmClient | None = None) -> AttemptRecord | None:
    """The attempt that this process is to supervise, with its files; None if the trial is over, which is recorded.

    Raises:
        ValueError: if a file of the trial is not what corral writes.
    """
    plan = RunPlan.from_json(directory.plan_path.read_bytes())
    start = JobStart.of_environment(os.environ if plan.mode == "slurm" else {})
    previous = last_attempt(directory)
    claim = read_claim(directory, previous.attempt) if previous is not None else None
    follows = previous if claim is not None and not claim.is_of(start.job_id, start.restart_count) else None
    if follows is not None and claim is not None:
        end = _end_of_predecessor(directory, plan, follows.attempt, claim, start, client)
    try:
        record = begin_attempt(
            directory,
            job_id=start.job_id,
            restart_count=start.restart_count,
            mode=plan.mode,
            nodes=start.nodes,
        )
    except AttemptRefusedError as error:
        if follows is not None:
            _record_refusal(directory, end, start, error)
        return None
    if follows is not None:
        TrialSecrets.destroy(directory.secrets_path)
        TrialSecrets.create(directory.secrets_path)
        directory.clear_stop_request()
        Journal(directory.journal_path).append("submitted", attempt=record.attempt, job_id=start.job_id)
    directory.start_attempt_logs(record.attempt)
    return record


def _end_of_predecessor(
    directory: TrialDirectory,
    plan: RunPlan,
    attempt: int,
    claim: AttemptClaim,
    start: JobStart,
    client: SlurmClient | None,
) -> AttemptEndRecord:
    """How the attempt before ended; whoever wanted the trial to end there is heeded, by a stop in the trial log."""
    by = _final_request(directory)
    if by:
        _append_stop(directory, by=by, reason="asked for between two attempts")
    client = client or SlurmClient(timeout_s=_ASK_TIMEOUT_S)
    recorded = read_end(directory, attempt)
    if plan.mode == "slurm" and claim.job_id not in ("", start.job_id) and _was_cancelled(client, claim.job_id):
        _append_stop(directory, by="scancel", reason=f"job {claim.job_id} was cancelled")
        return AttemptEndRecord(attempt=attempt, state="CANCELLED", cause="", then="requeue")
    if recorded is not None:
        return recorded
    failed = _failed_nodes_of(claim, client) if plan.mode == "slurm" else []
    journal = Journal(directory.journal_path)
    for node in failed:
        note_failed_node(directory, node, lambda event, **fields: journal.append(event, attempt=attempt, **fields))
    end = AttemptEndRecord(
        attempt=attempt,
        state="NODE_FAILED" if failed else "LOST",
        cause="a node failed" if failed else "it ended without a word",
        then="requeue",
    )
    write_end(directory, end)
    journal.append("attempt_ended", attempt=attempt, state=end.state, cause=end.cause, then=end.then)
    return end


def _failed_nodes_of(claim: AttemptClaim, client: SlurmClient) -> list[str]:
    return nodes_that_are_down(client, [host for nodes in claim.nodes for host in expand_host_list(nodes)])


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
    directory: TrialDirectory, previous: AttemptEndRecord, start: JobStart, refused: AttemptRefusedError
) -> None:
    """The start of this job was for nothing; the end of the trial is written down if nobody did."""
    journal, attempt, state, cause = Journal(directory.journal_path), previous.attempt, previous.state, str(refused)
    journal.append("attempt_refused", attempt=attempt, job_id=start.job_id, reason=refused.reason, cause=cause)
    TrialSecrets.destroy(directory.secrets_path)
    recorded = read_end(directory, attempt)
    if recorded is not None and recorded.is_final:
        return
    match refused.reason:
        case WhyNot.COMPLETE:
            state, cause = "COMPLETE", ""
        case WhyNot.STOPPED:
            state = state if state == "CANCELLED" else "STOPPED"
        case WhyNot.NO_PROGRESS:
            cause = f"{cause}; look at rl-logs --errors, then continue with rl-submit --resume"
    write_end(directory, AttemptEndRecord(attempt=attempt, state=state, cause=cause, then=""))
    journal.append("trial_ended", attempt=attempt, state=state, cause=cause)
