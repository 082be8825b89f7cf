"""What of a plan is started: restart units, and the command line of each worker.

plan.json --units_of_plan--> UnitSpec: redis, model_worker (all ranks), each other worker
          --worker_command--> python -m corral.workers --plan ... --kind ... --index ...
"""

import sys
from collections.abc import Callable, Sequence

from corral.experiments.plan import RunPlan
from corral.experiments.trial.attempts import AttemptRecord
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.supervisor.units.actions import UnitSpec
from corral.launcher.supervisor.units.machine import TRAINER_UNIT

REDIS_UNIT = "redis"

WorkerCommand = Callable[[TrialDirectory, str, int, AttemptRecord, str], Sequence[str]]
"""(trial, kind, index, attempt, incarnation) -> command line."""


def worker_command(
    directory: TrialDirectory, kind: str, index: int, attempt: AttemptRecord, incarnation: str
) -> list[str]:
    """The command line of a worker. It holds nothing secret: other users of the node can read it."""
    return [
        sys.executable,
        "-m",
        "corral.workers",
        "--plan",
        str(directory.plan_path),
        "--kind",
        kind,
        "--index",
        str(index),
        "--attempt",
        str(attempt.attempt),
        "--incarnation",
        incarnation,
    ]


def units_of_plan(plan: RunPlan) -> list[UnitSpec]:
    """Restart units: Redis, all training ranks together, every other worker by itself."""
    workers = [f"{worker.kind}/{worker.index}" for worker in plan.workers]
    ranks = tuple(worker for worker in workers if worker.startswith(f"{TRAINER_UNIT}/"))
    units = [UnitSpec(name=REDIS_UNIT, tasks=(REDIS_UNIT,), is_service=True)]
    if ranks:
        units.append(UnitSpec(name=TRAINER_UNIT, tasks=ranks))
    return units + [UnitSpec(name=worker, tasks=(worker,)) for worker in workers if worker not in ranks]
