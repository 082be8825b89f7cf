"""What runs of an attempt: starts that SLURM does not answer cost nothing, and all workers are told to end at once."""

import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

from corral.experiments.config.cluster import SupervisionConfig
from corral.experiments.trial.attempts import AttemptRecord
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.secrets import TrialSecrets
from corral.launcher.files.file_thread import FileThread
from corral.launcher.layout.layout import PlacedTrial, RunningAllocation
from corral.launcher.layout.planner import plan_layout
from corral.launcher.slurm.client import SlurmClient, SlurmUnreachableError
from corral.launcher.slurm.srun import SrunRunner
from corral.launcher.supervisor.attempt_tasks import AttemptTasks
from corral.launcher.supervisor.recorder import Recorder
from corral.launcher.supervisor.signs_of_life import SupervisorExit
from corral.launcher.supervisor.supervisor import Supervisor
from corral.launcher.supervisor.units import MAX_PAUSE_S, StartUnit, UnitMachine, UnitNews, UnitSpec, worker_command
from corral.launcher.trial.ends import ExitKind, TaskExit
from corral.launcher.trial.processes import TRIAL_UUID_VARIABLE
from corral.launcher.trial.redis_server import redis_of_trial
from tests.launcher.trials import StubTrial, make_plan, wait_until

ATTEMPT = AttemptRecord(attempt=0, resume=False, mode="slurm", start_slot=1, submitted_at=0.0)
WORKER = "gserver_manager/0"
SRUN_WITHOUT_CONTROLLER = """\
#!/bin/sh
echo "srun: error: Unable to contact slurm controller (connect failure)" >&2
exit ${SLURM_EXIT_ERROR:-1}
"""


class AwayClient(SlurmClient):
    """A cluster whose controller is away."""

    def job(self, job_id: str) -> dict[str, str] | None:
        raise SlurmUnreachableError("scontrol did not answer within 20 s")

    def node_address(self, node: str) -> str:
        raise SlurmUnreachableError("scontrol did not answer within 20 s")


def make_tasks(tmp_path: Path, *, bind_address: str) -> AttemptTasks:
    """Tasks of a trial on a cluster whose controller is away."""
    plan = make_plan(tmp_path / "trial", mode="slurm", cluster={"bind_address": bind_address})
    directory = TrialDirectory(tmp_path / "trial")
    directory.create()
    directory.start_attempt_logs(0)
    TrialSecrets.create(directory.secrets_path)
    running = RunningAllocation(job_id="7", het_group=None, hosts=("n1", "n2"))
    runner = SrunRunner(
        client=AwayClient(),
        trial=PlacedTrial(plan=plan, layout=plan_layout(plan), directory=directory),
        allocations=lambda: {0: running},
    )
    return AttemptTasks(
        directory=directory,
        plan=plan,
        attempt=ATTEMPT,
        runner=runner,
        redis=redis_of_trial(directory, plan.trial.uuid, attempt=0, host="127.0.0.1"),
        recorder=Recorder(FileThread("records"), Journal(directory.journal_path), attempt=0),
        worker_command=lambda *arguments: ["true"],
    )


@pytest.mark.parametrize("who_asks", ["srun", "supervisor"])
def test_a_controller_that_is_away_for_long_uses_up_no_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who_asks: str
) -> None:
    (tmp_path / "srun").write_text(SRUN_WITHOUT_CONTROLLER)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    tasks = make_tasks(tmp_path, bind_address="127.0.0.1" if who_asks == "srun" else "auto")
    budgets = SupervisionConfig(max_restarts=1, healthy_after_s=1e9)
    machine, now = UnitMachine([UnitSpec(name=WORKER, tasks=(WORKER,))], budgets), 0.0
    for _ in range(5):
        now += MAX_PAUSE_S
        assert machine.tick(now) == [StartUnit(WORKER)]
        tasks.start([WORKER])
        (ended,) = wait_until(tasks.collect, f"the end of {WORKER}")
        assert ended.kind is ExitKind.SLURM_AWAY
        assert decide(machine, ended, now) == "unit_restarting"
    now += MAX_PAUSE_S
    machine.tick(now)
    assert decide(machine, TaskExit(WORKER, 1), now) == "unit_restarting"  # the one crash that may be


def decide(machine: UnitMachine, ended: TaskExit, now: float) -> str:
    (action,) = machine.exited(ended, now)
    assert isinstance(action, UnitNews)
    return action.event


class ObedientTask:
    """A worker that ends when it is told."""

    pid = 1
    node = "n1"

    def __init__(self) -> None:
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def exit_kind(self) -> ExitKind:
        return ExitKind.OWN


class CountingRunner:
    """Counts what workers are told; somebody stops the trial as soon as all of them run."""

    def __init__(self, directory: TrialDirectory, *, num_workers: int, request: StopRequest) -> None:
        self.orders: list[tuple[list[str], bool]] = []
        self.tasks: dict[str, ObedientTask] = {}
        self._directory = directory
        self._num_workers = num_workers
        self._request = request

    def start(
        self, worker: str, command: Sequence[str], *, environment: Mapping[str, str], log_path: Path
    ) -> ObedientTask:
        self.tasks[worker] = ObedientTask()
        if len(self.tasks) == self._num_workers:
            self._directory.write_stop_request(self._request)
        return self.tasks[worker]

    def signal(self, workers: Collection[str], *, kill: bool) -> None:
        self.orders.append((sorted(workers), kill))
        for worker in workers:
            self.tasks[worker].returncode = -9 if kill else 0

    def bind_address(self, worker: str) -> str:
        return "127.0.0.1"

    def clean_up(self) -> None:
        pass


@pytest.mark.parametrize("now", [True, False])
def test_all_workers_of_a_trial_are_told_to_end_by_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: bool
) -> None:
    monkeypatch.setenv(TRIAL_UUID_VARIABLE, "")  # the supervisor sets it for what it starts
    trial = StubTrial(tmp_path, {}, model_workers=8, servers=8)
    trial.prepare()
    trial.directory.start_attempt_logs(0)
    # Without `now` the master would have no time for a last commit, so all are asked to end.
    request = StopRequest(requested_at=time.time(), by="me@here", now=now, grace_s=0.0, then="")
    runner = CountingRunner(trial.directory, num_workers=len(trial.plan.workers), request=request)
    tasks = AttemptTasks(
        directory=trial.directory,
        plan=trial.plan,
        attempt=ATTEMPT,
        runner=runner,
        redis=redis_of_trial(trial.directory, trial.plan.trial.uuid, attempt=0, host="127.0.0.1"),
        recorder=Recorder(FileThread("records"), Journal(trial.directory.journal_path), attempt=0),
        worker_command=worker_command,
    )
    assert Supervisor(tasks=tasks).run() is SupervisorExit.ENDED
    assert len(runner.tasks) == 18
    assert runner.orders == [(sorted(runner.tasks), now)]
