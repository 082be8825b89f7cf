"""Restart units as a pure state machine: exits, requests and the clock go in; starts, signals and the end come out.

One unit, while the trial runs:

    WAITING --pause over--> RUNNING --one task ended--> CLEARING --last task gone--> WAITING
       ^                                                    |   |
       |                                                    |   +-- budget spent, or exit 2, 77, 78, 81 the trial fails
       +-- its nodes are lost, or stay --- CHECKING <-------+ (a unit in an extra job)

A unit in an extra job (`needs_nodes`) starts only while that job runs. Its exit is judged once the cluster has said
whether the job still runs: nodes that were lost are no failure, cost no budget, and are waited for.

The trial:

    RUNNING --stop requested--> STOPPING --Stop in the log | grace over | master gone--> TERMINATING
       |                                                                                      |
       +-- Done or Stop in the log, a unit gave up, stop at once ---------------------------->+
                                                                                              v
                              ENDED <--all gone-- KILLING <--grace over, or everything but services gone

The shell (supervisor.py) owns processes, files and clocks; nothing here does I/O.
A task is one worker process. The tasks of one unit share collectives: one dies, all start again.

What of a plan is started: restart units, the command line of each worker, and which units run in extra jobs.

plan.json --units_of_plan--> UnitSpec: redis, model_worker (all ranks), each other worker, each tracker
          --worker_command--> python -m corral.workers --plan ... --kind ... --index ...
          --tracker_command--> python -m corral.launcher.tracking ...
extra jobs --NodesEvent(allocation)--> UnitNodes.drive --unit by unit--> UnitMachine.nodes_granted --> actions
unit machine --CheckNodes(unit)--> UnitNodes.check --allocation--> extra jobs
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from corral.experiments.config.cluster import SupervisionConfig
from corral.experiments.exit_codes import WorkerExit
from corral.experiments.own_python import own_python
from corral.experiments.plan import RunPlan
from corral.experiments.trial.attempts import AttemptRecord, EndState
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.extra_jobs import ExtraJobs
from corral.launcher.layout.layout import Allocation, Layout
from corral.launcher.trial.ends import TaskExit
from corral.scheduling.restarts import growing_pause

# What the machine orders; the supervisor's loop carries it out.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """The tasks that restart together."""

    name: str
    tasks: tuple[str, ...]
    is_service: bool = False
    """A service (Redis) outlives the workers: it is restarted while they stop, and ends last."""
    needs_nodes: bool = False
    """Its nodes are those of an extra job, which may be away."""
    waits_for: tuple[str, ...] = ()
    """Units without whose nodes it is not started: its deadlines must not count the time that jobs are queued."""
    is_optional: bool = False
    """The trial can do without it: out of budget, it is given up alone."""
    is_beside: bool = False
    """Nothing of the trial depends on it: the same, and no exit of its own ends the trial."""


FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 30.0
TERMINATE_GRACE_S = 10.0
KILL_GRACE_S = 5.0
CHECK_TIMEOUT_S = 30.0  # how long an exit may wait for the cluster's word on its nodes; then it counts as a crash
_FINAL = (
    WorkerExit.BAD_CONFIGURATION,
    WorkerExit.NOT_FINITE,
    WorkerExit.CANNOT_CONTINUE,
    WorkerExit.USER_CODE,
)
MASTER_UNIT = "master_worker/0"
TRAINER_UNIT = "model_worker"


class TrialPhase(StrEnum):
    """The phases of the whole trial."""

    RUNNING = "running"
    STOPPING = "stopping"
    TERMINATING = "terminating"
    KILLING = "killing"
    ENDED = "ended"


class UnitPhase(StrEnum):
    """The phases of one unit."""

    WAITING = "waiting"
    RUNNING = "running"
    CLEARING = "clearing"
    CHECKING = "checking"
    """Nothing of it runs, and the cluster is asked whether its nodes are still there."""


@dataclass(slots=True)
class _Unit:
    spec: UnitSpec
    phase: UnitPhase = UnitPhase.WAITING
    running: set[str] = field(default_factory=set)
    exits: list[TaskExit] = field(default_factory=list)
    unrecorded: list[TaskExit] = field(default_factory=list)
    """Exits whose explanation may still come: the cluster is asked whether their nodes are lost."""
    start_at: float = 0.0
    started_at: float = 0.0
    restarts: int = 0
    charged: int = 0
    in_a_row: int = 0
    has_nodes: bool = True
    is_kept_down: bool = False
    is_given_up: bool = False
    expected_end: str = ""
    """Why its tasks end, where that is not their fault."""
    deadline: float = float("inf")
    """Of an answer about its nodes, or of an expected end."""

    @property
    def may_start(self) -> bool:
        return self.phase is UnitPhase.WAITING and self.has_nodes and not self.is_kept_down and not self.is_given_up


class UnitMachine:
    """The decisions of one attempt. Every method takes the time (monotonic seconds) and returns what to do now."""

    def __init__(self, units: Sequence[UnitSpec], budgets: SupervisionConfig) -> None:
        self._budgets = budgets
        ordered = sorted(units, key=lambda spec: not spec.is_service)  # services first: workers need them at once
        self._units = {spec.name: _Unit(spec, has_nodes=not spec.needs_nodes) for spec in ordered}
        self._verdicts: list[TaskExit] = []
        self._unit_by_task = {task: unit for unit in self._units.values() for task in unit.spec.tasks}
        self._because: dict[str, str] = {}
        """Why a task was signalled."""
        self._silent_s: dict[str, float] = {}
        self._deadline = float("inf")
        self._stop_reason = ""
        self._outcome = EndState.FAILED
        self._cause = self._failed = ""
        self.phase = TrialPhase.RUNNING

    def take_verdicts(self) -> list[TaskExit]:
        """The ends since the last call, each with what explains it."""
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def exited(self, ended: TaskExit, now: float, *, gone: Collection[str] = ()) -> list[Action]:
        """A task ended, or could not be started.

        The shell reads the trial log first (`end_trial`), so that a worker that ends because of Done is no crash.

        Args:
            gone: tasks whose ends were seen at the same time: nothing that is decided here explains those.
        """
        task, unit = ended.task, self._unit_by_task[ended.task]
        if task not in unit.running:
            return []
        unit.running.discard(task)
        because = self._because.pop(task, "") or unit.expected_end
        ended = replace(ended, because=because, silent_s=self._silent_s.pop(task, 0.0))
        unit.exits.append(ended)
        unit.unrecorded.append(ended)
        may_lack_nodes = unit.spec.needs_nodes and self.phase is TrialPhase.RUNNING and not because
        if not may_lack_nodes:
            self._record(unit)
        if self.phase in (TrialPhase.TERMINATING, TrialPhase.KILLING):
            return self._end_if_all_gone()
        if ended.returncode in _FINAL and not unit.spec.is_beside:
            return self._terminate(EndState.FAILED, str(ended), now, failed=task)
        if self.phase is TrialPhase.STOPPING and not unit.spec.is_service:
            return self._exited_while_stopping(unit, now)
        actions: list[Action] = []
        if unit.phase is UnitPhase.RUNNING:
            unit.phase = UnitPhase.CLEARING
            # The other ranks wait in a collective that can never finish; commits are atomic, so nothing is lost.
            actions += self._signal(unit.running.difference(gone), kill=True, because=str(ended))
        if not unit.running:
            actions += self._cleared(unit, now)
        return actions

    def silent(self, task: str, silent_s: float) -> list[Action]:
        """A task has given no sign of life for longer than it may: it is killed, which counts as its own failure."""
        if task not in self._unit_by_task[task].running or self.phase not in (TrialPhase.RUNNING, TrialPhase.STOPPING):
            return []
        self._silent_s[task] = silent_s
        return [SignalTask(task, kill=True)]

    def nodes_granted(self, name: str) -> None:
        """The unit's nodes are there."""
        self._units[name].has_nodes = True

    def nodes_lost(self, name: str, cause: str, now: float) -> list[Action]:
        """The unit's nodes are gone, and with them what ran there."""
        unit = self._units[name]
        unit.has_nodes = False
        if self.phase in (TrialPhase.TERMINATING, TrialPhase.KILLING, TrialPhase.ENDED):
            return []
        is_checking = unit.phase is UnitPhase.CHECKING
        actions = self._leave(unit, cause, now) if is_checking else self._expect_end(unit, cause, now, kill=True)
        master = self._units.get(MASTER_UNIT)
        if name == TRAINER_UNIT and master is not None and self.phase is TrialPhase.RUNNING:
            # It would give up on its trainer after a while, and both begin at the last commit anyway.
            actions += self._expect_end(master, f"{name} is away: {cause}", now, kill=False)
        return actions

    def nodes_stay(self, name: str, now: float) -> list[Action]:
        """The nodes of a unit that ended are still there: it ended by itself."""
        unit = self._units[name]
        if unit.phase is not UnitPhase.CHECKING or self.phase is not TrialPhase.RUNNING:
            return []
        return self._restart_or_give_up(unit, now)

    def keep_down(self, name: str, *, is_kept_down: bool, now: float) -> list[Action]:
        """Someone wants the unit to be kept down, or to run again."""
        unit = self._units[name]
        was_kept_down, unit.is_kept_down = unit.is_kept_down, is_kept_down
        if not is_kept_down or was_kept_down or self.phase is not TrialPhase.RUNNING:
            return []
        return self._expect_end(unit, "its group is kept down", now, kill=False)

    def stop_requested(self, *, reason: str, grace_s: float, immediately: bool, now: float) -> list[Action]:
        """Someone asks for the end; the master checkpoints within `grace_s`, unless it is to be `immediately`."""
        if self.phase not in (TrialPhase.RUNNING, TrialPhase.STOPPING):
            return []
        self._stop_reason = reason
        if immediately:
            return [AppendStop(reason), *self._terminate(EndState.STOPPED, reason, now, kill=True)]
        if self.phase is TrialPhase.STOPPING:
            self._deadline = min(self._deadline, now + grace_s)
            return []
        self.phase = TrialPhase.STOPPING
        self._deadline = now + grace_s
        if not self._master_can_still_checkpoint():
            return self._stop_without_checkpoint("the trainer did not run", now)
        return []

    def end_trial(self, outcome: EndState, reason: str, now: float) -> list[Action]:
        """The trial is over: its log holds Done or Stop, or it can never have all that it needs."""
        if self.phase not in (TrialPhase.RUNNING, TrialPhase.STOPPING):
            return []
        return self._terminate(outcome, reason, now)

    def tick(self, now: float) -> list[Action]:
        """Time passed."""
        if self.phase is TrialPhase.STOPPING and now >= self._deadline:
            return self._stop_without_checkpoint("the grace period ended", now)
        if self.phase is TrialPhase.TERMINATING and now >= self._deadline:
            return self._kill_all(now)
        if self.phase is TrialPhase.KILLING and now >= self._deadline:
            left = ", ".join(sorted(self._all_running()))
            self._cause += f" (these did not die: {left})"
            return self._end()
        actions: list[Action] = []
        for unit in self._units.values():
            if now >= unit.deadline:
                actions += self._overdue(unit, now)
            may_start = self.phase is TrialPhase.RUNNING or (self.phase is TrialPhase.STOPPING and unit.spec.is_service)
            is_accompanied = all(self._units[name].has_nodes for name in unit.spec.waits_for)
            if may_start and unit.may_start and is_accompanied and now >= unit.start_at:
                unit.phase = UnitPhase.RUNNING
                unit.running = set(unit.spec.tasks)
                unit.exits.clear()
                unit.started_at = now
                actions.append(StartUnit(unit.spec.name))
        return actions

    def _cleared(self, unit: _Unit, now: float) -> list[Action]:
        """The last task of a unit is gone."""
        if unit.expected_end:
            return self._leave(unit, unit.expected_end, now)
        if unit.spec.needs_nodes and self.phase is TrialPhase.RUNNING:
            unit.phase = UnitPhase.CHECKING
            unit.deadline = now + CHECK_TIMEOUT_S
            return [CheckNodes(unit.spec.name)]
        return self._restart_or_give_up(unit, now)

    def _expect_end(self, unit: _Unit, cause: str, now: float, *, kill: bool) -> list[Action]:
        """Its tasks end now, and it is not their fault."""
        if not unit.running:
            return []
        unit.expected_end = cause
        unit.deadline = now + (KILL_GRACE_S if kill else TERMINATE_GRACE_S)
        return self._signal(unit.running, kill=kill, because=cause)

    def _leave(self, unit: _Unit, cause: str, now: float) -> list[Action]:
        unit.phase, unit.start_at, unit.deadline, unit.expected_end = UnitPhase.WAITING, now, float("inf"), ""
        self._record(unit, because=cause)
        return [UnitNews("unit_left", unit.spec.name, cause)]

    def _record(self, unit: _Unit, *, because: str = "") -> None:
        """Gives the verdict on each end that has none yet."""
        self._verdicts += [replace(ended, because=ended.because or because) for ended in unit.unrecorded]
        unit.unrecorded.clear()

    def _overdue(self, unit: _Unit, now: float) -> list[Action]:
        if unit.phase is UnitPhase.CHECKING:
            return self._restart_or_give_up(unit, now) if self.phase is TrialPhase.RUNNING else []
        unit.deadline = now + KILL_GRACE_S  # again and again: what was asked politely, or did not die
        return self._signal(unit.running, kill=True, because=unit.expected_end)

    def _restart_or_give_up(self, unit: _Unit, now: float) -> list[Action]:
        unit.deadline = float("inf")
        self._record(unit)
        # Where all ranks say that their peers failed, no end is its own cause, and the budget is charged all the same.
        first = next((task_exit for task_exit in unit.exits if task_exit.is_of_its_unit), unit.exits[0])
        if now - unit.started_at >= self._budgets.healthy_after_s:
            unit.charged = unit.in_a_row = 0
        unit.in_a_row += 1
        if unit.is_given_up:
            unit.phase = UnitPhase.WAITING
            return []
        unit.charged += first.is_charged
        if unit.charged > self._budgets.max_restarts:
            cause = f"{first}; {unit.spec.name} used up its {self._budgets.max_restarts} restarts"
            if unit.spec.is_optional or unit.spec.is_beside:
                unit.phase, unit.is_given_up = UnitPhase.WAITING, True
                return [GiveUpUnit(unit.spec.name, cause)]
            outcome = EndState.OOM if first.returncode == WorkerExit.OUT_OF_MEMORY else EndState.FAILED
            return self._terminate(outcome, cause, now, failed=first.task)
        pause_s = growing_pause(unit.in_a_row, first_s=FIRST_PAUSE_S, longest_s=MAX_PAUSE_S)
        unit.restarts += 1
        unit.phase = UnitPhase.WAITING
        unit.start_at = now + pause_s
        numbers = {"pause_s": pause_s, "restarts": unit.restarts}
        return [UnitNews("unit_restarting", unit.spec.name, str(first), numbers)]

    def _exited_while_stopping(self, unit: _Unit, now: float) -> list[Action]:
        unit.phase = UnitPhase.CLEARING  # not started again: the trial is about to end
        if unit.spec.name in (MASTER_UNIT, TRAINER_UNIT):
            return self._stop_without_checkpoint(str(unit.exits[-1]), now)
        return []

    def _master_can_still_checkpoint(self) -> bool:
        needed = [self._units[name] for name in (MASTER_UNIT, TRAINER_UNIT) if name in self._units]
        return bool(needed) and all(unit.phase is UnitPhase.RUNNING for unit in needed)

    def _stop_without_checkpoint(self, why: str, now: float) -> list[Action]:
        reason = f"{self._stop_reason} (without a last checkpoint: {why})"
        return [AppendStop(reason), *self._terminate(EndState.STOPPED, reason, now)]

    def _terminate(
        self, outcome: EndState, cause: str, now: float, *, kill: bool = False, failed: str = ""
    ) -> list[Action]:
        self._outcome, self._cause, self._failed = outcome, cause, failed
        for unit in self._units.values():
            self._record(unit)
        if kill:
            return self._kill_all(now)
        self.phase = TrialPhase.TERMINATING
        self._deadline = now + TERMINATE_GRACE_S
        workers = self._all_running(services=False)
        return self._end_of_trial(workers, kill=False) if workers else self._kill_all(now)

    def _kill_all(self, now: float) -> list[Action]:
        self.phase = TrialPhase.KILLING
        self._deadline = now + KILL_GRACE_S
        running = self._all_running()
        return self._end_of_trial(running, kill=True) if running else self._end()

    def _end_if_all_gone(self) -> list[Action]:
        if not self._all_running():
            return self._end()
        if self.phase is TrialPhase.TERMINATING and not self._all_running(services=False):
            services = self._all_running()
            # Nothing durable lives in a service, so it needs no grace; the deadline of its killer stays.
            self.phase = TrialPhase.KILLING
            return self._end_of_trial(services, kill=True)
        return []

    def _end(self) -> list[Action]:
        self.phase = TrialPhase.ENDED
        return [EndTrial(self._outcome, self._cause, self._failed)]

    def _end_of_trial(self, tasks: Iterable[str], *, kill: bool) -> list[Action]:
        return self._signal(tasks, kill=kill, because=f"the attempt ends, {self._outcome}")

    def _signal(self, tasks: Iterable[str], *, kill: bool, because: str) -> list[Action]:
        chosen = sorted(tasks)
        self._because |= dict.fromkeys(chosen, because)
        return [SignalTask(task, kill) for task in chosen]

    def _all_running(self, *, services: bool = True) -> set[str]:
        return {task for unit in self._units.values() if services or not unit.spec.is_service for task in unit.running}


