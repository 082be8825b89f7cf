"""Servers say log-probabilities of another model for a while: the alarm begins and ends with them."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.integration.evidence import check_every_sample_was_consumed_once, check_nothing_is_left
from tests.integration.trial_helpers import Trial

FOREIGN_ARITHMETIC = Path(__file__).parent / "foreign_arithmetic"


@pytest.mark.slow
def test_the_alarm_lasts_as_long_as_the_numbers_are_foreign(start_trial: Callable[..., Trial], tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    trial = start_trial(
        num_rows=400,
        pause_s=0.02,
        overrides={"evaluation.every": "1000 steps", "train_batch_size": 16},
        environment={"CORRAL_TEST_FOREIGN": str(foreign), "PYTHONPATH": str(FOREIGN_ARITHMETIC)},
    )
    trial.wait_for_steps(2)
    shown = trial.run("rl-status")
    assert "\nfound      logprob check: OK, max difference " in shown and "nats (version 0)" in shown
    assert "\ncompared   logprob check: 100% of the last step's tokens, 0" in shown

    foreign.touch()
    go_on_until(trial, alarm=1.0)
    shown = trial.run("rl-status", "--explain")
    assert "\nALARM      logprob check: generator and trainer differ by " in shown
    assert "100% of the step's tokens were compared" in shown.replace("\n           ", " ")
    assert "ALARM: logprob check: generator and trainer differ by " in trial.status()["note"]
    [why] = [line for line in shown.splitlines() if line.startswith("why RUNNING")]
    assert "ALARM: logprob check: generator and trainer differ by " in why
    trial.wait_for_steps(2)
    assert steps(trial)[-1]["gap/alarm"] == 1.0  # it does not end by itself

    foreign.unlink()
    go_on_until(trial, alarm=0.0)
    shown = trial.run("rl-status", "--explain")
    assert "ALARM" not in shown and "\nfound      logprob check: OK, " in shown
    trial.full_speed()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert [notice["is_alarm"] for notice in trial.events("train_notice")] == [False, True, False]
    assert [alarm for alarm, _ in groupby(line["gap/alarm"] for line in steps(trial))] == [0.0, 1.0, 0.0]


def steps(trial: Trial) -> list[dict[str, Any]]:
    return [line for line in trial.metrics() if "gap/tokens" in line]


def go_on_until(trial: Trial, *, alarm: float) -> None:
    """Step by step."""
    while steps(trial)[-1]["gap/alarm"] != alarm:
        trial.wait_for_steps(1)
