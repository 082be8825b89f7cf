"""The words of rl-status, for trials and for workers: code compares these, people read them in docs/operations.md."""

from enum import StrEnum

from corral.experiments.trial.attempts import EndState


class TrialState(StrEnum):
    """One word for a trial."""

    QUEUED = "QUEUED"
    BLOCKED = "BLOCKED"
    HELD = "HELD"
    REQUEUED = "REQUEUED"
    SUSPENDED = "SUSPENDED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    DEGRADED = "DEGRADED"
    UNRESPONSIVE = "UNRESPONSIVE"
    STOPPING = "STOPPING"
    COMPLETE = "COMPLETE"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"
    NODE_FAILED = "NODE_FAILED"
    PREEMPTED = "PREEMPTED"
    OOM = "OOM"
    LOST = "LOST"
    UNKNOWN = "UNKNOWN"


NOT_STARTED = (TrialState.QUEUED, TrialState.BLOCKED, TrialState.HELD, TrialState.REQUEUED)
"""SLURM has not started it, or has put it back."""
_ENDS_OF_ATTEMPTS = frozenset(map(TrialState, EndState))
_GOES_ON = {TrialState.REQUEUED, TrialState.UNKNOWN}
FINAL_STATES = _ENDS_OF_ATTEMPTS - _GOES_ON
"""Nothing of it runs any more."""
IN_TROUBLE = FINAL_STATES - {TrialState.COMPLETE, TrialState.STOPPED} | {TrialState.DEGRADED, TrialState.UNRESPONSIVE}
"""Somebody should look."""


class WorkerState(StrEnum):
    """One word for a worker."""

    UP = "UP"
    STARTING = "STARTING"
    RESTARTING = "RESTARTING"
    SILENT = "SILENT"
    MISSING = "MISSING"
    AWAY = "AWAY"
    KEPT_DOWN = "KEPT DOWN"
    GIVEN_UP = "GIVEN UP"
    ENDED = "ENDED"
    NOT_STARTED = "-"
    UNKNOWN = "UNKNOWN"


SPEAKING = (WorkerState.UP, WorkerState.STARTING)
"""What it says of itself holds now."""
TROUBLED = (WorkerState.SILENT, WorkerState.RESTARTING, WorkerState.MISSING)
"""It should be there and is not; the worst first."""
ABSENT = (WorkerState.AWAY, WorkerState.KEPT_DOWN, WorkerState.GIVEN_UP)
"""The trial does, or has to do, without it for now."""
