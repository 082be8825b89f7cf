"""Each rule speaks of a trial that suffers from what it is about, and none of one that does not."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from corral.launcher.trial import watchers
from corral.launcher.trial.view import Finding
from corral.launcher.trial.watchers import RULES, dropped_fraction

RECORDED = json.loads((Path(__file__).parents[2] / "golden" / "healthy-metrics.json").read_bytes())
"""By trial of the recipes, the numbers that rules look at, step by step; of supervised ones the last thirty."""
HEALTHY = {
    "train/tokens": 1000.0,
    "no_eos_fraction": 0.05,
    "ppo/clip_fraction": 0.02,
    "train/skipped_early_stop": 0.0,
    "ppo/capped_fraction": 0.01,
    "ppo/entropy": 0.3,
    "ppo/ref_kl": 0.02,
    "response_length/mean": 40.0,
    "response_duplicates": 0.3,
    "rewards/mean": 0.6,
    "rewards/std": 0.4,
}
SUFFERING: Mapping[str, Mapping[str, Any]] = {
    "no_eos_fraction": {"no_eos_fraction": 0.5},
    "data/dropped_of_issued": {"drops": 3},
    "data/dropped_for_errors": {"drops": 0.2, "errors": 0.2},
    "ppo/clip_fraction": {"ppo/clip_fraction": 0.5},
    "train/skipped_early_stop": {"train/skipped_early_stop": 1.0},
    "ppo/capped_fraction": {"ppo/capped_fraction": 0.4},
    "entropy_is_gone": {"ppo/entropy": 0.001},
    "answers_are_alike": {"response_duplicates": 0.9, "rewards/mean": 0.3},
    "ppo/ref_kl": {"ppo/ref_kl": 0.8},
    "length_growth": {"growth": 1.05},
    "rewards_are_equal": {"rewards/std": 0.0, "rewards/mean": 0.0},
}


def lines_of(
    num_steps: int, *, drops: float = 0.0, errors: float = 0.0, growth: float = 1.0, **changed: float
) -> list[dict[str, Any]]:
    """Each step trains two samples, and some are dropped, of which some for errors."""
    return [
        {
            "step": step,
            **HEALTHY,
            **changed,
            "response_length/mean": 40.0 * growth**step,
            "data/samples_trained": 2.0 * step,
            "data/samples_dropped": drops * step,
            "data/dropped/reward_error": errors * step,
            "data/dropped/reward_error/source/a": errors * step,
            "data/dropped/filtered": (drops - errors) * step,
        }
        for step in range(1, num_steps + 1)
    ]


def findings_of(lines: Sequence[Mapping[str, Any]]) -> list[Finding]:
    return watchers.findings_of(lines, trial="exp/t")


def test_there_is_a_case_for_every_rule() -> None:
    assert {rule.metric for rule in RULES} == SUFFERING.keys()


@pytest.mark.parametrize("metric", SUFFERING)
def test_a_rule_speaks_of_what_it_is_about_and_only_once_it_has_seen_enough(metric: str) -> None:
    (rule,) = (rule for rule in RULES if rule.metric == metric)
    lines = lines_of(30, **SUFFERING[metric])
    (found,) = findings_of(lines)
    assert (
        found.topic == metric
        and not found.is_alarm
        and found.step == 30
        and found.details == rule.remedy.format(trial="exp/t")
    )
    num_steps = 20 if rule.steps == 1 else rule.steps
    assert f"over {num_steps} steps" in found.text and "{" not in found.text
    assert findings_of(lines[: rule.steps - 1]) == []
    recovered = lines_of(60)[30 : 30 + num_steps]
    assert findings_of([*lines, {"step": 30, "eval/accuracy": 0.5}, *recovered]) == []


def test_errors_that_drop_a_few_per_cent_of_the_prompts_are_seen_from_the_first_step_on() -> None:
    assert [found.text for found in findings_of(lines_of(1, drops=0.5, errors=0.2))] == [
        "8% of the prompts were dropped for errors, over 1 steps"
    ]
    (found,) = findings_of(lines_of(1, drops=0.5, errors=0.2))
    assert found.details == "rl-logs exp/t --errors shows each error, with its file and line"
    assert findings_of(lines_of(20, drops=0.5, errors=0.02)) == []
    # A trainer epoch that begins counts its errors anew.
    epochs = [line | {"trainer_epoch": 1 + line["step"] // 10} for line in lines_of(12, drops=0.2, errors=0.2)]
    for line in epochs[9:]:
        line["data/dropped/reward_error"] -= 0.2 * 9
    assert "9% of the prompts were dropped for errors, over 12 steps" in [one.text for one in findings_of(epochs)]


def test_drops_that_come_in_bursts_count_as_a_share_of_all_prompts() -> None:
    lines = lines_of(10)
    for line in lines:
        line["data/samples_dropped"] = 40.0 * (line["step"] >= 5)
    (found,) = findings_of(lines)
    assert found.text == "67% of the prompts of these steps were dropped, over 10 steps"
    assert dropped_fraction(lines, range(1, 11)) == pytest.approx(40 / 60)
    assert (dropped_fraction(lines, [5]), dropped_fraction(lines, [6])) == (pytest.approx(40 / 42), 0.0)


@pytest.mark.parametrize("trial", sorted(RECORDED))
def test_nothing_is_said_at_any_step_of_recorded_trials_that_learned(trial: str) -> None:
    columns = RECORDED[trial]
    lines = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    assert [found for end in range(len(lines)) if (found := findings_of(lines[: end + 1]))] == []


def test_nothing_is_said_of_a_healthy_trial_a_solved_one_or_one_with_other_numbers() -> None:
    assert findings_of(lines_of(50)) == []
    solved = {"ppo/entropy": 0.001, "response_duplicates": 1.0, "rewards/mean": 0.99, "rewards/std": 0.0}
    assert findings_of(lines_of(50, **solved)) == []
    assert findings_of([{"step": step, "train/tokens": 9.0, "sft/loss": None} for step in range(50)]) == []
    assert findings_of([]) == []