REDIS_UNIT = "redis"
TRACKER = "tracker"
"""What is started beside the supervisor as tracker/0, tracker/1, ... for each name in tracking.to."""

WorkerCommand = Callable[[TrialDirectory, str, int, AttemptRecord, str], Sequence[str]]
"""(trial, kind, index, attempt, incarnation) -> command line."""


def worker_command(
    directory: TrialDirectory, kind: str, index: int, attempt: AttemptRecord, incarnation: str
) -> list[str]:
    """The command line of a worker. It holds nothing secret: other users of the node can read it."""
    values = {
        "--plan": directory.plan_path,
        "--kind": kind,
        "--index": index,
        "--attempt": attempt.attempt,
        "--incarnation": incarnation,
    }
    return own_python("-m", "corral.workers", *(str(part) for option in values.items() for part in option))


def tracker_command(directory: TrialDirectory, to: str, task: str) -> list[str]:
    """The command line of a tracker."""
    return own_python("-m", "corral.launcher.tracking", str(directory.path), to, task)


def units_of_plan(plan: RunPlan) -> list[UnitSpec]:
    """Restart units: Redis, all training ranks together, every other worker by itself, and so every tracker."""
    workers = [f"{worker.kind}/{worker.index}" for worker in plan.workers]
    ranks = tuple(worker for worker in workers if worker.startswith(f"{TRAINER_UNIT}/"))
    units = [UnitSpec(name=REDIS_UNIT, tasks=(REDIS_UNIT,), is_service=True)]
    if ranks:
        units.append(UnitSpec(name=TRAINER_UNIT, tasks=ranks))
    units += [UnitSpec(name=worker, tasks=(worker,)) for worker in workers if worker not in ranks]
    trackers = [f"{TRACKER}/{index}" for index in range(len(plan.tracking.to))]
    return units + [UnitSpec(name=tracker, tasks=(tracker,), is_beside=True) for tracker in trackers]


