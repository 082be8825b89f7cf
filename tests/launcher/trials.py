"""Trials of stub workers, and waiting for what they do."""

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from corral.experiments.config.cluster import ClusterConfig, LaunchConfig, SupervisionConfig
from corral.experiments.config.control import TrainControl
from corral.experiments.config.data import DatasetConfig
from corral.experiments.config.rollout import EngineConfig, RewardConfig, RolloutConfig
from corral.experiments.config.tracking import TrackingConfig
from corral.experiments.datasets.row_files import fingerprint
from corral.experiments.plan import RunPlan, TrialIdentity
from corral.experiments.trial.attempts import record_attempt
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import read_journal
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.worker_specs import (
    DatasetSpec,
    GenerationServerSpec,
    GserverManagerSpec,
    MasterWorkerSpec,
    ModelWorkerSpec,
    RolloutWorkerSpec,
    SourceSpec,
    WorkerSpec,
)
from corral.launcher.commands.stop import see_through, stop_trial
from corral.launcher.layout.layout import PlacedTrial
from corral.launcher.layout.planner import plan_layout
from corral.launcher.slurm.job_queue import SlurmQueue
from corral.launcher.status.judge import TrialStatus
from corral.launcher.status.reader import StatusReader
from corral.launcher.trial.lock import lock_path, read_lock
from corral.launcher.trial.processes import is_process_alive, kill_trial_processes, trial_processes
from corral.launcher.trial.view import TrialFacts, read_facts
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.scheduling.scheduling import ExperimentScheduling, Scheduling, TasksGroup
from tests.launcher.stub_supervisor import COMMAND

_ROWS = Path(__file__).with_name("rows.jsonl")
DEADLINE_S = 120.0  # processes that start on a busy machine need a good part of it
T = TypeVar("T")


def make_plan(
    directory: Path,
    *,
    mode: Literal["local", "slurm"] = "local",
    experiment: str = "exp",
    trial: str = "trial",
    model_workers: int = 2,
    servers: int = 1,
    rollout_workers: int = 0,
    supervision: Mapping[str, Any] | None = None,
    launch: Mapping[str, Any] | None = None,
    cluster: Mapping[str, Any] | None = None,
    task: Mapping[str, Any] | None = None,
    tracking: Sequence[str] = (),
    gpu: int = 0,
    gpu_type: str | None = None,
) -> RunPlan:
    """A small valid plan: master, `model_workers` ranks, `servers` generation servers, manager, rollout workers."""
    small = Scheduling(**({"cpu": 1, "mem": 64} | dict(task or {})))

    with_gpus = small.model_copy(update={"gpu": gpu, "gpu_type": gpu_type})

    def group(count: int, scheduling: Scheduling = with_gpus) -> TasksGroup | None:
        return TasksGroup(count=count, scheduling=scheduling) if count else None

    ranks = max(model_workers, 1)
    workers: list[WorkerSpec] = [
        MasterWorkerSpec(
            calls=[],
            train_batch_size=4,
            num_prompts=12,
            source="trajectories",
            max_head_offpolicyness=1,
            control=TrainControl(max_steps=3),
            initial_weights={"actor": directory},
            published_role="actor",
            meshes={"actor/0": Mesh(ranks=tuple(range(ranks)), dims=ParallelDims(dp=ranks))},
            sample_ranks=list(range(ranks)),
        )
    ]
    workers += [
        ModelWorkerSpec(
            index=index,
            world_size=model_workers,
            roles=[],
            calls=[],
            tokenizer=Path("/nowhere"),
            takes_samples=True,
            dataset=None,
            evaluation=None,
            reward=RewardConfig(),
            total_steps=3,
        )
        for index in range(model_workers)
    ]
    workers += [
        GenerationServerSpec(index=index, initial_weights=directory, engine=EngineConfig()) for index in range(servers)
    ]
    dataset = DatasetSpec(
        config=DatasetConfig(path=_ROWS),
        row_kind="answers",
        sources={"": SourceSpec(files=(_ROWS,), num_rows=12, sha256=fingerprint((_ROWS,)))},
    )
    workers.append(
        GserverManagerSpec(
            dataset=dataset,
            train_batch_size=4,
            total_train_epochs=1,
            rollout=RolloutConfig(),
        )
    )
    workers += [
        RolloutWorkerSpec(
            index=index,
            num_rollout_workers=rollout_workers,
            dataset=dataset,
            tokenizer=Path("/nowhere"),
            group_size=1,
            rollout=RolloutConfig(),
        )
        for index in range(rollout_workers)
    ]
    return RunPlan(
        trial=TrialIdentity(experiment=experiment, trial=trial, uuid=uuid.uuid4().hex, directory=directory),
        mode=mode,
        seed=1,
        config={"experiment": "stub"},
        cluster=ClusterConfig(**({"gpus_per_node": 0, "cpus_per_node": 8, "mem_per_node": 4000} | dict(cluster or {}))),
        launch=LaunchConfig(**(launch or {})),
        supervision=SupervisionConfig(**({"stop_grace_s": 5.0} | dict(supervision or {}))),
        tracking=TrackingConfig(to=tuple(tracking)),
        scheduling=ExperimentScheduling(
            master_worker=TasksGroup(count=1, scheduling=small),
            model_worker=group(model_workers),
            generation_server=group(servers),
            gserver_manager=group(1, small),
            rollout_worker=group(rollout_workers, small),
        ),
        workers=workers,
    )


