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
"""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

from corral.experiments.trial import leftovers
from corral.experiments.trial.attempts import AttemptEnd, EndState, read_end
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.secrets import SECRETS_FILE, TrialSecrets
from corral.experiments.trial.tether import die_with_parent
from corral.launcher.files.file_thread import FileThread, is_momentary
from corral.launcher.files.patience import FilePatience
from corral.launcher.supervisor.attempt_start import claim_decides, open_attempt, record_failed_start, the_facts
from corral.launcher.supervisor.recorder import Recorder, write_page
from corral.launcher.supervisor.signs_of_life import (
    EXIT_BROKEN,
    MARK_INTERVAL_S,
    MARK_VARIABLE,
    LifeWatch,
    SupervisorExit,
)
from corral.launcher.supervisor.wake_up import WakeUp
from corral.launcher.trial.ends import TASK_ENDED, exit_text
from corral.launcher.trial.lock import lock_supervisor
from corral.launcher.trial.processes import kill_trial_processes
from corral.launcher.trial.sweep import sweep
from corral.scheduling.restarts import RestartBudget, growing_pause

logger = logging.getLogger(__name__)

_PAUSE_S, _MAX_PAUSE_S = 0.2, 30.0
_GUARDS_END_S = 5.0
_LEAVING_S = 30.0  # the attempt before, on another node, may still be ending
_TOLD_TIMEOUT_S = 60.0  # the end of a trial is worth waiting for a file server


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
                # It was asked to stop before it could listen: its successor is told.
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
    """Has whoever sweeps here next remove this attempt's secrets if both keeper and supervisor are killed.

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
    recorder.close(timeout_s=_TOLD_TIMEOUT_S)
    return (SupervisorExit.FAILED if end.state.is_failure else SupervisorExit.ENDED).of_keeper


def fail(directory: TrialDirectory, recorder: Recorder, cause: str) -> SupervisorExit:
    """Writes down that the trial has failed, and not by its workers; its keys are not needed any more."""
    end = AttemptEnd(attempt=recorder.attempt, state=EndState.FAILED, cause=cause, then="", caused_by="supervisor")
    recorder.end(directory, end)
    recorder.keep(lambda: TrialSecrets.destroy(directory.secrets_path))
    recorder.close(timeout_s=_TOLD_TIMEOUT_S)
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
