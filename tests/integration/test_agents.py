"""A whole trial whose agent talks in several turns: it is trained on, evaluated, and evaluated again by rl-eval."""

import json
from collections.abc import Callable

import pytest

from corral.experiments.trial.evaluation import read_result, result_path
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_generator_and_trainer_agreed,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import Trial


def test_a_trial_trains_on_episodes_of_several_turns(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(
        num_rows=32,
        overrides={
            "rollout.agent": "talking_agents:two_turns",
            "rollout.agent_processes": 1,
            "evaluation.every": "1000 steps",
        },
    )
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
    check_generator_and_trainer_agreed(trial)
    steps = [line for line in trial.metrics() if "episode/turns" in line]
    assert len(steps) == len(trial.train_steps()) > 0
    for line in steps:
        assert line["episode/turns"] == 2.0 and line["episode/sequences"] == 1.0 and line["episode/ended/length"] == 0.0
        assert -1.0 <= line["notes/gained"] <= 1.0
    (row,) = map(json.loads, trial.run("rl-samples", "-n", "1", "-o", "jsonl").splitlines())
    assert row["remarks"].startswith("noted: gained ")
    shown = trial.run("rl-samples", "--show", f"{row['uid']}#{row['sequence']}")
    assert row["remarks"] in shown and shown.count("tokens made ──") == shown.count("tokens given ──") == 2
    evaluated = [line for line in trial.metrics() if "eval/reward/mean" in line]
    assert all(line["eval/problems"] == 8 and line["eval/unjudged"] == 0 for line in evaluated) and len(evaluated) == 2
    trial.run("rl-eval", "--local")
    result = read_result(result_path(trial.directory.evaluations_path, trial.train_steps()[-1]))
    assert result is not None and (result.source, result.num_prompts) == ("exports/final", 8)
    assert result.mean_reward == pytest.approx(evaluated[-1]["eval/reward/mean"])
