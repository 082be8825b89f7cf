"""kill -9 of every kind of process, one after the other, in one trial that goes on by itself and loses nothing."""

from collections.abc import Callable

import pytest

from tests.integration.evidence import (
    History,
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import WORKERS, Trial

VICTIMS = (
    "rollout_worker/0",
    "generation_server/0",
    "gserver_manager/0",
    "redis",
    "model_worker/0",
    "master_worker/0",
    "supervisor",
)


@pytest.mark.slow
@pytest.mark.parametrize("commit_every_steps", [1, 3])
def test_any_process_can_be_killed_and_the_trial_trains_every_prompt_once(
    start_trial: Callable[..., Trial], commit_every_steps: int
) -> None:
    trial = start_trial(
        num_rows=180,
        num_passes=2,
        pause_s=0.1,
        overrides={
            "train_batch_size": 6,
            "control.commit_every_steps": commit_every_steps,
            "evaluation.every_steps": 1000,
        },
    )
    trial.wait_for_steps(2)
    for victim in VICTIMS:
        # Right after a commit there would be nothing to take back.
        trial.wait_for_uncommitted_step(commit_every_steps=commit_every_steps)
        trial.kill(victim)
        trial.wait_for_steps(2)
    rows = trial.wait_until_running()
    # Each once for itself, and once because a new supervisor starts everything anew.
    assert {worker: row["restarts"] for worker, row in rows.items()} == dict.fromkeys(WORKERS, 2)
    assert [event["returncode"] for event in trial.events("redis_exited")] == [-9]
    (killed,) = trial.events("leftovers_killed")
    assert trial.starts("redis")[-2]["pid"] in killed["pids"]  # workers end with their supervisor, Redis does not
    trial.full_speed()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert check_no_token_was_too_old(trial, eta=1) == 1
    assert [entry["kind"] for entry in History.of(trial).entries.values()].count("claim") == 4
    steps = trial.train_steps()
    was_rolled_back = len(steps) > len(set(steps))
    assert was_rolled_back == (commit_every_steps > 1), steps
