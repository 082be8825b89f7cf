"""Trials that learn from preferences: real processes, and a reference that has one of the ranks."""

from collections.abc import Callable

import pytest

from tests.integration.evidence import check_every_sample_was_consumed_once, check_nothing_is_left
from tests.integration.trial_helpers import Trial


def values(trial: Trial, name: str) -> list[float]:
    return [line[name] for line in trial.metrics() if name in line]


@pytest.mark.slow  # DPO below trains on pairs and evaluates, too; `make recipes` has the reward model
def test_a_reward_model_comes_to_tell_right_answers_from_wrong_ones(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial("reward_model", num_rows=44, num_passes=6, overrides={"reward.optimizer.lr": 3e-3})
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    losses = values(trial, "reward_model/loss")
    assert losses[-1] < losses[0]
    # Before the first step a new score layer says 0 of everything; then after every pass over the rows.
    assert (values(trial, "eval/accuracy")[0], values(trial, "eval/margin")[0]) == (0.5, 0.0)
    assert len(values(trial, "eval/loss")) == 1 + 6
    assert values(trial, "data/epoch")[-1] == 6.0 and values(trial, "data/epoch")[0] == pytest.approx(8 / 44)
    assert (trial.directory.exports_path / "final" / "model.safetensors").exists()


def test_dpo_leaves_a_reference_on_some_of_its_ranks(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(
        "dpo",
        num_rows=20,
        num_passes=2,
        overrides={
            "allocation": "actor=fsdp:d2,ref=fsdp:d1@1",
            "actor.optimizer.lr": 1e-3,
            "evaluation.batch_size": 3,  # three, three and two of eight rows, for two ranks of the actor
        },
    )
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    losses, margins = values(trial, "dpo/loss"), values(trial, "eval/margin")
    assert losses[-1] < losses[0]
    assert abs(margins[0]) < 1e-5 < abs(margins[-1])  # policy and reference are the same model at first
    assert values(trial, "eval/count") == [8.0] * 3
