"""The packed layout on a real SLURM: submitted, supervised in its allocation, stopped, cancelled."""

from pathlib import Path
from typing import Any

import pytest

from corral.launcher.slurm.client import SlurmClient
from tests.launcher.trials import stop_and_wait, wait_until
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm


def test_a_trial_runs_in_one_allocation_and_completes(make_slurm_trial: Any, cluster: Cluster) -> None:
    trial = make_slurm_trial({"master_worker/0": ["finish 1.5 3"]}, task={"cpu": 3}, model_workers=2)
    job_id = trial.submit()
    trial.wait_for("worker_started", count=5)
    (job,) = [job for job in SlurmClient().queue() if job.job_id == job_id]
    assert job.tag["trial_uuid"] == trial.plan.trial.uuid
    assert job.num_nodes == 3  # five workers of 3 CPUs, two on a node of 8 beside the supervisor's core
    ended = trial.wait_for_state("COMPLETE", "FAILED", "LOST")
    assert (ended.state, ended.step, ended.attempt) == ("COMPLETE", 3, 0), trial.events()
    assert {event["node"] for event in trial.events("worker_started")} == {"n1", "n2", "n3"} or ended.nodes == 3
    wait_until(lambda: (SlurmClient().job(job_id) or {}).get("JobState") == "COMPLETED", "SLURM's COMPLETED")
    assert not trial.processes()


def test_a_step_that_crashes_is_restarted_inside_the_allocation(make_slurm_trial: Any) -> None:
    trial = make_slurm_trial(
        {"master_worker/0": ["master"], "generation_server/0": ["exit 3", "kill", "wait"]}, model_workers=1
    )
    trial.submit()
    trial.wait_for("worker_started", worker="generation_server/0", count=3)
    exits = trial.events("task_ended", who="generation_server/0")
    assert [event["code"] for event in exits[:2]] == [3, -9]
    assert trial.status().job_id == trial.job_id
    stopped = stop_and_wait(trial.facts, grace_s=20.0)
    assert (stopped.state, stopped.note.split(" (")[0]) == ("STOPPED", "checkpointed at step 3")
    assert len(trial.starts("master_worker/0")) == 1


def test_gpus_are_dealt_out_without_overlap(make_slurm_trial: Any, tmp_path: Path) -> None:
    trial = make_slurm_trial({"master_worker/0": ["master"]}, gpu=2, model_workers=2, servers=2)
    trial.submit()
    pid_by_worker = {
        worker: wait_until(lambda worker=worker: trial.starts(worker), f"the start of {worker}")[0][0]
        for worker in (f"{worker.kind}/{worker.index}" for worker in trial.plan.workers)
    }
    environments = {worker: _environment(pid) for worker, pid in pid_by_worker.items()}
    shares = {worker: environment["CUDA_VISIBLE_DEVICES"] for worker, environment in environments.items()}
    assert shares["master_worker/0"] == shares["gserver_manager/0"] == ""
    assert sorted(",".join(shares.values()).strip(",").split(",")) == [str(index) for index in range(8)], shares
    assert {environment["CORRAL_BIND_ADDRESS"] for environment in environments.values()} == {"127.0.0.1"}
    stop_and_wait(trial.facts, now=True)


def test_scancel_from_outside_is_told_from_our_own_end(make_slurm_trial: Any, cluster: Cluster) -> None:
    trial = make_slurm_trial({"master_worker/0": ["stubborn"]}, model_workers=1, servers=0)
    trial.submit()
    wait_until(lambda: trial.starts("master_worker/0"), "the master")
    cluster.run("scancel", trial.job_id)
    ended = trial.wait_for_state("CANCELLED", "STOPPED", "FAILED", "LOST")
    assert (ended.state, ended.is_final) == ("CANCELLED", True)


def test_a_stopped_trial_goes_on_in_a_new_job(make_slurm_trial: Any) -> None:
    trial = make_slurm_trial({"master_worker/0": ["master", "finish 0.2"]}, model_workers=1, servers=0)
    first = trial.submit()
    wait_until(lambda: trial.starts("master_worker/0"), "the master")
    assert stop_and_wait(trial.facts, grace_s=20.0).state == "STOPPED"
    trial.directory.clear_stop_request()
    assert trial.submit(attempt=1, resume=True) != first
    assert trial.wait_for_state("COMPLETE", "FAILED", "LOST").state == "COMPLETE"


def test_a_queued_trial_is_shown_with_its_reason_and_stopped_without_having_run(
    make_slurm_trial: Any, cluster: Cluster
) -> None:
    trial = make_slurm_trial({}, launch={"extra_sbatch_arguments": ["--begin=now+1hour"]})
    trial.submit()
    status = trial.wait_for_state("QUEUED")
    assert "begin time" in status.note
    assert stop_and_wait(trial.facts).state in ("STOPPED", "CANCELLED")
    assert trial.events("worker_started") == []


def test_a_job_that_slurm_has_forgotten_is_lost_unless_it_left_word(make_slurm_trial: Any) -> None:
    trial = make_slurm_trial({})
    trial.prepare()
    assert trial.status().state == "LOST"


def test_an_unreachable_cluster_is_unknown_not_failed(make_slurm_trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = make_slurm_trial({})
    trial.prepare()
    monkeypatch.setenv("PATH", "/nowhere")
    status = trial.status()
    assert status.state == "UNKNOWN" and "squeue" in status.note


def _environment(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return dict(entry.split("=", 1) for entry in file.read().decode().split("\0") if "=" in entry)