class StubTrial:
    """A trial whose workers are stubs."""

    def __init__(self, fileroot: Path, behaviour: Mapping[str, Sequence[str]], **plan: Any) -> None:
        path = fileroot / plan.get("experiment", "exp") / plan.get("trial", "trial")
        self.directory = TrialDirectory(path)
        self.plan = make_plan(path, **plan)
        self.directory.create()
        self.directory.plan_path.write_bytes(self.plan.to_json())
        self.behave(behaviour)
        self.supervisor: subprocess.Popen[bytes] | None = None

    @cached_property
    def placed(self) -> PlacedTrial:
        """On a cluster, with the plan as it is at the first look."""
        return PlacedTrial(plan=self.plan, layout=plan_layout(self.plan), directory=self.directory)

    def behave(self, behaviour: Mapping[str, Sequence[str]]) -> None:
        (self.directory.path / "stub.json").write_text(json.dumps(behaviour))

    def shorten(self, seconds: Mapping[str, float]) -> None:
        """Shorter waits for its keeper and supervisor, by constants of launcher/supervisor: `silence._TIMEOUT_S`."""
        (self.directory.path / "shorter.json").write_text(json.dumps(dict(seconds)))

    def prepare(self, *, attempt: int = 0, resume: bool = False) -> None:
        TrialSecrets.create(self.directory.secrets_path)
        record_attempt(self.directory, attempt=attempt, resume=resume, mode=self.plan.mode)

    def command(self, attempt: int = 0) -> list[str]:
        return [*COMMAND, "--trial", str(self.directory.path), "--attempt", str(attempt)]

    def start(self, *, attempt: int = 0, resume: bool = False) -> subprocess.Popen[bytes]:
        self.prepare(attempt=attempt, resume=resume)
        output = self.directory.path / "supervisor.out"
        with output.open("ab") as file:
            self.supervisor = subprocess.Popen(
                self.command(attempt), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        return self.supervisor

    def run(self) -> int:
        """Starts the trial and waits for its end."""
        self.start()
        return self.wait()

    def wait(self) -> int:
        assert self.supervisor is not None
        return self.supervisor.wait(DEADLINE_S)

    def events(self, name: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        return [
            event
            for event in read_journal(self.directory.journal_path)
            if name in (None, event["event"]) and all(event.get(key) == value for key, value in fields.items())
        ]

    def wait_for(self, name: str, *, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
        return wait_until(
            lambda: found if len(found := self.events(name, **fields)) >= count else None,
            f"{count} x {name} {fields} in {self.events()}",
        )

    def wait_for_workers(self) -> None:
        """Until every worker has got as far as obeying signals."""
        for worker in self.plan.workers:
            log = self.directory.worker_log(0, worker.kind, worker.index)
            wait_until(lambda log=log: log.exists() and log.read_text() or None, f"output in {log}")

    def starts(self, worker: str) -> list[tuple[int, str]]:
        path = self.directory.path / "starts" / worker.replace("/", "-")
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[0]), line.split()[1]) for line in lines]

    def ended(self) -> dict[str, Any]:
        return self.events("attempt_ended", then="")[-1]

    def processes(self) -> list[int]:
        return list(trial_processes(self.plan.trial.uuid))

    def close(self) -> None:
        """Ends whatever a failed test left, by process id."""
        end_trial(self.directory)
        if self.supervisor is not None:
            self.supervisor.wait(DEADLINE_S)


def stop_and_wait(
    facts: TrialFacts, cluster: SlurmQueue | None = None, reader: StatusReader | None = None, **options: Any
) -> TrialStatus:
    """How a trial ended that rl-stop has stopped."""
    cluster = cluster or SlurmQueue()
    (end,) = see_through({facts: stop_trial(facts, cluster, **options)}, reader or StatusReader(cluster)).values()
    if isinstance(end, Exception):
        raise end
    return end


def end_trials(fileroot: Path) -> None:
    """Ends all trials below a fileroot."""
    for plan in fileroot.glob("*/*/plan.json"):
        end_trial(TrialDirectory(plan.parent))


def end_trial(directory: TrialDirectory) -> None:
    """Ends whatever of a trial still runs: its keeper first, then its supervisor, then what these started."""
    keeper = read_lock(lock_path(directory))
    pids = [int(keeper["pid"])] if keeper and is_process_alive(keeper) else []
    pids += [event["pid"] for event in read_journal(directory.journal_path) if event["event"] == "supervisor_started"]
    for pid in pids:
        if str(directory.path).encode() in _command_line(pid):
            os.kill(pid, signal.SIGKILL)
    facts = read_facts(directory)
    if facts is not None:
        kill_trial_processes(facts.uuid)


def wait_until(look: Callable[[], T | None], what: str, *, timeout_s: float = DEADLINE_S) -> T:
    """What `look` finds, as soon as it finds something; the longer a look takes, the rarer they are."""
    begun = time.monotonic()
    deadline = begun + timeout_s
    while not (found := look()):
        looked = time.monotonic()
        if looked > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(max(0.02, 4.0 * (looked - begun)))
        begun = time.monotonic()
    return found


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
