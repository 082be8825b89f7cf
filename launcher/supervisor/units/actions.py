"""What goes into and comes out of the restart units' state machine: units, exits and budgets in, actions out."""

from dataclasses import dataclass

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.attempt_end_record import EndState
from corral.launcher.trial.exits import ExitKind, exit_text


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """What restarts together."""

    name: str
    tasks: tuple[str, ...]
    is_service: bool = False
    """A service (Redis) outlives the workers: it is restarted while they stop, and ends last."""
    needs_nodes: bool = False
    """Its nodes are those of an extra job, which may be away."""
    has_fallback: bool = False
    """While its nodes are away it runs elsewhere."""
    waits_for: tuple[str, ...] = ()
    """Units without whose nodes it is not started: its deadlines must not count the time that jobs are queued."""
    is_optional: bool = False
    """The trial can do without it: out of budget, it is given up alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Budgets and deadlines, in seconds."""

    max_restarts: int
    pause_s: float
    healthy_after_s: float
    max_pause_s: float = 30.0
    terminate_grace_s: float = 10.0
    kill_grace_s: float = 5.0
    check_timeout_s: float = 30.0
    """How long an exit may wait for the cluster's word on its nodes; after that it counts as a crash."""

    def pause_before(self, restart: int) -> float:
        """Pause before the `restart`-th restart in a row, counted from 1: doubles each time, up to `max_pause_s`."""
        return min(self.max_pause_s, self.pause_s * 2.0 ** min(restart - 1, 30))


_MEANING_BY_KIND = {
    ExitKind.NODE_LOST: "lost its node",
    ExitKind.SLURM_AWAY: "could not be started: SLURM did not answer",
    ExitKind.FILES_AWAY: "could not be started: the file system refused",
    ExitKind.JOB_GONE: "could not be started: its job has ended",
    ExitKind.NOTICED: "ended by SLURM's notice of the job's end (SIGTERM), which came before it could listen",
}


@dataclass(frozen=True, slots=True)
class TaskExit:
    """The end of one task; a negative return code is a signal, as `subprocess` reports it."""

    task: str
    returncode: int
    kind: ExitKind = ExitKind.OWN
    killed_by_us: bool = False
    said: str = ""
    """What the task itself put down about its end."""
    silent_s: float = 0.0
    """How long it had given no sign of life when it was killed for that."""

    @property
    def is_consequence(self) -> bool:
        """Whether another task's end explains this one."""
        return not self.silent_s and (self.killed_by_us or self.returncode == WorkerExit.GANG_BROKEN)

    @property
    def is_charged(self) -> bool:
        """Whether it counts as a crash of the task."""
        return self.kind is ExitKind.OWN and self.returncode not in (WorkerExit.SUPERSEDED, WorkerExit.NO_ROOM)

    def __str__(self) -> str:
        if self.silent_s:
            return f"{self.task} gave no sign of life for {self.silent_s:.0f} s, and was killed"
        if self.kind is not ExitKind.OWN:
            return f"{self.task} {_MEANING_BY_KIND[self.kind]}"
        meaning = {
            0: " before the trial was done",
            WorkerExit.BAD_CONFIGURATION: " (it refused its configuration)",
            WorkerExit.NOT_FINITE: " (loss or gradient stays not finite)",
            WorkerExit.CANNOT_CONTINUE: " (it cannot go on, and a restart would not help: its log says why)",
            WorkerExit.SUPERSEDED: " (superseded)",
            WorkerExit.GANG_BROKEN: " (its peers failed)",
            WorkerExit.WRONG_DEVICES: " (it sees other GPUs than the plan gives it: look at its node)",
            WorkerExit.USER_CODE: f" ({self.said or 'your code fails on everything: its log says with what'})",
            WorkerExit.OUT_OF_MEMORY: " (out of memory: raise `mem` of its group)",
            WorkerExit.NO_ROOM: " (a disk is full; it goes on when there is room)",
        }.get(self.returncode, "")
        return f"{self.task} {exit_text(self.returncode)}{meaning}"


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
