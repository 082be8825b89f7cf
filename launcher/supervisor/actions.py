"""What the restart units' machine (units.py) orders; the supervisor's loop carries it out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from corral.experiments.trial.attempts import EndState


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
class UnitNews:
    """News for the journal of a unit that ended.

    unit_restarting: it will start again after the pause; unit_left: it ended for a reason that is not its own, and
    starts again when it may.
    """

    event: Literal["unit_restarting", "unit_left"]
    unit: str
    cause: str
    fields: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckNodes:
    """Find out whether the unit's nodes are still there; `nodes_stay` or `nodes_lost` is the answer."""

    unit: str


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
    failed: str = ""
    """The task whose end ends the trial; "" if none does."""


Action = StartUnit | SignalTask | UnitNews | CheckNodes | GiveUpUnit | AppendStop | EndTrial
