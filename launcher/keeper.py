"""The keeper: the supervisor's parent, so small that it has nothing to die of; it starts a killed supervisor again.

keeper --starts--> supervisor --starts--> workers, Redis
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

from corral.experiments.journal import Journal
from corral.experiments.trial_directory import StopRequest, TrialDirectory
from corral.launcher.lock import SupervisorLock

logger = logging.getLogger(__name__)

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_PAUSE_S = 0.2
_GRACE_S = 120.0  # of a stop that came before the plan was read


def keep(directory: TrialDirectory, *, attempt: int, command: Sequence[str], max_restarts: int) -> int:
    """Runs `command` under the trial's lock until it ends by itself; returns its exit code.

    Raises:
        SupervisorRunsError: if another supervisor holds the trial.
    """
    lock = SupervisorLock(directory)
    lock.acquire(attempt=attempt, job_id=os.environ.get("SLURM_JOB_ID", ""))
    journal = Journal(directory.journal_path)
    forwarder = _Forwarder()
    try:
        for restarts in range(max_restarts + 1):
            returncode = forwarder.run(command, lock.descriptor)
            if returncode >= 0:
                return returncode
            journal.append("supervisor_died", attempt=attempt, returncode=returncode, restarts=restarts)
            if -returncode in forwarder.forwarded:
                # It was asked to stop before it could listen: its successor finds the wish in a file.
                _leave_stop_request(directory, signal.Signals(-returncode))
            time.sleep(_PAUSE_S)
        journal.append(
            "trial_ended", attempt=attempt, state="FAILED", cause=f"the supervisor was killed {max_restarts + 1} times"
        )
        return 1
    finally:
        forwarder.close()
        lock.release()


def _leave_stop_request(directory: TrialDirectory, number: signal.Signals) -> None:
    directory.write_stop_request(
        StopRequest(requested_at=time.time(), by=f"{number.name} to the supervisor", now=False, grace_s=_GRACE_S)
    )


class _Forwarder:
    """Runs one child at a time and passes signals on to it."""

    def __init__(self) -> None:
        self.forwarded: set[int] = set()
        self._child: subprocess.Popen[bytes] | None = None
        self._previous = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def run(self, command: Sequence[str], lock_descriptor: int) -> int:
        # The child shares the lock, so that the trial stays locked if only the keeper is killed.
        with subprocess.Popen(command, pass_fds=(lock_descriptor,)) as child:
            self._child = child
            returncode = child.wait()
            self._child = None
        return returncode

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._child is not None and self._child.poll() is None:
            self.forwarded.add(number)
            self._child.send_signal(number)
