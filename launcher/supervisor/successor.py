"""What follows an attempt: SLURM starts its job again, or a successor that waits for its end, or a human.

    time limit near (USR2), rl-stop --requeue --arrange--> successor in the queue --> checkpoint --> the job ends --> it
    SIGTERM --explain--> preempted, node lost, time limit: SLURM requeues the job, else --arrange--> successor
                    +--> scancel: --revoke--> nothing follows
    sbatch does not work --requeue--> SLURM starts our own job again

A successor is `sbatch --dependency=afterany:SELF` of the same script, so it waits however long the checkpoint takes,
and also if SLURM starts our job again by itself. Whether it may go on is decided when it starts, by the trial log.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from corral.experiments.plan import RunPlan
from corral.experiments.trial.attempt_ends import EndState, failed_nodes
from corral.experiments.trial.directory import TrialDirectory, atomic_write
from corral.launcher.cluster.own_jobs import own_jobs_of_plan
from corral.launcher.cluster.submit_once import is_head_of, submit_once
from corral.launcher.layout.layout import Layout
from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.slurm.job_end import JobEnd, JobProspect, explain_end, look_ahead
from corral.launcher.slurm.parse import QueuedJob
from corral.launcher.slurm.sbatch import successor_options
from corral.launcher.slurm.words import is_staying
from corral.launcher.supervisor.node_loss import nodes_that_are_down, note_failed_node

_OUTPUT_TAIL_BYTES = 65536
_SWEEP_TIMEOUT_S = 15.0
_SWEEP_INTERVAL_S = 0.5


class Continuation:
    """SLURM's part in what follows one attempt.

    Args:
        client: SLURM's commands; a short timeout, as SLURM may be about to kill us.
        plan: the trial.
        layout: its allocations.
        directory: its folder.
        job_id: the job that the attempt runs in.
        restart_count: how often SLURM had requeued that job before.
        hosts: the nodes of the job.
        record: adds a line to the journal.
    """

    def __init__(
        self,
        *,
        client: SlurmClient,
        plan: RunPlan,
        layout: Layout,
        directory: TrialDirectory,
        job_id: str,
        restart_count: int,
        hosts: Sequence[str],
        record: Callable[..., None],
    ) -> None:
        self._client = client
        self._plan = plan
        self._layout = layout
        self._directory = directory
        self._job_id = job_id
        self._restart_count = restart_count
        self._hosts = tuple(hosts)
        self._record = record
        self._own_jobs = own_jobs_of_plan(plan, directory)
        self.successor = read_successor(directory, after=job_id)
        """Job id of the successor; "" if there is none."""

    def look_ahead(self) -> JobProspect:
        """What SLURM has in mind for our job, while we may use its nodes for a while yet."""
        try:
            job = self._client.job(self._job_id)
        except SlurmError:
            job = None
        return look_ahead(job, restart_count=self._restart_count)

    def explain(self) -> JobEnd:
        """Why SLURM sends SIGTERM; records the nodes that failed, if it is that."""
        try:
            job = self._client.job(self._job_id)
        except SlurmError:
            job = None
        output = _tail(self._directory.logs_path / f"slurm-{self._job_id}.log")
        end = explain_end(job, output, job_id=self._job_id, restart_count=self._restart_count)
        if end.state is EndState.NODE_FAILED:
            self.record_failed_nodes()
        return end

    def record_failed_nodes(self) -> None:
        """Writes down which of our nodes are down; later attempts avoid them."""
        for node in nodes_that_are_down(self._client, self._hosts):
            note_failed_node(self._directory, node, self._record)

    def arrange(self) -> str:
        """Puts a successor into the queue, once; returns why there is none, or ""."""
        if self.successor:
            return ""
        excluded = failed_nodes(self._directory) if self._plan.launch.exclude_failed_nodes else []
        options = successor_options(self._layout, after=self._job_id, exclude_nodes=excluded)
        try:
            self.successor = submit_once(
                self._client,
                options,
                self._directory.sbatch_path,
                is_it=self._is_successor,
                looks=1,  # SLURM may be about to kill us
            )
        except SlurmError as error:
            self._record("successor_refused", cause=str(error))
            return str(error)
        self._remember(self.successor)
        self._record("successor_submitted", job_id=self.successor, after=self._job_id, excluded=excluded)
        return ""

    def revoke(self) -> bool:
        """Nothing is to follow: takes the successor out of the queue; whether none is left there."""
        if not self.successor:
            return True
        try:
            self._client.cancel(self.successor)
        except SlurmError as error:
            # It will find in the trial log that nothing is to follow, and end.
            self._record("successor_not_cancelled", job_id=self.successor, cause=str(error))
            return False
        self._record("successor_cancelled", job_id=self.successor)
        self.successor = ""
        self._remember("")
        return True

    def requeue(self) -> str:
        """Lets SLURM start our own job again, which ends it now; returns why not, or ""."""
        try:
            self._client.requeue(self._job_id)
        except SlurmError as error:
            return str(error)
        self._record("requeued", job_id=self._job_id)
        return ""

    def sweep(self) -> None:
        """Cancels every job of this trial but our own: nothing of a trial that has ended stays in the queue."""
        deadline = time.monotonic() + _SWEEP_TIMEOUT_S
        while True:
            try:
                for job, _ in self._own_jobs.select(self._client.queue()):
                    is_other = job.job_id != self._job_id and is_staying(job.state)
                    if is_other and not self._is_component(job.job_id):
                        self._client.cancel(job.job_id)
                return
            except SlurmError as error:
                if time.monotonic() >= deadline:
                    self._record("jobs_left", cause=str(error))
                    return
                time.sleep(_SWEEP_INTERVAL_S)

    def _remember(self, successor: str) -> None:
        try:
            write_successor(self._directory, successor, after=self._job_id)
            if successor:
                self._own_jobs.note(successor, attempt=-1)  # which attempt it makes is known when it starts
        except OSError as error:
            self._record("successor_not_written", job_id=successor, cause=str(error))

    def _is_successor(self, job: QueuedJob) -> bool:
        return is_head_of(self._own_jobs)(job) and job.job_id != self._job_id and job.state == "PENDING"

    def _is_component(self, job_id: str) -> bool:
        """Whether it is a part of our own heterogeneous job, which ends with us."""
        job = self._client.job(job_id)
        return job is not None and job.get("HetJobId") == self._job_id


def write_successor(directory: TrialDirectory, job_id: str, *, after: str) -> None:
    """Notes which job goes on after a job has ended; "" if none is to."""
    atomic_write(_successor_path(directory), msgspec.json.encode({"job_id": job_id, "after": after}))


def read_successor(directory: TrialDirectory, *, after: str) -> str:
    """The successor that waits for the end of this job: of an earlier supervisor, or of before a requeue; or ""."""
    try:
        noted = msgspec.json.decode(_successor_path(directory).read_bytes(), type=dict[str, str])
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return noted.get("job_id", "") if noted.get("after") == after else ""


def _successor_path(directory: TrialDirectory) -> Path:
    return directory.control_path / "successor.json"


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _OUTPUT_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""  # the user's own template may write elsewhere; then scontrol alone has to tell
