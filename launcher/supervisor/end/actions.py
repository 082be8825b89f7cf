"""What goes into and comes out of the state machine of an attempt's end: kinds of ends in, actions out."""

from dataclasses import dataclass

from corral.experiments.trial.attempt_end_record import EndState, Follows


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
    """Let the cluster start our own job again, which ends it now; `requeue_refused` is the answer if it does not."""


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
