"""What goes into and comes out of the extra jobs' state machine: jobs as squeue shows them in, requests out."""

from dataclasses import dataclass

from corral.launcher.slurm.words import state_word


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
    """A job of ours in squeue's answer."""

    job_id: str
    name: str
    """Allocation, by its comment."""
    attempt: int
    """The attempt that asked for it, by its comment."""
    word: str
    """SLURM's state."""
    reason: str
    start: str
    """Tells the runs of a requeued job apart."""
    hosts: tuple[str, ...] = ()

    @property
    def head_word(self) -> str:
        """The state without what may follow it, as in `CANCELLED by 1000`."""
        return state_word(self.word)


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
class News:
    """A line of the journal."""

    event: str
    fields: dict[str, object]


NodesEvent = NodesGranted | NodesLost | NodesStay
"""What follows for those who run in an extra job."""

ExtraJobAction = AskForJob | CancelJob | ClearJob | NodesEvent | News
