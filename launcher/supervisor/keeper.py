"""The keeper: the supervisor's parent, so small that it has nothing to die of; it starts a broken supervisor again.

keeper --attempt--> supervisor --starts--> workers, Redis
  ^                    |
  |<--a mark a second--+    silent for long: it is killed
  |                    +-- ENDED, FAILED, ABANDONED: the keeper ends too
  |                    +-- any other exit, or a signal: what it left is ended, and another one is started, which goes on
  |                        from the last commit; after too many in a row the trial fails
  +-- SIGTERM, SIGINT, SIGUSR2 are passed on

The supervisor ends with the keeper, and what it has started with it: nothing of a trial runs unsupervised. Files of the
trial that fail for a moment are waited for, with nothing running.

An attempt begins here: a start of a job finds its attempt, or makes one, or learns that the trial is over.

keeper --open_attempt--> begin_attempt --record--> secrets, log folder --> supervisor
                             +--refused--> control/end-N.json; the job ends at once

How the attempt before ended is read from control/, and asked of the cluster; the journal is only written. What the
files refuse for a moment is tried again step by step: a second look from the beginning would find our own claim, and no
predecessor.
"""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

from corral.experiments.trial import leftovers
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
from corral.experiments.trial.secrets import SECRETS_FILE, TrialSecrets
from corral.experiments.trial.tether import die_with_parent
from corral.launcher.files.file_thread import FileThread, is_momentary
from corral.launcher.files.patience import FilePatience
from corral.launcher.slurm.client import answer_or
from corral.launcher.slurm.job_queue import SlurmQueue
from corral.launcher.slurm.own_jobs import OwnJob, own_job
from corral.launcher.supervisor.recorder import Recorder, note_failed_node, write_page
from corral.launcher.supervisor.signs_of_life import (
    EXIT_BROKEN,
    MARK_INTERVAL_S,
    MARK_VARIABLE,
    LifeWatch,
    SupervisorExit,
    WakeUp,
)
from corral.launcher.trial.ends import TASK_ENDED, exit_text
from corral.launcher.trial.lock import SupervisorRunsError, lock_supervisor
from corral.launcher.trial.processes import describe_this_process, kill_trial_processes, sweep
from corral.launcher.trial.view import TrialFacts, load_facts
from corral.launcher.trial.words import TrialState
from corral.scheduling.restarts import RestartBudget, growing_pause

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
    """Whether this is a start of a job that has no attempt yet: it gets one, even if another job seems to run the
    last."""
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
    """The facts of the plan; FileNotFoundError if there is none."""
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
    """How the attempt before ended. If a stop was requested there, a stop in the trial log follows."""
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
    """The user that asked for the end of the trial between two attempts, or ""."""
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
    outcome = {"state": end.state, "cause": end.cause, "then": end.then, "caused_by": end.caused_by}
    journal.append("attempt_ended", attempt=end.attempt, **outcome)


logger = logging.getLogger(__name__)

_PAUSE_S, _MAX_PAUSE_S = 0.2, 30.0
_GUARDS_END_S = 5.0
_LEAVING_S = 30.0  # the attempt before, on another node, may still be ending
_REPORT_TIMEOUT_S = 60.0  # the end of a trial is worth waiting for a file server


