"""The srun of a worker: exact for every kind of allocation, GPU binding and container."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.config.cluster import ClusterConfig
from corral.experiments.errors import ConfigError
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.layout.layout import PlacedTrial, RunningAllocation, Step
from corral.launcher.layout.planner import plan_layout
from corral.launcher.runners.runner import ContainedCommand, NodesNotAvailableError, contain
from corral.launcher.slurm import srun
from corral.launcher.slurm.client import SlurmClient, SlurmUnreachableError
from corral.launcher.slurm.own_jobs import own_job
from corral.launcher.slurm.srun import (
    EXIT_OF_SRUN,
    SrunRunner,
    SrunTask,
    StepSignals,
    StepSlot,
    signal_tasks,
    srun_command,
)
from corral.launcher.trial.ends import ExitKind
from corral.scheduling.scheduling import Scheduling
from tests.launcher.trials import make_plan, wait_until

HEAD = RunningAllocation(job_id="7", het_group=None, hosts=("n1", "n2"))
COMPONENT = RunningAllocation(job_id="7", het_group=1, hosts=("n3",), own_job_id="8")
WORK = ContainedCommand(command=("python", "-m", "work"), environment={})
COMMON_END = ["--kill-on-bad-exit=1", "--unbuffered", "--input=none"]


def step(**fields: Any) -> Step:
    return Step(**({"allocation": 0, "node_index": 0, "cpus": 2, "mem_mb": 500} | fields))


def test_a_worker_without_gpus_sees_none() -> None:
    place = StepSlot(step=step(node_index=1), running=HEAD, node_gpus=8)
    assert srun_command("rollout_worker/3", WORK, place) == [
        "srun", "--jobid=7", "--job-name=rollout_worker-3", "--exact", "--nodes=1", "--ntasks=1", "--nodelist=n2",
        "--cpus-per-task=2", "--mem=500M", "--gres=none", *COMMON_END,
        "env", "CUDA_VISIBLE_DEVICES=", "python", "-m", "work",
    ]  # fmt: skip


def test_a_step_in_a_component_names_the_leader_and_its_group() -> None:
    place = StepSlot(step=step(gpus=2, gpu_indices=(0, 1)), running=COMPONENT, node_gpus=8)
    assert srun_command("model_worker/0", WORK, place) == [
        "srun", "--jobid=7", "--het-group=1", "--job-name=model_worker-0", "--exact", "--nodes=1", "--ntasks=1",
        "--nodelist=n3", "--cpus-per-task=2", "--mem=500M", "--gpus-per-task=2", *COMMON_END, "python", "-m", "work",
    ]  # fmt: skip


def test_a_sliced_worker_shares_the_nodes_gpus_and_the_cores_of_those_who_do() -> None:
    sliced = step(gpus=2, gpu_indices=(4, 5), gpu_binding="slice")
    command = srun_command("model_worker/2", WORK, StepSlot(step=sliced, running=HEAD, node_gpus=8, sliced_cpus=6))
    assert {"--exact", "--overlap", "--gres=gpu:8", "--cpus-per-task=6", "--mem=500M"} <= set(command)
    inside = command[command.index("sh") :]
    assert (inside[:2], inside[3:]) == (["sh", "-c"], ["cut-gpus", "4,5", "2", "python", "-m", "work"])


def test_where_slurm_counts_no_gpus_the_planned_ones_are_named() -> None:
    place = StepSlot(step=step(gpus=2, gpu_indices=(4, 5)), running=HEAD, node_gpus=8)
    command = srun_command("model_worker/0", WORK, place, counts_gpus=False)
    assert command[-5:] == ["env", "CUDA_VISIBLE_DEVICES=4,5", "python", "-m", "work"]
    assert not any("gres" in word or "gpus-per" in word for word in command)


@pytest.mark.parametrize(
    ("inherited", "planned", "seen"),
    [
        ("0,1,2,3", (2, 3), "2,3"),
        ("4,5,6,7", (0, 3), "4,7"),
        ("GPU-aa,GPU-bb", (1,), "GPU-bb"),
        ("7", (0,), "7"),
    ],
)
def test_a_slice_is_cut_out_of_the_inherited_list(inherited: str, planned: tuple[int, ...], seen: str) -> None:
    assert run_cut(inherited, planned).stdout == f"{seen} it's $x\n"


@pytest.mark.parametrize("inherited", ["0,1", "", None])
def test_a_slice_that_is_not_there_is_an_error_and_no_other_gpu_is_taken(inherited: str | None) -> None:
    done = run_cut(inherited, (1, 2))
    assert done.returncode == 1 and done.stdout == ""
    assert (
        f"GPUs 1,2 were planned for this worker, but its step has CUDA_VISIBLE_DEVICES={inherited or ''}" in done.stderr
    )


def run_cut(inherited: str | None, planned: tuple[int, ...]) -> subprocess.CompletedProcess[str]:
    """Runs what stands behind srun's options, with a command that says what it sees."""
    say = ContainedCommand(command=("sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES" "$1"', "say", "it's $x"), environment={})
    sliced = step(gpus=len(planned), gpu_indices=planned, gpu_binding="slice")
    command = srun_command("model_worker/0", say, StepSlot(step=sliced, running=HEAD, node_gpus=8))
    environment = {"PATH": os.environ["PATH"]} | ({} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited})
    return subprocess.run(
        command[command.index("sh") :], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


ENVIRONMENT = {"CORRAL_BIND_ADDRESS": "10.0.0.1", "LIST": "a,b"}
COMMAND = ("/venv/bin/python", "-m", "corral.workers", "--plan", "/t/plan.json")


def contained(runtime: Any, directory: str = "/t", **fields: Any) -> ContainedCommand:
    return contain(
        COMMAND,
        ENVIRONMENT,
        scheduling=Scheduling(**({"cpu": 1, "mem": 1} | fields)),
        cluster=ClusterConfig(container_runtime=runtime, container_python="/opt/py"),
        directory=Path(directory),
    )


def test_apptainer_gets_mounts_gpus_and_variables_that_no_comma_cuts() -> None:
    inside = contained("apptainer", gpu=1, container_image="/i/my image.sif", container_mounts=("/data:/data:ro",))
    assert inside == ContainedCommand(
        command=(
            "apptainer", "exec", "--nv", "--bind=/t:/t", "--bind=/data:/data:ro", "/i/my image.sif",
            "/opt/py", "-m", "corral.workers", "--plan", "/t/plan.json",
        ),
        environment={
            **ENVIRONMENT,
            "APPTAINERENV_CORRAL_BIND_ADDRESS": "10.0.0.1",
            "APPTAINERENV_LIST": "a,b",
        },
    )  # fmt: skip
    assert "--nv" not in contained("apptainer", container_image="i.sif").command


def test_singularity_is_called_by_its_own_name_and_reads_its_own_variables() -> None:
    inside = contained("singularity", container_image="i.sif")
    assert inside.command[:2] == ("singularity", "exec")
    assert inside.environment["SINGULARITYENV_LIST"] == "a,b"


def test_pyxis_is_told_by_options_of_srun() -> None:
    inside = contained("pyxis", container_image="nvcr.io#nvidia/pytorch:24.01", container_mounts=("/data:/data",))
    assert inside.srun_options == (
        "--container-image=nvcr.io#nvidia/pytorch:24.01",
        "--container-mounts=/t:/t,/data:/data",
        "--container-env=CORRAL_BIND_ADDRESS,LIST",
    )
    assert inside.command == ("/opt/py", "-m", "corral.workers", "--plan", "/t/plan.json")
    place = StepSlot(step=step(), running=HEAD)
    command = srun_command("rollout_worker/0", inside, place)
    assert command.index("--container-image=nvcr.io#nvidia/pytorch:24.01") < command.index("env")


def test_a_group_without_an_image_runs_on_the_host_whatever_the_site_has() -> None:
    assert contained("apptainer") == ContainedCommand(command=COMMAND, environment=ENVIRONMENT)


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_folder_that_cannot_be_mounted_is_refused(runtime: str) -> None:
    with pytest.raises(ConfigError, match="holds a comma or a colon"):
        contained(runtime, "/t/a,b", container_image="i.sif")


class FakeClient(SlurmClient):
    """Answers without a cluster."""


def test_a_batch_step_knows_its_allocation() -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    own = own_job(environment)
    assert own is not None and (own.allocations, own.job_id, own.restart_count) == ({0: HEAD}, "7", 0)
    assert (own.host, own.hosts) == ("n1", ("n1", "n2")) and own_job({}) is None


def test_a_batch_step_of_a_heterogeneous_job_knows_all_components() -> None:
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_ID_HET_GROUP_0": "7",
        "SLURM_JOB_ID_HET_GROUP_1": "8",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n3",
    }
    own = own_job(environment | {"SLURM_RESTART_COUNT": "2", "SLURMD_NODENAME": "n2"})
    assert own is not None and (own.host, own.restart_count, own.hosts) == ("n2", 2, ("n1", "n2", "n3"))
    allocations = own.allocations
    assert allocations[1] == COMPONENT
    assert (allocations[0].het_group, allocations[0].hosts) == (0, ("n1", "n2"))
    assert [allocations[group].steps_job_id for group in (0, 1)] == ["7", "8"]


def make_runner(tmp_path: Path, allocations: dict[int, RunningAllocation], **launch: Any) -> SrunRunner:
    plan = make_plan(tmp_path, mode="slurm", launch=launch, cluster={"bind_address": "auto"})
    return SrunRunner(
        client=FakeClient(),
        trial=PlacedTrial(plan=plan, layout=plan_layout(plan), directory=TrialDirectory(tmp_path)),
        allocations=lambda: allocations,
        why_away=lambda index: f"its job {index + 40} waits (Resources)",
    )


@pytest.mark.parametrize(
    ("addresses", "found"),
    [
        ({"n1": "127.0.1.1", "n2": "192.0.2.7"}, "192.0.2.9"),  # Debian's /etc/hosts, on the machine itself
        ({"n1": "192.0.2.5", "n2": "192.0.2.7"}, "192.0.2.5"),
        ({"n1": "127.0.1.1", "n2": "127.0.1.1"}, "127.0.1.1"),  # all nodes on one machine
    ],
)
def test_a_node_whose_name_is_loopbacks_to_itself_is_reached_by_the_address_that_leads_to_the_others(
    addresses: dict[str, str], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(tmp_path, {0: HEAD})
    monkeypatch.setattr(FakeClient, "node_address", lambda self, node: node, raising=False)
    monkeypatch.setattr(srun, "_number_of", addresses.__getitem__)
    own_way = {"192.0.2.7": "192.0.2.9"}
    monkeypatch.setattr(srun, "_own_address_towards", lambda name: own_way.get(addresses[name], "127.0.0.1"))
    assert runner.address_of("n1") == found


def test_a_node_address_that_is_a_number_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeClient, "node_address", lambda self, node: "127.0.0.1", raising=False)
    assert make_runner(tmp_path, {0: HEAD}).address_of("n1") == "127.0.0.1"


def test_a_worker_whose_nodes_are_away_is_not_started_and_the_error_says_whose_job_is_missing(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, {0: HEAD}, layout="jobs")
    with pytest.raises(NodesNotAvailableError, match=r"model_worker/0 .* its job 41 waits \(Resources\)"):
        runner.start("model_worker/0", ("x",), environment={}, log_path=tmp_path / "log")
    with pytest.raises(NodesNotAvailableError):
        runner.bind_address("model_worker/0")
    assert not (tmp_path / "log").exists()


def test_an_allocation_that_comes_and_goes_is_looked_at_anew_for_each_start(tmp_path: Path) -> None:
    allocations = {0: HEAD}
    runner = make_runner(tmp_path, allocations, layout="jobs")
    allocations[1] = RunningAllocation(job_id="9", het_group=None, hosts=("n9",))
    assert runner.slot_of("model_worker/0").host == "n9"
    allocations[1] = RunningAllocation(job_id="9", het_group=None, hosts=("n4",))
    assert runner.slot_of("model_worker/0").host == "n4"


class SteppingClient(SlurmClient):
    """A cluster whose every step runs; it counts what it is asked."""

    def __init__(self, job: dict[str, str] | None = None, *, is_away: bool = False) -> None:
        super().__init__()
        self.asked: list[tuple[str, ...]] = []
        self._job = job
        self._is_away = is_away

    def steps(self, *job_ids: str) -> dict[str, list[str]]:
        self._ask("squeue", *job_ids)
        return {f"x-{index}": [f"7.{index}"] for index in range(1000)}

    def cancel_steps(self, steps: Sequence[str], *, signal_name: str) -> None:
        self._ask("scancel", signal_name, *steps)

    def job(self, job_id: str) -> dict[str, str] | None:
        self._ask("scontrol", job_id)
        return self._job

    def _ask(self, *command: str) -> None:
        self.asked.append(command)
        if self._is_away:
            raise SlurmUnreachableError(f"{command[0]} did not answer within 20 s")


def make_task(signals: StepSignals, index: int = 0, *, code: str = "import time; time.sleep(600)") -> SrunTask:
    process = subprocess.Popen([sys.executable, "-c", code])
    return SrunTask(process, name=f"x-{index}", node="n1", signals=signals, job_id="7")


def test_a_hundred_steps_are_told_to_end_by_two_commands() -> None:
    client = SteppingClient()
    signals = StepSignals(client)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        try:
            tasks = [SrunTask(process, name=f"x-{i}", node="n1", signals=signals, job_id="7") for i in range(100)]
            signal_tasks(tasks, signals, kill=False)
            assert client.asked == [("squeue", "7"), ("scancel", "INT", *(f"7.{i}" for i in range(100)))]
            assert process.poll() is None
            signal_tasks(tasks, signals, kill=True)
            assert [command[:2] for command in client.asked[2:]] == [("squeue", "7"), ("scancel", "KILL")]
        finally:
            process.kill()


def test_a_controller_that_is_away_is_asked_once_and_not_for_each_worker() -> None:
    client = SteppingClient(is_away=True)
    signals = StepSignals(client)
    tasks = [make_task(signals, index) for index in range(5)]
    signal_tasks(tasks, signals, kill=False)
    for task in tasks:
        assert wait_until(task.poll, "the end of srun itself") == -15
        assert task.exit_kind() is ExitKind.OWN  # no notice of SLURM's
    assert len(client.asked) == 1


@pytest.mark.parametrize(
    ("exit_code", "client", "kind"),
    [
        (1, SteppingClient(is_away=True), ExitKind.OWN),
        (EXIT_OF_SRUN, SteppingClient(is_away=True), ExitKind.SLURM_AWAY),
        (EXIT_OF_SRUN, SteppingClient({"JobState": "RUNNING"}), ExitKind.OWN),
        (EXIT_OF_SRUN, SteppingClient({"JobState": "COMPLETING"}), ExitKind.OWN),
        (EXIT_OF_SRUN, SteppingClient({"JobState": "NODE_FAIL"}), ExitKind.JOB_GONE),
        (EXIT_OF_SRUN, SteppingClient({"JobState": "PENDING"}), ExitKind.JOB_GONE),
        (EXIT_OF_SRUN, SteppingClient(None), ExitKind.JOB_GONE),
    ],
)
def test_an_exit_of_srun_itself_is_explained_by_what_slurm_says_of_the_job(
    exit_code: int, client: SteppingClient, kind: ExitKind
) -> None:
    task = make_task(StepSignals(client), code=f"import sys; sys.exit({exit_code})")
    wait_until(lambda: task.poll() is not None, "the end of the process")
    assert task.exit_kind() is kind


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", ExitKind.NOTICED),
        ("sys.exit(128 + signal.SIGTERM)", ExitKind.NOTICED),  # so srun says it of its task
        ("os.kill(os.getpid(), signal.SIGKILL)", ExitKind.OWN),
        ("sys.exit(0)", ExitKind.OWN),
    ],
)
def test_sigterm_that_nobody_of_us_sent_is_a_notice_and_no_crash(end: str, kind: ExitKind) -> None:
    task = make_task(StepSignals(SteppingClient()), code=f"import os, signal, sys; {end}")
    wait_until(lambda: task.poll() is not None, "the end of the process")
    assert task.exit_kind() is kind
