"""The keeper: the supervisor's parent, so small that it has nothing to die of; it starts a killed supervisor again.

keeper --attempt--> supervisor --starts--> workers, Redis
  ^                    |
  |                    +-- ended by a signal that we did not send: start again; the new one first ends what the old
  |                        one left running, then everything continues from the last commit
  +-- SIGTERM, SIGINT, SIGUSR2 are passed on; the supervisor's exit code becomes the keeper's
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

from corral.experiments.attempt_ends import read_end
from corral.experiments.journal import Journal
from corral.experiments.secrets import TrialSecrets
from corral.experiments.trial_directory import TrialDirectory
from corral.launcher.attempt_start import claim_decides, open_attempt
from corral.launcher.lock import SupervisorLock

logger = logging.getLogger(__name__)

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_PAUSE_S = 0.2
_LEAVING_S = 30.0  # the attempt before, on another node, may still be ending


def keep(directory: TrialDirectory, *, command: Sequence[str], max_restarts: int) -> int:
    """Runs `command --attempt N` under the trial's lock until it ends by itself; returns its exit code.

    Returns 0 at once if the trial is over, so that there is no attempt to run.

    Raises:
        SupervisorRunsError: if another supervisor holds the trial.
    """
    lock = SupervisorLock(directory)
    job_id = os.environ.get("SLURM_JOB_ID", "")
    lock.acquire(patience_s=_LEAVING_S if job_id else 0.5, claim_decides=claim_decides(directory), job_id=job_id)
    forwarder = _Forwarder()
    try:
        record = open_attempt(directory)
        if record is None:
            return 0
        return _keep(directory, forwarder, lock, record.attempt, command=command, max_restarts=max_restarts)
    finally:
        forwarder.close()
        lock.release()


def _keep(
    directory: TrialDirectory,
    forwarder: "_Forwarder",
    lock: SupervisorLock,
    attempt: int,
    *,
    command: Sequence[str],
    max_restarts: int,
) -> int:
    journal = Journal(directory.journal_path)
    unheard: list[str] = []
    for restarts in range(max_restarts + 1):
        returncode = forwarder.run([*command, "--attempt", str(attempt), *unheard], lock.descriptor)
        if returncode >= 0:
            return returncode
        end = read_end(directory, attempt)
        if end is not None:
            # All is done but to leave: SLURM, which may have been asked to start the job again, was faster.
            if end.is_final:
                TrialSecrets.destroy(directory.secrets_path)
            return 0
        journal.append("supervisor_died", attempt=attempt, returncode=returncode, restarts=restarts)
        if -returncode in forwarder.forwarded:
            # It was asked to stop before it could listen: its successor is told.
            unheard = ["--signalled", signal.Signals(-returncode).name]
        time.sleep(_PAUSE_S)
    cause = f"the supervisor was killed {max_restarts + 1} times"
    journal.append("trial_ended", attempt=attempt, state="FAILED", cause=cause)
    return 1


class _Forwarder:
    """Runs one child at a time and passes signals on to it."""

    def __init__(self) -> None:
        self.forwarded: set[int] = set()
        self._early: list[int] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._previous = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def run(self, command: Sequence[str], lock_descriptor: int) -> int:
        # The child shares the lock, so that the trial stays locked if only the keeper is killed.
        with subprocess.Popen(command, pass_fds=(lock_descriptor,)) as child:
            self._child = child
            while self._early:
                self._forward(self._early.pop(0), None)
            returncode = child.wait()
            self._child = None
        return returncode

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._child is None or self._child.poll() is not None:
            self._early.append(number)  # for the next child, if there is one
        else:
            self.forwarded.add(number)
            self._child.send_signal(number)
