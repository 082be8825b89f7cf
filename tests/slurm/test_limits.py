"""Limits of QOS and accounts on a real SLURM with accounting: known before submission, and told of what is queued."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.errors import UnsatisfiableError
from corral.launcher.status.judge import TrialStatus
from corral.launcher.status.reader import StatusReader
from corral.launcher.submit import prepare, start
from corral.launcher.trial.view import read_facts
from corral.scheduling.scheduling import ElasticTasks, TasksGroup
from tests.experiments.broken_yaml import write_inputs
from tests.launcher.trials import wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.wrong_configurations import VALID_SLURM

pytestmark = pytest.mark.slurm


@pytest.fixture
def experiment(accounting_cluster: Cluster, tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    path = tmp_path / "experiment.yaml"
    path.write_text(VALID_SLURM)
    return path


def _prepare(file: Path, *overrides: str, trial: str = "t", has_checks: bool = True) -> prepare.Submission:
    where = f"cluster.fileroot={file.parent / 'trials'}"
    return prepare.prepare(file, [*overrides, where], trial_name=trial, mode="slurm", has_checks=has_checks)


GPUS = ("groups.model_worker.scheduling.gpu=1", "groups.generation_server.scheduling.gpu=1")
THREE_GPUS = ("allocation=hf:d1+fsdp:d2", *GPUS)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["launch.qos=max-wall"], "time_limit", ["is 01:00:00, and QOS 'max-wall' allows", "at most '00:10:00'"]),
        (["launch.qos=max-cpus-per-job"], "qos", ["7 CPUs", "allows 4 in one job (MaxTRES)", "you may use deny,"]),
        (["launch.qos=max-cpus-per-user"], "qos", ["7 CPUs", "allows 4 in all jobs of a user (MaxTRESPU)"]),
        (["launch.qos=group-cpus"], "qos", ["7 CPUs", "allows 4 in all its jobs together (GrpTRES)"]),
        (["launch.qos=deny"], "qos", ["7 CPUs", "allows 4 in all jobs of a user"]),
        (["launch.account=few-gpus", *THREE_GPUS], "account", ["3 GPUs", "account 'few-gpus' allows 2"]),
        (
            ["launch.qos=one-running", "launch.layout=jobs"],
            "qos",
            ["4 jobs that run at once", "QOS 'one-running' allows 1 of a user (MaxJobsPU)", "launch.layout: packed"],
        ),
        (["launch.qos=one-job", "launch.layout=jobs"], "qos", ["4 jobs in the queue at once", "(MaxSubmitPU)"]),
        (
            ["launch.qos=max-wall", "launch.time_limit=null", "launch.signal_before_end_s=600"],
            "time_limit",
            ["QOS 'max-wall' gives 00:10:00 (MaxWall)", "SLURM signals its end 600 s before", "another launch.qos"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)  # fmt: skip
def test_a_limit_that_can_never_be_kept_is_refused_with_its_holder(
    experiment: Path, overrides: list[str], key: str, words: list[str]
) -> None:
    with pytest.raises(UnsatisfiableError) as refused:
        _prepare(experiment, *overrides)
    text = str(refused.value)
    assert all(word in text for word in words), text
    assert [problem.path for problem in refused.value.problems] == [("launch", key)], text
    assert "sacctmgr show" in text


def test_the_evidence_of_a_limit_is_a_command_that_shows_it(experiment: Path, accounting_cluster: Cluster) -> None:
    for overrides in (["launch.qos=max-cpus-per-job"], ["launch.account=few-gpus", *THREE_GPUS]):
        with pytest.raises(UnsatisfiableError) as refused:
            _prepare(experiment, *overrides)
        shown = accounting_cluster.run(*refused.value.problems[0].evidence.split())
        assert shown.returncode == 0 and "=" in shown.stdout, shown


def test_what_keeps_its_limits_is_not_held_up(experiment: Path) -> None:
    for overrides in (
        (),
        ("launch.qos=max-wall", "launch.time_limit=10"),
        ("launch.qos=max-wall", "launch.time_limit=null"),
        ("launch.account=few-gpus", *GPUS),
        ("launch.qos=one-running",),
    ):
        submission = _prepare(experiment, *overrides)
        assert any(check.startswith("est. start") for check in submission.checks)
        assert not any("can never" in warning for warning in submission.warnings)


def test_a_default_that_can_never_be_kept_is_a_warning(experiment: Path, accounting_cluster: Cluster) -> None:
    """A site's plugin may give the job another account than its default."""
    modify = ("sacctmgr", "-i", "modify", "account", "lab", "set")
    assert accounting_cluster.run(*modify, "MaxTRES=cpu=3").returncode == 0
    try:
        warnings = _prepare(experiment).warnings
        assert any("it asks for 7 CPUs, and account 'lab' allows 3 in one job" in warning for warning in warnings), (
            warnings
        )
        with pytest.raises(UnsatisfiableError, match=r"launch\.account: lab"):
            _prepare(experiment, "launch.account=lab")
    finally:
        accounting_cluster.run(*modify, "MaxTRES=cpu=-1")


def test_a_refusal_for_a_limit_of_submission_is_not_the_accounts_fault(
    experiment: Path, accounting_cluster: Cluster
) -> None:
    held = accounting_cluster.run("sbatch", "--parsable", "--hold", "--qos=one-job", "--wrap=true")
    assert held.returncode == 0, held.stderr
    try:
        with pytest.raises(UnsatisfiableError, match=r"(?s)SLURM refuses.*launch\.qos: one-job.*sacctmgr show qos"):
            _prepare(experiment, "launch.qos=one-job", "launch.account=lab")
    finally:
        accounting_cluster.run("scancel", held.stdout.strip())


