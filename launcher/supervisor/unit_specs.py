"""What of a plan is started: restart units, the command line of each worker, and which units run in extra jobs.

plan.json --units_of_plan--> UnitSpec: redis, model_worker (all ranks), each other worker, each tracker
          --worker_command--> python -m corral.workers --plan ... --kind ... --index ...
          --tracker_command--> python -m corral.launcher.tracking ...
extra jobs --NodesEvent(allocation)--> UnitNodes.drive --unit by unit--> UnitMachine.nodes_granted --> actions
unit machine --CheckNodes(unit)--> UnitNodes.check --allocation--> extra jobs
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from corral.experiments.own_python import own_python
from corral.experiments.plan import RunPlan
from corral.experiments.trial.attempts import AttemptRecord, EndState
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.extra_jobs.extra_jobs import ExtraJobs
from corral.launcher.layout.layout import Allocation, Layout
from corral.launcher.supervisor.units import TRAINER_UNIT, Action, TrialPhase, UnitMachine, UnitSpec

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
        """The restart units, told which of them run in extra jobs."""
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
