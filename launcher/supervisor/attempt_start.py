"""How an attempt begins: a start of a job finds its attempt, or makes one, or learns that the trial is over.

keeper --open_attempt--> begin_attempt --record--> secrets, log folder --> supervisor
                             +--refused--> control/end-N.json; the job ends at once

How the attempt before ended is read from control/, and asked of the cluster; the journal is only told. What the files
refuse for a moment is tried again step by step: a second look from the beginning would find our own claim, and no
predecessor.
"""

import os

from corral.experiments.trial.attempts import (
    AttemptClaim,
    AttemptEnd,
    AttemptRecord,
    AttemptRefusedError,
    EndState,
    WhyNot,
    begin_attempt,
    last_attempt,
    read_claim,
    read_end,
    write_end,
)
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import StoppedError
from corral.experiments.trial.mode import has_jobs
from corral.experiments.trial.secrets import TrialSecrets
from corral.launcher.cluster.errors import answer_or
from corral.launcher.cluster.own_job import OwnJob
from corral.launcher.files.patience import FilePatience
from corral.launcher.slurm.job_queue import SlurmQueue
from corral.launcher.slurm.step import own_job
from corral.launcher.supervisor.recorder import note_failed_node
from corral.launcher.trial.find import TrialFacts, load_facts
from corral.launcher.trial.lock import SupervisorRunsError
from corral.launcher.trial.processes import describe_this_process
from corral.launcher.trial.words import TrialState

_ASK_TIMEOUT_S = 5.0


def _start_of(mode: str) -> OwnJob:
    """The start of a job that this process is; where there is no job, the process itself stands for it."""
    own = own_job(os.environ) if has_jobs(mode) else None
    if own is not None:
        return own
    this = describe_this_process()
    return OwnJob(
        job_id=f"{this['host']}:{this['pid']}:{this['start_ticks']}", restart_count=0, host="", allocations={}
    )


def claim_decides(directory: TrialDirectory) -> bool:
    """Whether this is a start of a job that has no attempt yet: it gets one, whoever seems to run the last."""
    previous = last_attempt(directory)
    if previous is None or not has_jobs(previous.mode):
        return False
    start, claim = _start_of(previous.mode), read_claim(directory, previous.attempt)
    return claim is None or not claim.is_of(start.job_id, start.restart_count)


def open_attempt(directory: TrialDirectory, *, patience: FilePatience | None = None) -> AttemptRecord | None:
    """The attempt that this process is to supervise, with its files; None if the trial is over, which is recorded.

    Raises:
        ValueError: if a file of the trial is not what corral writes.
        OSError: if the files of the trial fail for longer.
    """
    patience = patience or FilePatience()
    mode = patience.insist("read the plan", the_facts, directory).mode
    cluster = SlurmQueue(timeout_s=_ASK_TIMEOUT_S) if has_jobs(mode) else None
    start = _start_of(mode)
    predecessor = patience.insist("read the last attempt", _predecessor_of, directory, start)
    end = None
    if predecessor is not None:
        what = "record how the attempt before ended"
        end = patience.insist(what, _end_of_predecessor, directory, *predecessor, start, cluster)
    try:
        record = patience.insist(
            "claim an attempt",
            begin_attempt,
            directory,
            job_id=start.job_id,
            restart_count=start.restart_count,
            mode=mode,
            nodes=start.hosts,
        )
    except AttemptRefusedError as error:
        if end is not None:
            patience.insist("record that no attempt follows", _record_refusal, directory, end, start, error)
        return None
    if end is not None:
        patience.insist("make new secrets", _renew, directory)
        tell = Journal(directory.journal_path).append
        patience.insist("record the attempt", tell, "submitted", attempt=record.attempt, job_id=start.job_id)
    patience.insist("make the folder of its logs", directory.start_attempt_logs, record.attempt)
    return record