@pytest.fixture
def queue_one(experiment: Path, accounting_cluster: Cluster) -> Any:
    """Queues a trial without any check, and waits until rl-status says what is expected of it."""
    jobs: list[str] = []

    def queue(*overrides: str, trial: str, until: Callable[[TrialStatus], bool]) -> TrialStatus:
        submission = _prepare(experiment, *overrides, trial=trial, has_checks=False)
        start.create(submission)
        jobs.append(start.start(submission))
        facts = read_facts(submission.directory)
        assert facts is not None
        reader = StatusReader()
        return wait_until(
            lambda: status if until(status := reader.read([facts])[0]) else None, f"{trial} to wait for its limit"
        )

    yield queue
    for job_id in jobs:
        accounting_cluster.run("scancel", job_id)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["launch.qos=max-wall"], ["QOSMaxWallDurationPerJobLimit", "QOS 'max-wall' allows 00:10:00", "launch.qos"]),
        (["launch.qos=max-cpus-per-user"], ["QOSMaxCpuPerUserLimit", "allows 4 in all jobs of a user", "ask for less"]),
        (["launch.qos=group-cpus"], ["QOSGrpCpuLimit", "QOS 'group-cpus' allows 4", "rl-stop"]),
        (["launch.account=few-gpus", *THREE_GPUS], ["AssocGrpGRES", "account 'few-gpus' allows 2", "launch.account"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_queued_trial_that_no_waiting_helps_is_blocked_and_says_by_which_limit(
    queue_one: Any, overrides: list[str], words: list[str]
) -> None:
    status = queue_one(*overrides, trial="t", until=lambda status: status.state == "BLOCKED")
    assert all(word in status.note for word in words), status.note


def test_a_queued_trial_that_waits_for_other_jobs_is_not_blocked(queue_one: Any, accounting_cluster: Cluster) -> None:
    modify = ("sacctmgr", "-i", "modify", "qos", "group-cpus", "set")
    assert accounting_cluster.run(*modify, "GrpTRES=cpu=8").returncode == 0
    other = accounting_cluster.run("sbatch", "--parsable", "--qos=group-cpus", "--cpus-per-task=2", "--wrap=sleep 60")
    try:
        until = lambda status: "QOSGrpCpuLimit" in status.note  # noqa: E731
        status = queue_one("launch.qos=group-cpus", trial="t", until=until)
        assert status.state == "QUEUED" and "it starts when other jobs end" in status.note
    finally:
        accounting_cluster.run("scancel", other.stdout.strip())
        accounting_cluster.run(*modify, "GrpTRES=cpu=4")


@pytest.fixture
def cluster(accounting_cluster: Cluster) -> Cluster:
    return accounting_cluster


def test_a_trial_whose_own_jobs_hold_one_of_them_back_ends_and_says_by_which_limit(
    make_slurm_trial: Any, cluster: Cluster
) -> None:
    """Its head runs, and no group's job ever will; a submission with checks would have been refused."""
    launch = {"layout": "jobs", "qos": "one-running", "gang_timeout_s": 2.0}
    trial = make_slurm_trial({"master_worker/0": ["finish 0"]}, model_workers=1, servers=1, launch=launch)
    trial.submit()
    status = trial.wait_for_state("FAILED", "COMPLETE", "LOST")
    words = ["QOSMaxJobsPerUserLimit", "QOS 'one-running' allows 1 of a user (MaxJobsPU)", "launch.layout: packed"]
    assert status.state == "FAILED" and all(word in status.note for word in words), (status, trial.events())
    assert not trial.events("gang_given_back") and not trial.events("worker_started", worker="master_worker/0")
    wait_until(lambda: not cluster.run("squeue", "-h", "-t", "PD,R,CG").stdout.strip(), "the end of all of its jobs")


def test_elastic_workers_leave_their_place_among_limited_jobs_to_one_that_the_trial_needs(
    make_slurm_trial: Any, cluster: Cluster
) -> None:
    trial = make_slurm_trial(
        {"master_worker/0": ["master"]}, model_workers=1, servers=2, launch={"layout": "jobs", "qos": "three-running"}
    )
    groups = trial.plan.scheduling
    one = groups.generation_server.scheduling
    servers = TasksGroup(count=1, scheduling=one, elastic=ElasticTasks(count=1, scheduling=one))
    trial.replan(scheduling=groups.model_copy(update={"generation_server": servers}))
    trial.submit()
    elastic, group = "generation_server/1", "generation_server"
    running = trial.wait_for("extra_job_running", allocation=group)
    waiting = trial.wait_for("extra_job_submitted", allocation=elastic)[0]["job_id"]
    wait_until(
        lambda: "QOSMaxJobsPerUserLimit" in cluster.run("squeue", "-h", "-j", waiting, "-o", "%r").stdout, "its limit"
    )
    cluster.run("scontrol", "requeue", running[0]["job_id"])
    trial.wait_for("extra_job_running", allocation=elastic)
    gone = trial.wait_for("extra_job_gone", allocation=elastic)
    assert gone[0]["cause"] == "it made room for generation_server", gone
    trial.wait_for("extra_job_running", allocation=group, count=2)
    trial.wait_for("worker_started", worker="generation_server/0", count=2)