class UnitNodes:
    """The units of each extra job, and the extra job of each unit."""

    def __init__(self, extra_jobs: ExtraJobs) -> None:
        self._extra_jobs = extra_jobs
        layout = extra_jobs.trial.layout
        self._allocation_by_unit: dict[str, Allocation] = {}
        self._units_by_allocation: dict[str, list[str]] = {}
        for index, allocation in enumerate(layout.allocations):
            units = self._units_by_allocation[allocation.name] = _units_of(layout, index)
            self._allocation_by_unit = dict.fromkeys(units, allocation) | self._allocation_by_unit

    def check(self, unit: str) -> None:
        """Finds out whether the nodes of a unit are still there."""
        self._extra_jobs.check_nodes(self._allocation_by_unit[unit].name)

    def give_up(self, unit: str) -> None:
        """Nothing of the unit is started any more: its nodes are not needed."""
        if unit in self._allocation_by_unit:
            self._extra_jobs.give_up(self._allocation_by_unit[unit].name)

    def with_needs(self, units: Sequence[UnitSpec]) -> list[UnitSpec]:
        """The restart units, marked where they run in extra jobs."""
        roles = {unit: allocation.role for unit, allocation in self._allocation_by_unit.items()}
        gang = tuple(unit.name for unit in units if roles.get(unit.name) == "group")
        return [
            replace(
                unit,
                needs_nodes=unit.name in roles and self._allocation_by_unit[unit.name].is_extra_job,
                waits_for=() if unit.is_service or unit.name in gang else gang,
                is_optional=roles.get(unit.name) == "elastic",
            )
            for unit in units
        ]

    def drive(self, machine: UnitMachine, now: float) -> list[Action]:
        """One turn of the loop: what follows for units from what became of their jobs."""
        actions: list[Action] = []
        for event in self._extra_jobs.drive(now):
            for unit in self._units_by_allocation[event.name]:
                match event.news:
                    case "granted":
                        machine.nodes_granted(unit)
                    case "lost":
                        actions += machine.nodes_lost(unit, event.cause, now)
                    case "stay":
                        actions += machine.nodes_stay(unit, now)
                    case "never come" if machine.phase is TrialPhase.RUNNING:
                        actions += machine.end_trial(EndState.FAILED, event.cause, now)
        return actions


def _units_of(layout: Layout, allocation: int) -> list[str]:
    ranks = f"{TRAINER_UNIT}/"
    workers = layout.workers_of(allocation)
    return list(dict.fromkeys(TRAINER_UNIT if worker.startswith(ranks) else worker for worker in workers))
