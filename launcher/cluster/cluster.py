"""What corral asks of the software that gives out the nodes of a cluster. launcher/slurm/ answers for SLURM.

    rl-submit      scripts, submit_trial                              rl-status   jobs, job, look_closer, accounted
    supervisor     own_job, prospect, why_ending, submit_successor,   rl-stop     jobs, cancel
                   requeue, failed_nodes, make_runner
    extra jobs     submit_extra_job, jobs, why_never, why_leaving, end_steps, cancel

Jobs come back in words of our own, see `jobs` and `own_job`. What another cluster needs beside a class like this one
is said under Rooms in docs/architecture.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.cluster.job_queue import JobQueue
from corral.launcher.cluster.jobs import Job
from corral.launcher.cluster.own_job import JobEnd, JobProspect, OwnJob
from corral.launcher.layout.layout import Layout, RunningAllocations, Step
from corral.launcher.runners.runner import TaskRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTrial:
    """A trial whose workers all have their places on a cluster."""

    plan: RunPlan
    layout: Layout
    directory: TrialDirectory


class Cluster(JobQueue, Protocol):
    """A cluster as submissions and supervisors need it."""

    def script(self, trial: PlacedTrial) -> bytes:
        """What the cluster runs on the head's first node: it becomes the supervisor.

        Raises:
            ConfigError: if the cluster cannot take it.
        """

    def write_scripts(self, trial: PlacedTrial) -> None:
        """Puts the scripts of the trial's jobs into its folder."""

    def submission_command(self, directory: TrialDirectory) -> str:
        """What people would type to do what `submit_trial` does."""

    def submit_trial(self, directory: TrialDirectory) -> str:
        """Hands the trial's job over; returns its id.

        Raises:
            UncertainSubmissionError: if the cluster may have taken it without saying so.
            ClusterError: if it has not.
        """

    def submit_successor(self, trial: PlacedTrial, *, after: str, exclude_nodes: Sequence[str]) -> str:
        """The same job again, which waits for the end of job `after`. Raises as `submit_trial`."""

    def submit_extra_job(
        self, trial: PlacedTrial, allocation: int, *, attempt: int, exclude_nodes: Sequence[str]
    ) -> str:
        """A job that only keeps the nodes of one allocation for the attempt. Raises as `submit_trial`.

        Raises:
            OSError, ValueError: if its script cannot be written.
        """

    def why_never(self, job: Job, *, beside: Sequence[str]) -> str:
        """Why a job that waits cannot start while jobs `beside` it are there; "" where waiting may cure it."""

    def why_leaving(self, job_id: str) -> str:
        """Why a job that runs, or ran, will not be there much longer; "" if it stays."""

    def end_steps(self, job_id: str, *, timeout_s: float) -> None:
        """Ends what runs in a job, and not the job."""

    def prospect(self, own: OwnJob) -> JobProspect:
        """What the cluster has decided about our job; nothing, if it does not say."""

    def why_ending(self, own: OwnJob, directory: TrialDirectory) -> JobEnd:
        """Why our job is being ended, as far as the cluster and the log of its script say."""

    def requeue(self, job_id: str) -> None:
        """Puts a job that runs back into the queue, which ends it now."""

    def make_runner(
        self, trial: PlacedTrial, *, allocations: Callable[[], RunningAllocations], why_away: Callable[[int], str]
    ) -> "AllocationRunner":
        """Starts workers in allocations.

        Args:
            allocations: what runs at the moment; asked at each start.
            why_away: the job of an allocation that does not run, and its reason, for an error's text.
        """


class AllocationRunner(TaskRunner, Protocol):
    """Starts workers on the nodes of a cluster."""

    def move(self, worker: str, step: Step) -> None:
        """Run elsewhere from the next start on."""

    def address_of(self, host: str) -> str:
        """A node's own address, as the cluster knows it."""

    def wait_for_cluster(self, host: str) -> None:
        """Waits until the cluster answers, which it need not when a job starts.

        Raises:
            ClusterUnreachableError: if it does not in a long time.
        """


def supervisor_alive_path(directory: TrialDirectory) -> Path:
    """The file that a supervisor touches as long as it wants its extra jobs: they end without it."""
    return directory.control_path / "supervisor-alive"