def keep(directory: TrialDirectory, *, command: Sequence[str], max_restarts: int) -> int:
    """Runs `command --attempt N` under the trial's lock until it ends by itself; returns the exit code for its own.

    Returns 0 at once if the trial is over, so that there is no attempt to run.

    Raises:
        SupervisorRunsError: if another supervisor holds the trial.
        OSError: if the files of the trial fail for long, or a signal comes while they do.
    """
    wake = WakeUp()
    with contextlib.ExitStack() as stack:
        try:
            lock = FilePatience().insist("lock the trial", _lock, directory)
            stack.callback(os.close, lock)
            stack.callback(sweep)
            stack.enter_context(wake.listening())
            patience = FilePatience(wake.has_signals)
            record = open_attempt(directory, patience=patience)
        except Exception as error:
            if not (isinstance(error, OSError) and is_momentary(error)):
                with contextlib.suppress(OSError, ValueError):
                    record_failed_start(directory, error)
            raise
        if record is None:
            return 0
        facts = patience.insist("read the plan", the_facts, directory)
        recorder = Recorder(FileThread("records"), Journal(directory.journal_path), attempt=record.attempt)
        budget = RestartBudget(max_restarts=max_restarts, healthy_after_s=facts.healthy_after_s)
        unheard: list[str] = []
        recorded = stack.enter_context(_secrets_recorded(directory, facts.uuid))
        while True:
            started_at = time.monotonic()
            # The child shares the locks: the trial stays locked until it is gone too.
            child = _Supervisor([*command, "--attempt", str(record.attempt), *unheard], (lock, *recorded))
            returncode = child.see_through(wake)
            if returncode in tuple(SupervisorExit):
                return SupervisorExit(returncode).of_keeper
            # Its own children have died with it; guards end what these had started, and the rest is nobody's now.
            kill_trial_processes(facts.uuid, spare=(os.getpid(),), grace_s=_GUARDS_END_S)
            sweep()
            end = patience.insist("read how the attempt ended", read_end, directory, record.attempt)
            if end is not None:
                return _leave_ended(directory, recorder, end)
            recorder.event(
                TASK_ENDED,
                who="supervisor",
                code=returncode,
                why=exit_text(returncode) + ("; it had fallen silent, and was killed" if child.was_silent else ""),
                caused_by="supervisor_failed" if returncode == EXIT_BROKEN else "",  # which says why
                charged=True,
                pid=child.pid,
            )
            if not budget.take(ran_s=time.monotonic() - started_at):
                cause = f"the supervisor ended {budget.in_a_row} times in a row; its log says why"
                return fail(directory, recorder, cause).of_keeper
            if -returncode in child.heard:
                # It was asked to stop before it could listen: its successor gets the request.
                unheard = ["--signalled", signal.Signals(-returncode).name]
            elif directory.stop_request_path.exists():
                unheard = []  # it was heard, and said so: told again it would mean that the end cannot wait
            resumes_at = time.monotonic() + growing_pause(budget.in_a_row, first_s=_PAUSE_S, longest_s=_MAX_PAUSE_S)
            while not wake.has_signals() and (left_s := resumes_at - time.monotonic()) > 0:  # a signal is for the next
                wake.wait(left_s)


def _lock(directory: TrialDirectory) -> int:
    job_id = os.environ.get("SLURM_JOB_ID", "")
    patience_s = _LEAVING_S if job_id else 0.5
    return lock_supervisor(directory, patience_s=patience_s, claim_decides=claim_decides(directory), job_id=job_id)


@contextlib.contextmanager
def _secrets_recorded(directory: TrialDirectory, trial_uuid: str) -> Iterator[tuple[int, ...]]:
    """Records this attempt's secrets, so that the next sweep removes them if keeper and supervisor are both killed.

    Gives the descriptor that the supervisor holds, too. Those that end by themselves have decided on the secrets.
    """
    try:
        record = leftovers.begin(trial_uuid)
        leftovers.note_secrets(record, directory.secrets_path / SECRETS_FILE)
    except OSError as error:
        logger.warning("secrets stay behind if keeper and supervisor are killed: %s", error)
        yield ()
        return
    yield (record.descriptor,)
    record.drop()


def _leave_ended(directory: TrialDirectory, recorder: Recorder, end: AttemptEnd) -> int:
    """The end was recorded before the supervisor was killed: what came after that is done here, and nothing else."""
    if end.is_final:
        recorder.keep(lambda: TrialSecrets.destroy(directory.secrets_path))
        write_page(directory, end.state, recorder.event)
    recorder.close(timeout_s=_REPORT_TIMEOUT_S)
    return (SupervisorExit.FAILED if end.state.is_failure else SupervisorExit.ENDED).of_keeper


def fail(directory: TrialDirectory, recorder: Recorder, cause: str) -> SupervisorExit:
    """Writes down that the trial has failed, and not by its workers; its keys are not needed any more."""
    end = AttemptEnd(attempt=recorder.attempt, state=EndState.FAILED, cause=cause, then="", caused_by="supervisor")
    recorder.end(directory, end)
    recorder.keep(lambda: TrialSecrets.destroy(directory.secrets_path))
    recorder.close(timeout_s=_REPORT_TIMEOUT_S)
    return SupervisorExit.FAILED


class _Supervisor:
    """A child, from its start to its end; signals are passed on to it, and if it falls silent it is killed."""

    def __init__(self, command: Sequence[str], descriptors: Sequence[int]) -> None:
        self.heard: set[int] = set()
        """Signals that were passed on."""
        self.was_silent = False
        reading, writing = os.pipe()
        self._life = LifeWatch(reading)
        self._process = subprocess.Popen(
            command,
            env=os.environ | {MARK_VARIABLE: str(writing)},
            pass_fds=(*descriptors, writing),
            preexec_fn=die_with_parent(),
        )
        os.close(writing)

    @property
    def pid(self) -> int:
        return self._process.pid

    def see_through(self, wake: WakeUp) -> int:
        """How it ended; what comes after that is for the next one."""
        while self._process.poll() is None:
            for number in wake.take_signals():
                if self._process.poll() is None:
                    self.heard.add(number)
                    self._process.send_signal(number)
                else:
                    wake.put_back(number)
            wake.wait(MARK_INTERVAL_S)
            if self._life.is_silent():
                self.was_silent = True
                self._process.kill()
        self._life.close()
        return self._process.wait()
