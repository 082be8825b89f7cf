"""kill -9 of every kind of worker in a job: it alone comes back, or with those whose collectives it shares."""

import os
import signal
from typing import Any

import pytest

from tests.launcher.trials import stop_and_wait, wait_until

pytestmark = pytest.mark.slurm


def test_a_server_comes_back_alone_ranks_together_and_a_stopped_trial_in_a_new_job(make_slurm_trial: Any) -> None:
    server = "generation_server/0"
    trial = make_slurm_trial(
        {"master_worker/0": ["master"], server: ["exit 3", "kill", "wait"]}, model_workers=2, servers=2
    )
    first = trial.submit()
    workers = [f"{worker.kind}/{worker.index}" for worker in trial.plan.workers]
    ranks = [worker for worker in workers if worker.startswith("model_worker/")]
    trial.wait_for("worker_started", worker=server, count=3)
    assert [event["code"] for event in trial.events("task_ended", who=server)] == [3, -9]
    for worker in workers:
        wait_until(lambda worker=worker: trial.starts(worker), f"the start of {worker}")
    os.kill(trial.starts(ranks[1])[-1][0], signal.SIGKILL)
    for rank in ranks:
        wait_until(lambda rank=rank: len(trial.starts(rank)) > 1, f"{rank} to start again")
    assert {worker: len(trial.starts(worker)) for worker in workers if worker != server} == {
        worker: 2 if worker in ranks else 1 for worker in workers if worker != server
    }
    restart = trial.events("unit_restarting")[-1]
    assert restart["unit"] == "model_worker" and "model_worker/1" in restart["cause"]
    assert trial.status().job_id == trial.job_id
    stopped = stop_and_wait(trial.facts, grace_s=20.0)
    assert (stopped.state, stopped.note.split(" (")[0]) == ("STOPPED", "checkpointed at step 3")
    trial.directory.clear_stop_request()
    trial.behave({"master_worker/0": ["finish 0.2"]})
    assert trial.submit(attempt=1, resume=True) != first
    assert trial.wait_for_state("COMPLETE", "FAILED", "LOST").state == "COMPLETE"