def record_failed_start(directory: TrialDirectory, error: Exception) -> None:
    """Records that this start could not begin an attempt, unless another start runs the last or the trial has ended."""
    last = last_attempt(directory)
    end = read_end(directory, last.attempt) if last is not None else None
    if last is None or (end is not None and (end.is_final or isinstance(error, SupervisorRunsError))):
        return
    start, claim = _start_of(last.mode), read_claim(directory, last.attempt)
    if end is not None or claim is None or claim.is_of(start.job_id, start.restart_count):
        cause = f"the supervisor could not start: {error}" if end is None else f"{end.cause}; the next attempt: {error}"
        failed = AttemptEnd(attempt=last.attempt, state=EndState.FAILED, cause=cause, then="", caused_by="supervisor")
        _record_end(directory, failed)


def the_facts(directory: TrialDirectory) -> TrialFacts:
    """What the plan says; FileNotFoundError if there is none."""
    facts = load_facts(directory)
    if facts is None:
        raise FileNotFoundError(f"{directory.plan_path} is not there")
    return facts


def _predecessor_of(directory: TrialDirectory, start: OwnJob) -> tuple[int, AttemptClaim] | None:
    """The last attempt, if another start of a job has claimed it."""
    last = last_attempt(directory)
    claim = read_claim(directory, last.attempt) if last is not None else None
    if last is None or claim is None or claim.is_of(start.job_id, start.restart_count):
        return None
    return last.attempt, claim


def _renew(directory: TrialDirectory) -> None:
    """Nobody of the attempt before gets in any more, and what was asked of it is not asked of the next one."""
    TrialSecrets.destroy(directory.secrets_path)
    TrialSecrets.create(directory.secrets_path)
    directory.clear_stop_request()


def _end_of_predecessor(
    directory: TrialDirectory, attempt: int, claim: AttemptClaim, start: OwnJob, cluster: SlurmQueue | None
) -> AttemptEnd:
    """How the attempt before ended; whoever wanted the trial to end there is heeded, by a stop in the trial log."""
    by = _final_request(directory)
    if by:
        _append_stop(directory, by=by, reason="asked for between two attempts")
    recorded = read_end(directory, attempt)
    job = answer_or(None, cluster.job, claim.job_id) if cluster and claim.job_id not in ("", start.job_id) else None
    if job is not None and job.state is TrialState.CANCELLED:
        _append_stop(directory, by="scancel", reason=f"job {claim.job_id} was cancelled")
        return AttemptEnd(attempt=attempt, state=EndState.CANCELLED, cause="", then="requeue")
    if recorded is not None:
        return recorded
    failed = cluster.failed_nodes(claim.nodes) if cluster is not None else []
    journal = Journal(directory.journal_path)
    for node in failed:
        note_failed_node(directory, node, lambda event, **fields: journal.append(event, attempt=attempt, **fields))
    end = AttemptEnd(
        attempt=attempt,
        state=EndState.NODE_FAILED if failed else EndState.LOST,
        cause="a node failed" if failed else "it ended without a word",
        then="requeue",
    )
    _record_end(directory, end)
    return end


def _final_request(directory: TrialDirectory) -> str:
    """Who asked for the end of the trial between two attempts, or ""."""
    try:
        request = directory.read_stop_request()
    except ValueError:
        return ""
    return request.by if request is not None and not request.then else ""


def _append_stop(directory: TrialDirectory, *, by: str, reason: str) -> None:
    try:
        TrialLog(directory.log_path).request_stop(by, reason=reason)
    except StoppedError:
        return  # it is complete: there is nothing to stop


def _record_refusal(
    directory: TrialDirectory, previous: AttemptEnd, start: OwnJob, refused: AttemptRefusedError
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
            state, cause = EndState.COMPLETE, ""
        case WhyNot.STOPPED:
            state = state if state is EndState.CANCELLED else EndState.STOPPED
        case WhyNot.NO_PROGRESS:
            cause = f"{cause}; look at rl-logs --errors, then continue with rl-submit --resume"
    _record_end(directory, AttemptEnd(attempt=attempt, state=state, cause=cause, then=""))


def _record_end(directory: TrialDirectory, end: AttemptEnd) -> None:
    write_end(directory, end)
    journal = Journal(directory.journal_path)
    told = {"state": end.state, "cause": end.cause, "then": end.then, "caused_by": end.caused_by}
    journal.append("attempt_ended", attempt=end.attempt, **told)
