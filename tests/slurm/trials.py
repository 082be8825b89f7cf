"""Trials of stub workers on the throw-away cluster, and what real ones need there."""

import shlex
from typing import Any

from corral.experiments.own_python import own_python
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import atomic_write
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.log import TrialLog
from corral.launcher.layout.layout import Layout
from corral.launcher.slurm.client import SlurmClient
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.slurm.own_jobs import OwnJobs
from corral.launcher.slurm.verdict import Job
from corral.launcher.status.judge import TrialStatus
from corral.launcher.status.reader import StatusReader
from corral.launcher.trial.view import TrialFacts, read_facts
from tests.integration.trial_helpers import Trial
from tests.launcher.stub_supervisor import COMMAND
from tests.launcher.trials import StubTrial, wait_until

# For real trials. A model worker fills a node of 8 CPUs; give the generation server 7 as well, and they span nodes.
SITE: dict[str, object] = {
    "cluster.bind_address": "127.0.0.1",
    "cluster.cpus_per_node": 8,
    "cluster.mem_per_node": 8000,
    "cluster.gpus_per_node": 0,
    "groups.model_worker.scheduling.cpu": 7,
}
SMALL: dict[str, Any] = {"mode": "slurm", "cluster": {"cpus_per_node": 8, "mem_per_node": 8000, "gpus_per_node": 8}}


class SlurmTrial(StubTrial):
    """A stub trial that goes through sbatch."""

    job_id = ""

    def replan(self, **changes: Any) -> RunPlan:
        """Changes fields of the plan before it is submitted."""
        self.plan = self.plan.model_copy(update=changes)
        self.directory.plan_path.write_bytes(self.plan.to_json())
        return self.plan

    @property
    def layout(self) -> Layout:
        return self.placed.layout

    def submit(self, *, attempt: int = 0, resume: bool = False) -> str:
        self.prepare_files(attempt=attempt, resume=resume)
        self.submitted(SlurmClient().submit([], self.directory.sbatch_path), attempt=attempt)
        return self.job_id

    def prepare_files(self, *, attempt: int = 0, resume: bool = False) -> None:
        """Everything but sbatch."""
        self.prepare(attempt=attempt, resume=resume)
        atomic_write(self.directory.layout_path, self.layout.to_json())
        SlurmCluster().write_scripts(self.placed)
        script = self.directory.sbatch_path
        product = script.read_text()
        own = shlex.join(own_python("-m", "corral.launcher.supervisor"))
        assert own in product
        script.write_text(product.replace(own, " ".join(COMMAND)))

    def submitted(self, job_id: str, *, attempt: int = 0) -> None:
        """Records what sbatch has answered."""
        self.job_id = job_id
        OwnJobs(self.directory, self.plan.trial).note(job_id, attempt=attempt)
        Journal(self.directory.journal_path).append("submitted", attempt=attempt, job_id=job_id)

    @property
    def facts(self) -> TrialFacts:
        facts = read_facts(self.directory)
        assert facts is not None
        return facts

    def status(self) -> TrialStatus:
        (status,) = StatusReader().read([self.facts])
        return status

    @property
    def jobs(self) -> list[Job]:
        """Every job of the trial that SLURM still knows."""
        return [job for job in SlurmClient().queue() if job.tag.get("trial_uuid") == self.plan.trial.uuid]

    @property
    def active_jobs(self) -> list[Job]:
        """Those that wait or run."""
        return [job for job in self.jobs if job.is_active]

    @property
    def num_commits(self) -> int:
        return len(TrialLog(self.directory.log_path).read().lineage)

    def wait_for_commits(self) -> None:
        wait_until(lambda: self.num_commits >= 2, "two commits")

    def wait_for_end(self, state: str = "COMPLETE") -> None:
        wait_until(lambda: self.events("attempt_ended", then=""), f"the end of {self.facts.name}")
        self.wait_for_state(state)

    def wait_for_empty_queue(self) -> None:
        wait_until(lambda: not self.active_jobs, "an empty queue")

    def wait_for_state(self, *states: str) -> TrialStatus:
        def look() -> TrialStatus | None:
            status = self.status()
            return status if status.state in states else None

        return wait_until(look, f"{states}, last {self.status()}")


def job_of(trial: Trial) -> str:
    """The job of a real trial that rl-submit has submitted."""
    return str(trial.events("submitted")[-1]["job_id"])
