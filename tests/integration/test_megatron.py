"""Trials whose policy is trained by megatron-core over tensor-parallel ranks.

The agent of one talks in several turns: it is trained on, evaluated, and evaluated again by rl-eval.
"""

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


def test_a_trial_of_an_agent_on_megatron_survives_the_kill_of_a_rank(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(
        num_rows=36,
        pause_s=0.1,
        overrides={
            "train_batch_size": 6,
            "allocation": "hf:d1+megatron:t2",
            "rollout.agent": "talking_agents:two_turns",
            "rollout.agent_processes": 1,
            "control.commit_every": "2 steps",
            "evaluation.every": "1000 steps",
        },
    )
    trial.wait_for_steps(3)
    trial.kill("model_worker/1")
    trial.wait_for_steps(1)
    ranks = ("model_worker/0", "model_worker/1")
    restarts = {worker: row["restarts"] for worker, row in trial.wait_until_running().items() if row["restarts"]}
    assert restarts == dict.fromkeys(ranks, 1)  # a trainer group starts again as a whole
    trial.full_speed()
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
    check_generator_and_trainer_agreed(trial)
    assert trial.train_steps() == list(range(1, 7))
    check_turns(trial)


def check_turns(trial: Trial) -> None:
    """What the agent said and did is in all records, and rl-eval lets it play again."""
    steps = [line for line in trial.metrics() if "episode/turns" in line]
    assert [line["step"] for line in steps] == trial.train_steps()
    for line in steps:
        assert line["episode/turns"] == 2.0 and line["episode/sequences"] == 1.0 and line["episode/ended/length"] == 0.0
        assert -1.0 <= line["notes/gained"] <= 1.0
    (row,) = map(json.loads, trial.run("rl-samples", "-n", "1", "-o", "jsonl").splitlines())
    assert row["remarks"].startswith("noted: gained ")
    shown = trial.run("rl-samples", "--show", f"{row['uid']}#{row['sequence']}")
    assert row["remarks"] in shown and shown.count("tokens made ──") == shown.count("tokens given ──") == 2
    evaluated = [line for line in trial.metrics() if "eval/reward/mean" in line]
    assert all(line["eval/problems"] == 8 and line["eval/unjudged"] == 0 for line in evaluated)
    assert {0, 6} <= {line["step"] for line in evaluated}
    trial.run("rl-eval", "--local")
    result = read_result(result_path(trial.directory.evaluations_path, trial.train_steps()[-1]))
    assert result is not None and (result.source, result.num_prompts) == ("exports/final", 8)
    assert result.mean_reward == pytest.approx(evaluated[-1]["eval/reward/mean"])
