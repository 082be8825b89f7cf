"""A cluster's jobs in words of our own.

WAITING --gets its nodes--> RUNNING --gives them back--> LEAVING --> ENDED      UNKNOWN: the cluster's word is new to us
   ^                           |
   +-- the cluster puts it back +
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from corral.launcher.trial.words import TrialState


class JobPhase(StrEnum):
    """Where a job stands."""

    WAITING = "waiting"
    """In the queue, or its nodes are being made ready."""
    RUNNING = "running"
    """It has its nodes."""
    LEAVING = "leaving"
    """It gives them back."""
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of this user."""

    job_id: str
    phase: JobPhase
    state: TrialState
    """What it means for a trial. RUNNING is refined by the trial's own records."""
    note: str = ""
    """What explains the state, and what to do."""
    word: str
    """The cluster's own word for the state, for people."""
    reason: str = ""
    """Why it is so, in the cluster's words."""
    run: str = ""
    """Tells the runs of a job apart that was put back: when the present one started, or will."""
    num_nodes: int | None = None
    nodes: str = ""
    """As the cluster writes them."""
    hosts: tuple[str, ...] = ()
    """The names of its nodes, while it has them."""
    name: str = ""
    tag: Mapping[str, Any] = field(default_factory=dict)
    """What corral wrote into its comment; {} if this is another program's, or the site rewrites comments."""
    part_of: str = ""
    """The job whose later component this is; it comes and goes with it."""
    time_left: str = ""
    line: str = ""
    """All that the cluster said, for people."""
    findings: tuple[str, ...] = ()
    """What a closer look has found, and who said so."""

    @property
    def is_staying(self) -> bool:
        """Whether it is there and will be until somebody ends it."""
        return self.phase in (JobPhase.WAITING, JobPhase.RUNNING)

    @property
    def is_active(self) -> bool:
        """Whether it is in the queue or on nodes."""
        return self.is_staying or self.phase is JobPhase.LEAVING

    @property
    def is_blocked(self) -> bool:
        """Whether waiting alone will not start it."""
        return self.state is TrialState.BLOCKED

    @property
    def number(self) -> int:
        """Grows with the order in which jobs were submitted."""
        return int(self.job_id) if self.job_id.isdecimal() else 0
