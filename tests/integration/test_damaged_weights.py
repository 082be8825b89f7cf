"""A byte of published weights flips while a trial runs: the servers refuse them, the trainer publishes them again."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import DEADLINE_S, Trial

_TOLD_WITHIN_S = 15.0


@pytest.mark.slow  # test_republication.py goes from the complaint to the version that is published again
def test_a_trial_goes_on_past_a_flipped_byte_in_what_it_has_published(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(
        num_rows=96,
        pause_s=0.05,
        runs_on=True,
        overrides={"evaluation.every": "1000 steps", "weights.transport": "disk", "control.commit_every": "1 step"},
    )
    trial.wait_for_steps(2)
    damaged = flip_until_refused(trial)
    trial.wait_for_steps(2)
    trial.kill("master_worker/0")
    trial.full_speed()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
    told = [event for event in trial.events("train_notice") if event["topic"] == "published weights"]
    assert [event["is_alarm"] for event in told] == [True, False]
    assert told[0]["details"] == f"in {damaged}" and "model.safetensors: expected BLAKE3" in told[0]["causes"][0]
    assert [event["step"] for event in trial.events("fell_back")] == []
    assert "holds version" in trial.directory.worker_log(0, "generation_server", 0).read_text()


def flip_until_refused(trial: Trial) -> Path:
    """The directory of a version whose file was flipped after the trainer hashed it, and before a server read it.

    A server may have been quicker: then the next version is tried.
    """
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        directory = flip_next_version(trial)
        until = time.monotonic() + _TOLD_WITHIN_S
        while time.monotonic() < until:
            if trial.events("train_notice", topic="published weights"):
                return directory
            if directory.name < max(path.name for path in trial.directory.weights_path.glob("v*")):
                break
            time.sleep(0.05)
    raise AssertionError(f"no flipped version was refused\n{trial.tails()}")


def flip_next_version(trial: Trial) -> Path:
    before = {path.name for path in trial.directory.weights_path.iterdir()}
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for file in trial.directory.weights_path.glob("v*/model.safetensors"):
            if file.parent.name not in before:
                with open(file, "r+b") as opened:
                    opened.seek(-100, 2)
                    (byte,) = opened.read(1)
                    opened.seek(-100, 2)
                    opened.write(bytes([byte ^ 1]))
                return file.parent
        time.sleep(0.0005)
    raise AssertionError(f"no version was written within {DEADLINE_S:.0f} s\n{trial.tails()}")
