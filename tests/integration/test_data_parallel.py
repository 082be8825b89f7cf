"""Two training ranks that meet over gloo, two generation servers, two rollout workers: the same promises."""

import itertools
from collections.abc import Callable

import pytest

from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import Trial

RANKS = ("model_worker/0", "model_worker/1")


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
