"""What goes into and comes out of the state machine of an attempt's end: kinds of ends in, actions out."""

from dataclasses import dataclass
from enum import StrEnum

from corral.experiments.attempt_ends import Follows


class EndState(StrEnum):
    """How an attempt ends, as rl-status says it."""

    COMPLETE = "COMPLETE"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAILED = "NODE_FAILED"
    REQUEUED = "REQUEUED"
    UNKNOWN = "UNKNOWN"

    @property
    def may_go_on(self) -> bool:
        """Whether a next attempt may follow without a human; if nothing is known, SLURM's requeue says so."""
        return self in _GO_ON


_GO_ON = (EndState.TIMED_OUT, EndState.PREEMPTED, EndState.NODE_FAILED, EndState.REQUEUED, EndState.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The end of an attempt."""

    state: EndState
    cause: str
    """For people."""
    goes_on: bool
    """Whether the next attempt follows by itself."""


@dataclass(frozen=True, slots=True)
class AskForSuccessor:
    """Put the next attempt's job into the queue; `successor_found` or `successor_refused` is the answer."""


@dataclass(frozen=True, slots=True)
class RevokeSuccessor:
    """Take it out of the queue again; `successor_revoked` is the answer if it is gone."""


@dataclass(frozen=True, slots=True)
class RequeueOwnJob:
    """Let SLURM start our own job again, which ends it now; `requeue_refused` is the answer if it does not."""


@dataclass(frozen=True, slots=True)
class SealLog:
    """The trial log must not let a job go on that could not be taken out of the queue."""


@dataclass(frozen=True, slots=True)
class SweepQueue:
    """Cancel every job of the trial but our own."""


@dataclass(frozen=True, slots=True)
class RecordAttemptEnd:
    """The attempt is over; once."""

    state: EndState
    cause: str
    then: Follows


@dataclass(frozen=True, slots=True)
class RecordTrialEnd:
    """Nothing follows by itself; again only if it came differently: Done in the last moment."""

    state: EndState
    cause: str


EndAction = AskForSuccessor | RevokeSuccessor | RequeueOwnJob | SealLog | SweepQueue | RecordAttemptEnd | RecordTrialEnd
