"""SLURM as corral's cluster: each question becomes calls of `client`, each answer words of our own.

RunPlan, Layout --sbatch--> options, scripts            environment of the batch step --step--> OwnJob
squeue, scontrol, sacct --job_queue--> Job              scontrol, slurmd's line in the log --verdict--> JobEnd
"""

import contextlib
import os
from collections.abc import Callable, Sequence

from corral.experiments.trial.directory import TrialDirectory, atomic_write, read_tail
from corral.launcher.layout.layout import PlacedTrial, RunningAllocations
from corral.launcher.slurm.client import answer_or
from corral.launcher.slurm.job_queue import SlurmQueue
from corral.launcher.slurm.own_jobs import OwnJob
from corral.launcher.slurm.sbatch import (
    extra_job_options,
    extra_job_path,
    render_extra_job,
    render_script,
    successor_options,
)
from corral.launcher.slurm.srun import SrunRunner
from corral.launcher.slurm.verdict import JobEnd, JobProspect, explain_end, look_ahead, why_leaving

_OUTPUT_TAIL_BYTES = 65536


class SlurmCluster(SlurmQueue):
    """A cluster as submissions and supervisors need it.

    Raises:
        SlurmUncertainError: each method that submits, if SLURM may have taken the job without saying so.
    """

    def script(self, trial: PlacedTrial) -> bytes:
        """What SLURM runs on the head's first node: it becomes the supervisor. ConfigError if it cannot be a script."""
        return os.fsencode(render_script(trial))

    def write_scripts(self, trial: PlacedTrial) -> None:
        """Puts the scripts of the trial's jobs into its folder."""
        atomic_write(trial.directory.sbatch_path, self.script(trial), mode=0o700)
        _write_extra_job(trial.directory)

    def submit_trial(self, directory: TrialDirectory) -> str:
        """Hands the trial's job over; returns its id."""
        return self._client.submit([], directory.sbatch_path)

    def submit_successor(self, trial: PlacedTrial, *, after: str, exclude_nodes: Sequence[str]) -> str:
        """The same job again, which waits for the end of job `after`."""
        options = successor_options(trial.layout, after=after, exclude_nodes=exclude_nodes)
        return self._client.submit(options, trial.directory.sbatch_path)

    def submit_extra_job(
        self, trial: PlacedTrial, allocation: int, *, attempt: int, exclude_nodes: Sequence[str]
    ) -> str:
        """A job that only keeps the nodes of one allocation. OSError if its script cannot be written."""
        options = extra_job_options(trial, allocation, attempt=attempt, exclude_nodes=exclude_nodes)
        script = extra_job_path(trial.directory)
        if not script.exists():
            _write_extra_job(trial.directory)
        return self._client.submit(options, script)

    def why_leaving(self, job_id: str) -> str:
        """Why a job that runs, or ran, will not be there much longer; "" if it stays."""
        return why_leaving(self._client.job(job_id))

    def end_steps(self, job_id: str, *, timeout_s: float) -> None:
        """Ends what runs in a job, and not the job."""
        self._client.end_steps(job_id, timeout_s=timeout_s)

    def prospect(self, own: OwnJob) -> JobProspect:
        """SLURM's decision about our job; nothing, if it gives no answer."""
        return look_ahead(answer_or(None, self._client.job, own.job_id), restart_count=own.restart_count)

    def why_ending(self, own: OwnJob, directory: TrialDirectory) -> JobEnd:
        """Why our job is being ended, as far as SLURM and the log of its script say."""
        said = ""
        with contextlib.suppress(OSError):  # the user's own template may write elsewhere; then scontrol has to tell
            log = read_tail(directory.logs_path / f"slurm-{own.job_id}.log", _OUTPUT_TAIL_BYTES)
            said = log.decode(errors="replace")
        job = answer_or(None, self._client.job, own.job_id)
        return explain_end(job, said, job_id=own.job_id, restart_count=own.restart_count)

    def requeue(self, job_id: str) -> None:
        """Puts a job that runs back into the queue, which ends it now."""
        self._client.requeue(job_id)

    def make_runner(
        self, trial: PlacedTrial, *, allocations: Callable[[], RunningAllocations], why_away: Callable[[int], str]
    ) -> SrunRunner:
        """Starts workers in allocations, see `SrunRunner`."""
        return SrunRunner(client=self._client, trial=trial, allocations=allocations, why_away=why_away)


def _write_extra_job(directory: TrialDirectory) -> None:
    atomic_write(extra_job_path(directory), os.fsencode(render_extra_job(directory)), mode=0o700)
