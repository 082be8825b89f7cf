"""This user's jobs on a cluster that SLURM runs, in words of our own.

squeue, scontrol, sacct --client--> lines --verdict.in_our_words--> Job
"""

import os
import shlex
from dataclasses import replace

from corral.experiments.trial.mode import Mode
from corral.launcher.cluster.jobs import Job
from corral.launcher.slurm.client import SlurmClient, is_installed, queue_command
from corral.launcher.slurm.job_details import JobInquiry
from corral.launcher.slurm.verdict import in_our_words, job_of_scontrol


class SlurmQueue:
    """The part of `SlurmCluster` that rl-status needs.

    Args:
        timeout_s: how long a command may take, of a client made here.
    """

    def __init__(self, client: SlurmClient | None = None, *, timeout_s: float = 20.0) -> None:
        self._client = client or SlurmClient(timeout_s=timeout_s)
        self._inquiry = JobInquiry(self._client)

    @property
    def mode(self) -> Mode:
        return "slurm"

    @property
    def identity(self) -> str:
        return "|".join(os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS"))

    @property
    def question(self) -> str:
        return shlex.join(queue_command())

    def is_here(self) -> bool:
        return is_installed("squeue")

    def jobs(self) -> list[Job]:
        return [in_our_words(line) for line in self._client.queue()]

    def job(self, job_id: str) -> Job | None:
        values = self._client.job(job_id)
        return job_of_scontrol(values) if values else None

    def look_closer(self, job: Job, *, has_run: bool) -> Job:
        return self._inquiry.look_closer(job, has_run=has_run)

    def keeps_accounts(self) -> bool:
        return self._client.keeps_accounts()

    def accounted(self, job_id: str) -> Job | None:
        state = self._client.accounted_state(job_id)
        if not state:
            return None
        return replace(job_of_scontrol({"JobId": job_id, "JobState": state}), findings=(f"sacct says {state}",))

    def cancel(self, job_id: str) -> None:
        self._client.cancel(job_id)
