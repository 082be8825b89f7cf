"""An evaluation by generation servers outlives the death of whoever takes part in it: each problem counts once."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.integration.evidence import check_every_sample_was_consumed_once, check_nothing_is_left
from tests.integration.trial_helpers import Material, Trial


def sampled(material: Material) -> dict[str, Any]:
    """Settings: several answers to each problem, and the same problems from another file."""
    return {
        "evaluation.sampling.temperature": 1.0,
        "evaluation.answers_per_problem": 4,
        "evaluation.vote": r"(\d+)",
        "evaluation.more.twice": material.held_out,
    }


def check_evaluations(trial: Trial, steps: Sequence[int]) -> None:
    """Of these steps, beside which nothing was trained."""
    evaluated = {line["step"]: line for line in trial.metrics() if "eval/accuracy" in line}
    for line in (evaluated[step] for step in steps):
        assert line["eval/problems"] == line["eval/twice/problems"] == 8 and line["eval/unjudged"] == 0
        assert line["eval/version_min"] == line["eval/version_max"] == line["step"]
        # The seeds are those of the row, whichever file has it, whoever answers.
        assert line["eval/reward/mean"] == pytest.approx(line["eval/twice/reward/mean"])
        assert line["eval/accuracy"] <= line["eval/pass@2"] <= line["eval/pass@4"] >= line["eval/majority"]


@pytest.mark.slow  # test_evaluations.py has whoever dies, and the trial of test_security.py what is evaluated
def test_an_evaluation_is_whole_whoever_is_killed_meanwhile(
    start_trial: Callable[..., Trial], material: Material
) -> None:
    trial = start_trial(
        num_rows=8,
        pause_s=0.1,
        overrides={"evaluation.every": "1 step", **sampled(material)},
    )
    trial.hold_rewards()
    for victim in ("rollout_worker/0", "gserver_manager/0", "master_worker/0"):
        trial.wait_for(lambda: _progress(trial).endswith("of 16 problems"), "the evaluation before the first step")
        trial.kill(victim)
    trial.wait_for(lambda: _progress(trial).endswith("of 16 problems"), "the evaluation of the next epoch")
    assert trial.metrics() == []
    trial.full_speed()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert [line["step"] for line in trial.metrics() if "eval/accuracy" in line] == [0, 1]
    check_evaluations(trial, [0, 1])
    assert [line["step"] for line in trial.metrics() if "train/tokens" in line] == [1]


def _progress(trial: Trial) -> str:
    return str(trial.workers()["master_worker/0"]["waiting_for"] or "")
