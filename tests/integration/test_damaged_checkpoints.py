"""Checkpoints and ledger files that were damaged on disk: the trial goes back as far as it must, and loses nothing."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.evidence import (
    History,
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import Trial


@pytest.mark.slow  # test_committed_ledger.py and test_log.py fall back; `make damage` has whole trials do it
def test_a_trial_falls_back_past_a_damaged_checkpoint_and_goes_on(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(num_rows=64, pause_s=0.1, overrides={"evaluation.every": "1000 steps"})

    # While it runs: only the master is started again, so everyone else has seen the commit that is rejected.
    trial.wait_for_steps(3)
    master = trial.pid("master_worker/0")
    os.kill(master, signal.SIGSTOP)
    damage_newest_state(trial)
    trial.kill("master_worker/0")
    trial.wait_for_steps(2)

    # From the start: nobody knows anything but what is on disk. The delta is only what followers read first.
    trial.close()
    trial.wait_for(lambda: not trial.processes(), "its last process to go")
    damage_newest_state(trial)
    delta = newest_delta(trial)
    content = delta.read_bytes()
    flip(delta)
    trial.full_speed()
    trial.run_resume()
    trial.wait_for_end()

    delta.write_bytes(content)  # the witnesses below add up the deltas
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
    fallbacks = [entry for entry in History.of(trial).entries.values() if entry["kind"] == "fallback"]
    assert [entry["epoch"] for entry in fallbacks] == [2, 3]
    living = {f"v{commit['step']:08d}-e{commit['epoch']}" for commit in History.of(trial).lineage()}
    assert {path.name for path in trial.directory.weights_path.iterdir()} <= living
    assert all("train_state-00000-of-00001.safetensors: expected BLAKE3" in entry["reason"] for entry in fallbacks)


def damage_newest_state(trial: Trial) -> None:
    history = History.of(trial)
    directory = trial.directory.path / history.entries[history.last_commit()]["directory"]
    (shard,) = directory.glob("state/actor/train_state-*.safetensors")
    flip(shard)


def newest_delta(trial: Trial) -> Path:
    """The ledger delta of the commit before the last one, which is damaged otherwise."""
    return trial.directory.path / History.of(trial).lineage()[1]["ledger_file"]


def flip(path: Path) -> None:
    """Changes one byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
