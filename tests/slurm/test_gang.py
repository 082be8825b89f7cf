"""Two trials that together ask for more than the cluster has: neither waits for the other for ever."""

from typing import Any

import pytest

from corral.launcher.slurm.client import SlurmClient
from corral.launcher.slurm.verdict import Job
from tests.launcher.trials import wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.trials import SlurmTrial

pytestmark = pytest.mark.slurm

WORKS = {"master_worker/0": ["finish 1.5"]}
# A rank and a server fill a node's GPUs: each trial needs two nodes for training, and two for generation.
HALF_AND_HALF: dict[str, Any] = {"model_workers": 2, "servers": 2, "gpu": 8}


def extra_jobs_of(trial: SlurmTrial) -> dict[str, Job]:
    """The jobs of a trial's groups that are not over, by group."""
    return {job.tag["allocation"]: job for job in trial.jobs if job.is_staying}


def test_two_trials_that_hold_half_of_the_cluster_each_both_complete(make_slurm_trial: Any, cluster: Cluster) -> None:
    launch = {"layout": "jobs", "gang_timeout_s": 4.0}
    trials = [make_slurm_trial(WORKS, trial=name, launch=launch, **HALF_AND_HALF) for name in "ab"]
    blocker = cluster.run(
        "sbatch", "--parsable", "--output=/dev/null", "--nodes=4", "--mem=100", "--gres=gpu:8", "--wrap=sleep 600"
    ).stdout.strip()
    wait_until(lambda: SlurmClient().job(blocker)["JobState"] == "RUNNING", "the job that holds all GPUs")
    for trial in trials:
        trial.submit()
    for trial in trials:
        wait_until(lambda trial=trial: len(extra_jobs_of(trial)) == 3, "the jobs of both groups")
        cluster.run("scontrol", "hold", extra_jobs_of(trial)["generation_server"].job_id)
    cluster.run("scancel", blocker)
    for trial in trials:
        wait_until(lambda trial=trial: extra_jobs_of(trial)["model_worker"].state == "RUNNING", "half of the cluster")
        assert trial.events("worker_started") == []
    for trial in trials:
        cluster.run("scontrol", "release", extra_jobs_of(trial)["generation_server"].job_id)

    for trial in trials:
        trial.wait_for_end()
    given_back = [event for trial in trials for event in trial.events("gang_given_back")]
    assert given_back and all(set(event["missing"]) == {"generation_server"} for event in given_back[:2]), given_back
    for trial in trials:
        assert not trial.events("unit_restarting")
        starts = trial.events("worker_started")
        all_there = [
            trial.events("extra_job_running", allocation=name)[-1]["time"]
            for name in ("model_worker", "generation_server")
        ]
        assert min(start["time"] for start in starts) >= max(all_there)  # no step before the whole gang was there
        wait_until(lambda trial=trial: not extra_jobs_of(trial), "the end of every job of the trial")
