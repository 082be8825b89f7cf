"""One worker as a step of SLURM, seen through the srun that carries it: its end, its signals, the loss of its node.

SrunTask.terminate, kill --StepSignals--> squeue -s, scancel --> step
                             +--no answer--> SIGTERM to srun, which ends its step at once
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from corral.launcher.slurm import SlurmClient, SlurmError, SlurmUnreachableError

_LOG_TAIL_BYTES = 65536
_NODE_FAILURE = re.compile(rb"^srun: error: .*node fail", re.IGNORECASE | re.MULTILINE)
_SILENCE_S = 30.0


def return_code_of_step(code: int) -> int:
    """srun reports a task killed by signal n as 128 + n; elsewhere in the supervisor that is -n."""
    return 128 - code if 128 < code <= 128 + 64 else code


class StepSignals:
    """Signals to steps, through SLURM. A controller that does not answer is not waited for once per worker."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self._silent_until = float("-inf")

    def send(self, job_id: str, step: str, signal_name: str) -> bool:
        """Sends a signal to the steps of that name; False if SLURM does not do it."""
        if time.monotonic() < self._silent_until:
            return False
        try:
            for step_id in self._client.steps(job_id).get(step, ()):
                self._client.cancel(step_id, signal_name=signal_name)
        except SlurmUnreachableError:
            self._silent_until = time.monotonic() + _SILENCE_S
            return False
        except SlurmError:
            return False
        return True


class SrunTask:
    """One step, seen through its srun."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        name: str,
        node: str,
        signals: StepSignals,
        job_id: str,
        log_path: Path,
        log_start: int,
    ) -> None:
        self._process = process
        self._name = name
        self._node = node
        self._signals = signals
        self._job_id = job_id
        self._log_path = log_path
        self._log_start = log_start

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def node(self) -> str:
        return self._node

    def poll(self) -> int | None:
        code = self._process.poll()
        return None if code is None else return_code_of_step(code)

    def has_lost_its_node(self) -> bool:
        """Whether srun said so: on a node's crash it ends with 0, as after a success."""
        if self.poll() is None:
            return False
        try:
            with self._log_path.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - _LOG_TAIL_BYTES))
                return _NODE_FAILURE.search(log.read()) is not None
        except OSError:
            return False  # without its log nothing is known; the node's own state can still be asked for

    def terminate(self) -> None:
        # Through SLURM: a signal to srun itself would kill the worker at once, without time to finish. And SIGINT:
        # SIGTERM is what SLURM sends by itself when the job is about to end, and to workers that is no order to leave.
        self._signal_step("INT")

    def kill(self) -> None:
        if self.poll() is not None:
            return
        self._signal_step("KILL")
        # A second SIGINT/SIGTERM makes srun end its step; SIGKILL of srun alone could leave the worker running.
        self._process.send_signal(signal.SIGTERM)

    def _signal_step(self, name: str) -> None:
        if self.poll() is not None:
            return
        is_told = self._signals.send(self._job_id, self._name, name)
        if not is_told and self.poll() is None:  # what is left is srun itself
            self._process.send_signal(signal.SIGTERM)
