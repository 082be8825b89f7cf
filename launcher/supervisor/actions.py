"""What the restart units' machine (units.py) orders; the supervisor's loop carries it out."""

from dataclasses import dataclass

from corral.experiments.trial.attempt_end_record import EndState


@dataclass(frozen=True, slots=True)
class StartUnit:
    """Start every task of the unit under a new incarnation."""

    unit: str


@dataclass(frozen=True, slots=True)
class SignalTask:
    """Ask a task to end (SIGTERM), or end it (SIGKILL)."""

    task: str
    kill: bool


@dataclass(frozen=True, slots=True)
class RestartUnit:
    """News for the journal: the unit will start again after the pause."""

    unit: str
    cause: str
    pause_s: float
    restarts: int


@dataclass(frozen=True, slots=True)
class CheckNodes:
    """Find out whether the unit's nodes are still there; `nodes_stay` or `nodes_lost` is the answer."""

    unit: str


@dataclass(frozen=True, slots=True)
class LeaveUnit:
    """News for the journal: the unit ended for a reason that is not its own, and starts again when it may."""

    unit: str
    cause: str


@dataclass(frozen=True, slots=True)
class GiveUpUnit:
    """An optional unit is out of budget: the trial goes on without it."""

    unit: str
    cause: str


@dataclass(frozen=True, slots=True)
class AppendStop:
    """Fence the trial: append Stop to the trial log before anything is killed."""

    reason: str


@dataclass(frozen=True, slots=True)
class EndTrial:
    """Nothing runs any more."""

    outcome: EndState
    cause: str


Action = StartUnit | SignalTask | RestartUnit | CheckNodes | LeaveUnit | GiveUpUnit | AppendStop | EndTrial
