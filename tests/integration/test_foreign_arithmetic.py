"""Servers say log-probabilities of another model for a while: the alarm begins and ends with them."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.evidence import check_every_sample_was_consumed_once, check_nothing_is_left
from tests.integration.trial_helpers import Trial

FOREIGN_ARITHMETIC = Path(__file__).parent / "foreign_arithmetic"
NUM_ANSWERS = 32  # of a step
EXACT = 1e-3  # nats: what a token of the present weights may differ by in float32


@pytest.mark.slow
def test_the_alarm_lasts_until_as_many_tokens_agree_as_raised_it(
    start_trial: Callable[..., Trial], tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    trial = start_trial(
        num_rows=160,
        pause_s=0.02,
        overrides={"evaluation.every_steps": 1000},
        environment={"CORRAL_TEST_FOREIGN": str(foreign), "PYTHONPATH": str(FOREIGN_ARITHMETIC)},
    )
    trial.wait_for_steps(2)
    shown = trial.run("rl-status")
    assert "\nfound      generator and trainer agree at version 0" in shown
    assert "\ncompared   100% of the last step's tokens, of weights of any age: they differ by 0." in shown

    foreign.touch()
    go_on_until(trial, alarm=1.0)
    shown = trial.run("rl-status", "--explain")
    assert "\nALARM      generator and trainer differ by " in shown and "nats on the average token of weights" in shown
    assert "100% of the step's tokens were compared" in shown.replace("\n           ", " ")
    assert "another model's arithmetic" in shown and "ALARM: generator and trainer" in trial.status()["note"]
    [why] = [line for line in shown.splitlines() if line.startswith("why RUNNING")]
    assert "ALARM: generator and trainer differ by " in why
    trial.wait_for_steps(2)
    assert steps(trial)[-1]["gap/alarm"] == 1.0  # it does not end by itself

    foreign.unlink()
    go_on_until(trial, alarm=0.0)
    shown = trial.run("rl-status", "--explain")
    assert "ALARM" not in shown and "\nfound      generator and trainer " in shown
    trial.full_speed()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert [notice["is_alarm"] for notice in trial.events("train_notice")] == [False, True, False]
    lasting = list(alarms(steps(trial)))
    assert [line["gap/alarm"] for line in steps(trial)] == lasting and lasting[0] == lasting[-1] == 0.0


def steps(trial: Trial) -> list[dict[str, Any]]:
    return [line for line in trial.metrics() if "gap/tokens" in line]


def go_on_until(trial: Trial, *, alarm: float) -> None:
    """Step by step."""
    while steps(trial)[-1]["gap/alarm"] != alarm:
        trial.wait_for_steps(1)


def alarms(lines: list[dict[str, Any]]) -> Iterator[float]:
    """What gap/alarm should be in each step, by what that step's other numbers say."""
    owed = 0.0
    for line in lines:
        assert line["gap/coverage"] == 1.0
        present, num_tokens = line["gap/tokens"], round(line["response_length/mean"] * NUM_ANSWERS)
        beyond = present * (present > 0 and line["gap/max"] > EXACT) + (num_tokens - present) * is_foreign(line)
        if not beyond:
            assert line.get("drift/allowed", 0.0) < 1.0  # less than half of what was found: these tokens count
        owed = max(owed, beyond) if beyond else owed - num_tokens
        yield float(owed > 0)


def is_foreign(line: Mapping[str, Any]) -> bool:
    """The tokens of older weights."""
    return bool(line.get("drift/mean", 0.0) > line.get("drift/allowed", 0.0))
