"""Which clusters there are.

mode of a trial --cluster_of--> Cluster, to submit and to supervise       this machine --queue_here--> JobQueue, to look
                --queue_of--> JobQueue, to keep a supervisor
"""

from typing import TYPE_CHECKING

from corral.launcher.cluster.job_queue import JobQueue
from corral.launcher.slurm.job_queue import SlurmQueue

if TYPE_CHECKING:
    from corral.launcher.cluster.cluster import Cluster

_QUEUES = (SlurmQueue,)


def cluster_of(mode: str, *, timeout_s: float = 20.0) -> "Cluster":
    """The cluster that trials of this mode run on.

    Args:
        mode: one that has jobs.
        timeout_s: how long one question to it may take.
    """
    # Not at the top: what submits needs the schema of plans, which rl-status, rl-stop and keepers do without.
    from corral.launcher.slurm.cluster import SlurmCluster

    return {"slurm": SlurmCluster}[mode](timeout_s=timeout_s)


def queue_of(mode: str, *, timeout_s: float = 20.0) -> JobQueue:
    """The part of `cluster_of` that needs no schema."""
    return {"slurm": SlurmQueue}[mode](timeout_s=timeout_s)


def queue_here(*, timeout_s: float = 20.0) -> JobQueue:
    """The queue that this machine's commands reach; where there are none SLURM's, which says so when it is asked."""
    queues: list[JobQueue] = [make(timeout_s=timeout_s) for make in _QUEUES]
    return next((queue for queue in queues if queue.is_here()), queues[0])
