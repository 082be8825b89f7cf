"""The arithmetic GRPO recipe with a real server of SGLang, whose scheduler is killed in the middle."""

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from corral.experiments.trial.secrets import TrialSecrets
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_generator_and_trainer_agreed,
    check_no_token_was_too_old,
    check_nothing_is_left,
    find_secrets,
)
from tests.integration.trial_helpers import WORKERS, Trial

_START_S = 240.0  # SGLang's own start is 20 s of computing, beside the trial's


def schedulers(trial: Trial) -> list[int]:
    """Processes of SGLang that hold a model; by their names, as they write these over their environments."""
    worker = psutil.Process(trial.pid("generation_server/0"))
    return [child.pid for child in worker.children(recursive=True) if "scheduler" in child.name()]


def test_a_trial_goes_on_after_the_scheduler_of_sglang_was_killed(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(
        num_rows=48,
        pause_s=0.1,
        overrides={"allocation": "sglang:d1+fsdp:d1", "evaluation.every_steps": 1000, "sglang.probe_timeout_s": 20},
    )
    secrets = [secret.reveal() for secret in TrialSecrets.load(trial.directory.secrets_path).values()]
    trial.wait_for_steps(1, timeout_s=_START_S)
    [scheduler] = schedulers(trial)
    os.kill(scheduler, signal.SIGKILL)
    trial.wait_for(lambda: schedulers(trial) not in ([], [scheduler]), "SGLang to be started again", timeout_s=_START_S)
    trial.wait_for_steps(1, timeout_s=_START_S)
    rows = trial.wait_until_running()
    assert {worker: row["restarts"] for worker, row in rows.items()} == dict.fromkeys(WORKERS, 0)
    assert find_secrets(trial.directory, secrets) == {"secrets/secrets.json"}
    trial.full_speed()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
    assert trial.train_steps() == list(range(1, 7))
    check_generator_and_trainer_agreed(trial)
    log = trial.directory.worker_log(0, "sglang", 0).read_text()
    assert log.count("The server is fired up and ready to roll!") == 2


@pytest.mark.slow
def test_a_server_of_two_processes_answers_for_a_whole_trial(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(num_rows=32, overrides={"allocation": "sglang:d1t2+fsdp:d1", "evaluation.every_steps": 1000})
    trial.wait_for_steps(1, timeout_s=_START_S)
    assert len(schedulers(trial)) == 2
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
