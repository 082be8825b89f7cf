"""What goes into and comes out of the extra jobs' state machine: the queue in, requests and news of nodes out."""

from dataclasses import dataclass

from corral.launcher.cluster.jobs import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraJobSpec:
    """A job that the supervisor asks for."""

    name: str
    """The allocation's."""
    num_nodes: int
    size: int
    """The largest is asked for first: it is the hardest to get."""
    is_required: bool
    """A group of the gang; else an elastic worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSighting:
    """A job of ours in the queue."""

    name: str
    """Of the allocation that it was asked for."""
    attempt: int
    """The attempt that asked for it."""
    job: Job
    never: str = ""
    """Why it cannot start beside the jobs that the trial needs; "" where waiting may cure it."""
    is_crowded_out: bool = False
    """Whether it cannot start beside those of the trial's elastic workers, which it can do without."""


@dataclass(frozen=True, slots=True)
class AskForJob:
    """Submit the job."""

    name: str


@dataclass(frozen=True, slots=True)
class CancelJob:
    """End a job."""

    job_id: str


@dataclass(frozen=True, slots=True)
class ClearJob:
    """End the steps that a predecessor left in an adopted job; `cleared` is the answer."""

    name: str
    job_id: str


@dataclass(frozen=True, slots=True)
class NodesGranted:
    """The extra job's workers may start."""

    name: str


@dataclass(frozen=True, slots=True)
class NodesLost:
    """The extra job's workers have lost their nodes."""

    name: str
    cause: str


@dataclass(frozen=True, slots=True)
class NodesStay:
    """The extra job's nodes are still there: whatever ended there ended by itself."""

    name: str


@dataclass(frozen=True, slots=True)
class NodesNeverCome:
    """The trial needs the extra job's nodes, and cannot get them while it holds what it has."""

    name: str
    cause: str


@dataclass(frozen=True, slots=True)
class News:
    """A line of the journal."""

    event: str
    fields: dict[str, object]


NodesEvent = NodesGranted | NodesLost | NodesStay | NodesNeverCome
"""What follows for those who run in an extra job."""

ExtraJobAction = AskForJob | CancelJob | ClearJob | NodesEvent | News
