"""A trial of an environment: its tasks are trained on once, whatever becomes of the process that plays them."""

from pathlib import Path

from tests.environments import needs_environments
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_generator_and_trainer_agreed,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import Material, submit_environment


@needs_environments
def test_tasks_of_an_environment_are_trained_on_once(material: Material, tmp_path: Path) -> None:
    trial = submit_environment(tmp_path, material, num_tasks=48)
    try:
        trial.wait_for_steps(1)
        trial.kill("rollout_worker/0")
        trial.wait_for_end()
        check_nothing_is_left(trial)
        check_every_sample_was_consumed_once(trial)
        check_no_token_was_too_old(trial, eta=1)
        assert check_generator_and_trainer_agreed(trial) > 0
        assert [line["eval/problems"] for line in trial.metrics() if "eval/problems" in line] == [4.0, 4.0]
    finally:
        trial.close()
