"""Workers as steps of SLURM, seen through the sruns that carry them: their ends, and signals to them.

signal --StepSignals--> one squeue -s, one scancel --> steps
             +--no answer--> SIGTERM to each srun, which ends its step at once
exit_kind <-- an exit that is srun's own, not the worker's, and what SLURM then says about the job
          <-- SIGTERM, which only SLURM sends by itself: a worker that listens stays
"""

import signal
import subprocess
import time
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass

from corral.launcher.cluster.jobs import JobPhase
from corral.launcher.slurm.client import SlurmClient, SlurmError, SlurmUnreachableError
from corral.launcher.slurm.verdict import phase_of
from corral.launcher.trial.exits import ExitKind

EXIT_OF_SRUN = 250
"""What srun ends with if it is SLURM that failed, by SLURM_EXIT_ERROR; SLURM's own 253 means out of memory."""
_SILENCE_S = 30.0


def return_code_of_step(code: int) -> int:
    """srun reports a task killed by signal n as 128 + n; elsewhere in the supervisor that is -n."""
    return 128 - code if 128 < code <= 128 + 64 else code


class StepSignals:
    """What the sruns of a trial ask SLURM. A controller that does not answer is not waited for once per worker."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self._silent_until = float("-inf")

    def send(self, tasks: Collection["SrunTask"], signal_name: str) -> bool:
        """Sends a signal to the steps of tasks; False if SLURM does not do it."""
        if time.monotonic() < self._silent_until:
            return False
        try:
            found = self._client.steps(*sorted({task.job_id for task in tasks}))
            steps = [step for task in tasks for step in found.get(task.name, ())]
            if steps:
                self._client.cancel_steps(steps, signal_name=signal_name)
        except SlurmUnreachableError:
            self._silent_until = time.monotonic() + _SILENCE_S
            return False
        except SlurmError:
            return False
        return True

    def why_not_started(self, job_id: str) -> ExitKind:
        """Whose fault it is that a step could not be made."""
        if time.monotonic() < self._silent_until:
            return ExitKind.SLURM_AWAY
        try:
            job = self._client.job(job_id)
        except SlurmUnreachableError:
            self._silent_until = time.monotonic() + _SILENCE_S
            return ExitKind.SLURM_AWAY
        except SlurmError:
            return ExitKind.OWN
        phase = phase_of(job.get("JobState", "")) if job is not None else JobPhase.ENDED
        return ExitKind.OWN if phase in (JobPhase.RUNNING, JobPhase.LEAVING) else ExitKind.JOB_GONE


@dataclass(slots=True, eq=False)
class SrunTask:
    """One step, seen through its srun."""

    process: subprocess.Popen[bytes]
    _: KW_ONLY
    name: str
    node: str
    signals: StepSignals
    job_id: str
    _is_ended_by_us: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        code = self.process.poll()
        return None if code is None else return_code_of_step(code)

    def exit_kind(self) -> ExitKind:
        if self.process.poll() == EXIT_OF_SRUN:
            return self.signals.why_not_started(self.job_id)
        is_noticed = self.poll() == -signal.SIGTERM and not self._is_ended_by_us
        return ExitKind.NOTICED if is_noticed else ExitKind.OWN

    def end_srun(self) -> None:
        """SIGTERM to srun itself, which ends its step without time to finish."""
        if self.poll() is None:
            self._is_ended_by_us = True
            self.process.send_signal(signal.SIGTERM)


def signal_tasks(tasks: Collection[SrunTask], signals: StepSignals, *, kill: bool) -> None:
    """Asks steps to end, or ends them. Through SLURM: a signal to srun itself would kill the worker at once."""
    running = [task for task in tasks if task.poll() is None]
    if not running:
        return
    # SIGINT: SIGTERM is what SLURM sends by itself when the job is about to end, and no order to leave.
    is_told = signals.send(running, "KILL" if kill else "INT")
    if not is_told or kill:  # SIGKILL of srun alone could leave the worker running
        for task in running:
            task.end_srun()
