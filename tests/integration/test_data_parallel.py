"""Two training ranks that meet over gloo, two generation servers, two rollout workers: the same promises."""

import itertools
from collections.abc import Callable

import pytest

from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
    num_prompts_over_updates,
)
from tests.integration.trial_helpers import Trial

RANKS = ("model_worker/0", "model_worker/1")


@pytest.mark.slow
def test_two_ranks_share_supervised_training(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial("sft", num_rows=37, num_passes=2, overrides={"allocation": "fsdp:d2"})
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert trial.train_steps() == list(range(1, 11))
    losses = [line["sft/loss"] for line in trial.metrics() if "sft/loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(("makers", "trainers"), list(itertools.product((1, 2, 3), repeat=2)))
def test_any_number_of_makers_feeds_any_number_of_trainers(
    start_trial: Callable[..., Trial], makers: int, trainers: int
) -> None:
    trial = start_trial(
        num_rows=31,
        num_passes=2,
        overrides={
            "allocation": f"hf:d{makers}+fsdp:d{trainers}",
            "groups.rollout_worker.count": makers,
            "train_batch_size": 6,
            "evaluation.every": "1000 steps",
        },
    )
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
    assert trial.train_steps() == list(range(1, 12))


@pytest.mark.slow  # test_megatron.py loses a rank, and every kind is killed in test_security.py
def test_a_gang_that_loses_one_rank_starts_again_as_a_whole(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(
        num_rows=60,
        num_passes=2,
        pause_s=0.1,
        overrides={
            "allocation": "hf:d2+fsdp:d2",
            "groups.rollout_worker.count": 2,
            "control.commit_every": "2 steps",
            "evaluation.every": "1000 steps",
            "weights.update_mode": "abort",  # what comes back is asked for again, perhaps from the other server
            "rollout.sampling.max_new_tokens": 48,
            # So the trainer waits for answers more than for rewards, and updates find some under way.
            "rollout.max_concurrent_rollouts": 2,
        },
    )
    trial.wait_for_steps(3)
    first = {rank: trial.pid(rank) for rank in RANKS}
    trial.kill("model_worker/1")
    trial.wait_for_steps(3)
    rows = trial.wait_until_running()
    assert len(rows) == 8
    assert {worker: row["restarts"] for worker, row in rows.items() if row["restarts"]} == dict.fromkeys(RANKS, 1)
    assert all(trial.pid(rank) != first[rank] for rank in RANKS)
    trial.full_speed()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
    assert num_prompts_over_updates(trial) > 0
    spools = sorted(path.name for path in (trial.directory.path / "spool").iterdir())
    assert spools == ["rollout_worker-0", "rollout_worker-1"]
