"""What follows an attempt: the cluster starts its job again, or a successor that waits for its end, or a human.

    time limit near (USR2), rl-stop --requeue --arrange--> successor in the queue --> checkpoint --> the job ends --> it
    SIGTERM --explain--> preempted, node lost, time limit: the cluster requeues the job, else --arrange--> successor
                    +--> cancelled: --revoke--> nothing follows
    submissions do not work --requeue--> the cluster starts our own job again

A successor is the same script again, submitted to begin after the end of this job: it waits however long the checkpoint
takes, and also if the cluster starts our job again by itself. Whether it may go on is decided when it starts, by
`why_not_another` in experiments/trial/attempts.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from corral.experiments.trial.attempts import EndState
from corral.launcher.cluster.errors import ClusterError
from corral.launcher.cluster.jobs import Job, JobPhase
from corral.launcher.cluster.own_job import JobEnd, OwnJob
from corral.launcher.cluster.own_jobs import OwnJobs
from corral.launcher.files.patience import insist
from corral.launcher.layout.layout import PlacedTrial
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.slurm.submit_once import is_head_of, submit_once
from corral.launcher.supervisor.recorder import note_failed_node

_SWEEP_TIMEOUT_S = 15.0


@dataclass(slots=True, kw_only=True)
class Continuation:
    """The cluster's part in what follows one attempt."""

    cluster: SlurmCluster
    """With a short timeout, as it may be about to kill us."""
    trial: PlacedTrial
    own: OwnJob
    record: Callable[..., None]
    """Adds a line to the journal."""
    successor: str = field(init=False)
    """Job id of the successor; "" if there is none."""
    _own_jobs: OwnJobs = field(init=False)

    def __post_init__(self) -> None:
        self._own_jobs = OwnJobs(self.trial.directory, self.trial.plan.trial)
        self.successor = self._own_jobs.successor_of(self.own.job_id)

    def explain(self) -> JobEnd:
        """Why the cluster sends SIGTERM; records the nodes that failed, if it is that."""
        end = self.cluster.why_ending(self.own, self.trial.directory)
        if end.state is EndState.NODE_FAILED:
            for node in self.cluster.failed_nodes(self.own.hosts):
                note_failed_node(self.trial.directory, node, self.record)
        return end

    def arrange(self) -> str:
        """Puts a successor into the queue, once; returns why there is none, or ""."""
        if self.successor:
            return ""
        trial, after = self.trial, self.own.job_id
        excluded = trial.directory.failed_nodes()
        submit = partial(self.cluster.submit_successor, trial, after=after, exclude_nodes=excluded)
        try:
            # One look: the cluster may be about to kill us.
            self.successor = submit_once(self.cluster, submit, is_it=self._is_successor, looks=1)
        except ClusterError as error:
            self.record("successor_refused", cause=str(error))
            return str(error)
        self._remember(self.successor, after=after)
        self.record("successor_submitted", job_id=self.successor, after=after, excluded=excluded)
        return ""

    def revoke(self) -> None:
        """Nothing is to follow: takes the successor out of the queue, if the cluster lets it."""
        if not self.successor:
            return
        try:
            self.cluster.cancel(self.successor)
        except ClusterError as error:
            # It will find in the trial log that nothing is to follow, and end.
            self.record("successor_not_cancelled", job_id=self.successor, cause=str(error))
            return
        self.record("successor_cancelled", job_id=self.successor)
        self._remember(self.successor, after="")
        self.successor = ""

    def requeue(self) -> str:
        """Lets the cluster start our own job again, which ends it now; returns why not, or ""."""
        try:
            self.cluster.requeue(self.own.job_id)
        except ClusterError as error:
            self.record("requeue_refused", cause=str(error))
            return str(error)
        self.record("requeued", job_id=self.own.job_id)
        return ""

    def sweep(self) -> None:
        """Cancels every job of this trial but our own: nothing of a trial that has ended stays in the queue."""
        try:
            insist(
                self._cancel_others,
                lambda error: isinstance(error, ClusterError),
                waiting_for="the cluster, to cancel jobs of the trial",
                patience_s=_SWEEP_TIMEOUT_S,
            )
        except ClusterError as error:
            self.record("jobs_left", cause=str(error))

    def _cancel_others(self) -> None:
        for job, _ in self._own_jobs.select(self.cluster.jobs()):
            is_ours = self.own.job_id in (job.job_id, job.part_of)  # a component ends with us
            if job.is_staying and not is_ours:
                self.cluster.cancel(job.job_id)

    def _remember(self, successor: str, *, after: str) -> None:
        """Notes after which job's end it goes on; "" if after none."""
        try:
            # Which attempt it makes is known when it starts.
            self._own_jobs.note(successor, attempt=-1, after=after)
        except OSError as error:
            self.record("successor_not_written", job_id=successor, cause=str(error))

    def _is_successor(self, job: Job) -> bool:
        is_waiting = job.phase is JobPhase.WAITING and job.job_id != self.own.job_id
        return is_waiting and is_head_of(self._own_jobs)(job)
