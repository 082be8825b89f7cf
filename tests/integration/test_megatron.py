"""A GRPO trial whose policy is trained by megatron-core over tensor-parallel ranks."""

from collections.abc import Callable

from tests.integration.evidence import check_every_sample_was_consumed_once, check_nothing_is_left
from tests.integration.trial_helpers import Trial


def test_a_trial_on_megatron_survives_the_kill_of_a_rank(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(
        num_rows=40,
        pause_s=0.1,
        overrides={
            "allocation": "hf:d1+megatron:t2",
            "control.commit_every_steps": 2,
            "evaluation.every_steps": 1000,
        },
    )
    trial.wait_for_steps(3)
    trial.kill("model_worker/1")
    trial.full_speed()
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert trial.train_steps() == [1, 2, 3, 4, 5]
