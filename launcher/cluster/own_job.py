"""The job that this process runs in: what it has, what the cluster is about to do with it, and why."""

from dataclasses import dataclass

from corral.experiments.trial.attempts import EndState
from corral.launcher.layout.layout import RunningAllocations

_CAUSE_BY_STATE = {
    EndState.CANCELLED: "cancelled outside of corral (scancel)",
    EndState.TIMED_OUT: "the time limit was reached",
    EndState.PREEMPTED: "preempted",
    EndState.NODE_FAILED: "a node failed",
    EndState.REQUEUED: "requeued (scontrol requeue)",
    EndState.UNKNOWN: "the cluster ended the job, and could not be asked why",
    EndState.STOPPED: "SIGTERM to the supervisor",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnJob:
    """One start of the job that an attempt runs in."""

    job_id: str
    restart_count: int
    """How often the cluster had put it back before."""
    host: str
    """The node of this process, as the cluster calls it."""
    allocations: RunningAllocations

    @property
    def hosts(self) -> tuple[str, ...]:
        """All nodes of the job."""
        return tuple(host for allocation in self.allocations.values() for host in allocation.hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """What the cluster does with our job."""

    state: EndState
    """STOPPED if the job itself goes on, so that only this script was asked to end."""
    is_requeued: bool
    """Whether the cluster will start the job again by itself."""

    @property
    def cause(self) -> str:
        """For people."""
        return _CAUSE_BY_STATE[self.state]

    @property
    def needs_successor(self) -> bool:
        """Whether the trial should go on, and the cluster will not see to it."""
        is_over = self.state in (EndState.TIMED_OUT, EndState.PREEMPTED, EndState.NODE_FAILED)
        return is_over and not self.is_requeued


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProspect:
    """What the cluster has decided about our job so far, and has not told its script yet."""

    is_preempted: bool
    """Its nodes are wanted for another one, at once or after a grace period."""
    is_requeued: bool
    """It is in the queue again already: a cluster may count the restart before it signals anybody."""
    is_ending: bool
    """It gives its nodes back: all of it is signalled, its script too."""
