"""A trial of an environment: its tasks are trained on once, whatever becomes of the process that plays them."""

import json
import os
from pathlib import Path

from tests.environments import needs_environments
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_generator_and_trainer_agreed,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import RECIPES, Material, Pace, Trial, run_program

_NUM_TASKS = 48


@needs_environments
def test_tasks_of_an_environment_are_trained_on_once(material: Material, tmp_path: Path) -> None:
    settings = {
        "actor.path": material.model,
        "rollout.environment.args.taskset.num_tasks": _NUM_TASKS,
        "rollout.environment.held_out_args.taskset.num_tasks": 4,
        "train_batch_size": 8,
        "ppo.group_size": 2,
        "supervision.step_timeout_s": 300,
        "supervision.setup_timeout_s": 300,
    }
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    options = [option for key, value in settings.items() for option in ("-s", f"{key}={value}")]
    file = str(RECIPES / "arithmetic_environment.yaml")
    command = ["rl-submit", file, "--local", "-n", "trial", "--fileroot", str(tmp_path), *options]
    directory, pace = tmp_path / "arithmetic-environment" / "trial", Pace(tmp_path / "pace", num_steps=6)
    trial = Trial(directory, uids=[], environment=environment, pace=pace)
    try:
        run_program(command, environment=environment)
        rows = [json.loads(line) for line in trial.directory.tasks_path.read_text().splitlines()]
        trial.uids = [f"0:{row['id']}" for row in rows]
        assert len(set(trial.uids)) == _NUM_TASKS
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
