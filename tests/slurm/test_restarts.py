"""kill -9 of every kind of worker in a job: it alone comes back, or with those whose collectives it shares."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import WORKERS, Trial
from tests.launcher.trials import wait_until

pytestmark = pytest.mark.slurm

NUM_RANKS = 3


@pytest.mark.slow  # test_security.py, and of steps of a job test_packed.py, test_layouts.py and the test below
def test_a_worker_of_each_kind_comes_back_alone_and_the_trial_completes(start_job: Callable[..., Trial]) -> None:
    trial = start_job(
        "grpo",
        num_rows=16 + 20 * len(WORKERS),
        num_passes=2,
        pause_s=0.1,
        overrides={"groups.generation_server.scheduling.cpu": 7, "evaluation.every": "1000 steps"},
    )
    trial.wait_for_steps(1)
    seconds = {}
    for victim in WORKERS:
        rows = trial.wait_until_running()
        before = {worker: len(trial.starts(worker)) for worker in (*WORKERS, "redis", "supervisor")}
        killed_at = time.monotonic()
        trial.kill(victim, pid=rows[victim]["pid"])
        restarted_at = time.monotonic()
        trial.wait_for(lambda victim=victim, rows=rows: _is_back(trial, victim, rows), f"{victim} to be running")
        seconds[victim] = (restarted_at - killed_at, time.monotonic() - killed_at)
        after = {worker: len(trial.starts(worker)) for worker in before}
        assert after == before | {victim: before[victim] + 1}
        assert trial.events("task_ended", who=victim)[-1]["code"] == -signal.SIGKILL
        trial.wait_for_steps(1)
    trial.full_speed()
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert check_no_token_was_too_old(trial, eta=1) == 1
    for victim, (started_s, running_s) in seconds.items():
        print(f"{victim}: started again {started_s:.2f} s after kill -9, running after {running_s:.1f} s")


def test_ranks_come_back_together_and_nobody_else(make_slurm_trial: Any) -> None:
    trial = make_slurm_trial({"master_worker/0": ["master"]}, model_workers=NUM_RANKS, servers=2)
    trial.submit()
    workers = [f"{worker.kind}/{worker.index}" for worker in trial.plan.workers]
    ranks = [worker for worker in workers if worker.startswith("model_worker/")]
    for worker in workers:
        wait_until(lambda worker=worker: trial.starts(worker), f"the start of {worker}")
    os.kill(trial.starts(ranks[1])[-1][0], signal.SIGKILL)
    for rank in ranks:
        wait_until(lambda rank=rank: len(trial.starts(rank)) > 1, f"{rank} to start again")
    assert {worker: len(trial.starts(worker)) for worker in workers} == {
        worker: 2 if worker in ranks else 1 for worker in workers
    }
    (restart,) = trial.events("unit_restarting")
    assert restart["unit"] == "model_worker" and "model_worker/1" in restart["cause"]


def _is_back(trial: Trial, worker: str, before: dict[str, dict[str, Any]]) -> bool:
    row = trial.workers()[worker]
    return row["state"] == "UP" and row["pid"] != before[worker]["pid"]
