"""SLURM as corral's cluster: each question becomes calls of `client`, each answer words of our own.

RunPlan, Layout --sbatch--> options, scripts            environment of the batch step --step--> OwnJob
squeue, scontrol, sacct --job_queue--> Job              scontrol, slurmd's line in the log --job_end--> JobEnd
"""

import contextlib
import os
from collections.abc import Callable, Sequence

from corral.experiments.trial.directory import TrialDirectory, atomic_write, read_tail
from corral.launcher.cluster.cluster import AllocationRunner, PlacedTrial
from corral.launcher.cluster.errors import answer_or
from corral.launcher.cluster.own_job import JobEnd, JobProspect, OwnJob
from corral.launcher.layout.layout import RunningAllocations
from corral.launcher.slurm.job_end import explain_end, look_ahead, why_leaving
from corral.launcher.slurm.job_queue import SlurmQueue
from corral.launcher.slurm.sbatch import (
    extra_job_options,
    extra_job_path,
    render_extra_job,
    render_script,
    submission_command,
    successor_options,
)
from corral.launcher.slurm.srun import SrunRunner

_OUTPUT_TAIL_BYTES = 65536


class SlurmCluster(SlurmQueue):
    """A cluster that SLURM runs."""

    def script(self, trial: PlacedTrial) -> bytes:
        return os.fsencode(render_script(trial))

    def write_scripts(self, trial: PlacedTrial) -> None:
        atomic_write(trial.directory.sbatch_path, self.script(trial), mode=0o700)
        _write_extra_job(trial.directory)

    def submission_command(self, directory: TrialDirectory) -> str:
        return submission_command(directory)

    def submit_trial(self, directory: TrialDirectory) -> str:
        return self._client.submit([], directory.sbatch_path)

    def submit_successor(self, trial: PlacedTrial, *, after: str, exclude_nodes: Sequence[str]) -> str:
        options = successor_options(trial.layout, after=after, exclude_nodes=exclude_nodes)
        return self._client.submit(options, trial.directory.sbatch_path)

    def submit_extra_job(
        self, trial: PlacedTrial, allocation: int, *, attempt: int, exclude_nodes: Sequence[str]
    ) -> str:
        options = extra_job_options(trial, allocation, attempt=attempt, exclude_nodes=exclude_nodes)
        script = extra_job_path(trial.directory)
        if not script.exists():
            _write_extra_job(trial.directory)
        return self._client.submit(options, script)

    def why_leaving(self, job_id: str) -> str:
        return why_leaving(self._client.job(job_id))

    def end_steps(self, job_id: str, *, timeout_s: float) -> None:
        self._client.end_steps(job_id, timeout_s=timeout_s)

    def prospect(self, own: OwnJob) -> JobProspect:
        return look_ahead(answer_or(None, self._client.job, own.job_id), restart_count=own.restart_count)

    def why_ending(self, own: OwnJob, directory: TrialDirectory) -> JobEnd:
        said = ""
        with contextlib.suppress(OSError):  # the user's own template may write elsewhere; then scontrol has to tell
            log = read_tail(directory.logs_path / f"slurm-{own.job_id}.log", _OUTPUT_TAIL_BYTES)
            said = log.decode(errors="replace")
        job = answer_or(None, self._client.job, own.job_id)
        return explain_end(job, said, job_id=own.job_id, restart_count=own.restart_count)

    def requeue(self, job_id: str) -> None:
        self._client.requeue(job_id)

    def make_runner(
        self, trial: PlacedTrial, *, allocations: Callable[[], RunningAllocations], why_away: Callable[[int], str]
    ) -> AllocationRunner:
        return SrunRunner(client=self._client, trial=trial, allocations=allocations, why_away=why_away)


def _write_extra_job(directory: TrialDirectory) -> None:
    atomic_write(extra_job_path(directory), os.fsencode(render_extra_job(directory)), mode=0o700)
