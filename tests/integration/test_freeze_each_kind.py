"""SIGSTOP of every kind of process, one after the other: the trial goes on by itself, completes, and says so."""

import os
import signal
from collections.abc import Callable

import pytest

from tests.integration.evidence import check_every_sample_was_consumed_once, check_nothing_is_left
from tests.integration.trial_helpers import WORKERS, Trial

pytestmark = pytest.mark.slow


def test_a_process_of_any_kind_that_freezes_is_replaced_and_the_trial_completes(
    start_trial: Callable[..., Trial],
) -> None:
    trial = start_trial(
        num_rows=120,
        num_passes=2,
        pause_s=0.1,
        overrides={"train_batch_size": 6, "supervision.silence_timeout_s": 8, "evaluation.every": "1000 steps"},
    )
    trial.wait_for_steps(1)
    for worker in WORKERS:
        rows = trial.wait_until_running()
        os.kill(rows[worker]["pid"], signal.SIGSTOP)
        trial.wait_for(
            lambda worker=worker: [event for event in trial.events("worker_silent") if event["worker"] == worker],
            f"{worker} to be taken for dead",
        )
        trial.wait_for_steps(1)
    rows = trial.wait_until_running()
    assert all(row["restarts"] >= 1 for row in rows.values())
    causes = [event["cause"] for event in trial.events("unit_restarting")]
    assert all(any(cause.startswith(f"{worker} gave no sign of life") for cause in causes) for worker in WORKERS)
    os.kill(trial.events("redis_started")[-1]["pid"], signal.SIGSTOP)
    trial.wait_for(lambda: trial.events("redis_frozen"), "Redis to be taken for dead")
    trial.wait_for_steps(1)
    os.kill(trial.events("supervisor_started")[-1]["pid"], signal.SIGSTOP)
    trial.wait_for(lambda: trial.events("task_ended", who="supervisor"), "the supervisor to be taken for dead")
    trial.full_speed()
    trial.wait_for_end()
    assert "silent" in trial.events("task_ended", who="supervisor")[-1]["why"]
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
