"""rl-stop half-way, and rl-submit --resume on other ranks: nothing is trained twice or left out.

On the same ranks it is in test_customized_trial.py, and a stop at once in test_security.py.
"""

from collections.abc import Callable

import pytest

from tests.integration.evidence import (
    History,
    check_every_sample_was_consumed_once,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import Trial


@pytest.mark.slow
def test_a_stopped_trial_goes_on_with_other_ranks_on_the_other_backend(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(
        num_rows=96,
        pause_s=0.1,
        overrides={"allocation": "hf:d1+fsdp:d2", "control.commit_every": "2 steps", "evaluation.every": "1000 steps"},
    )
    trial.wait_for_steps(3)
    assert "STOPPED" in trial.run("rl-stop")
    assert last_committed_step(trial) == trial.train_steps()[-1]
    trial.run_resume("-s", "allocation=hf:d2+megatron:t2p2")
    trial.wait_for_steps(1)
    kinds = [worker.partition("/")[0] for worker in trial.workers()]
    counts = {kind: kinds.count(kind) for kind in ("model_worker", "generation_server", "rollout_worker")}
    assert counts == {"model_worker": 4, "generation_server": 2, "rollout_worker": 1}
    trial.full_speed()
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert trial.train_steps() == list(range(1, 13))


def check_stopped(trial: Trial, *, by_epoch: int | None) -> None:
    history = History.of(trial)
    last = history.entries[max(history.entries)]
    assert (last["kind"], last["epoch"]) == ("stop", by_epoch), last
    assert trial.status()["state"] == "STOPPED"
    assert trial.processes() == []
    assert not trial.directory.secrets_path.exists()
    commit = history.entries[history.last_commit()]
    assert (trial.directory.path / commit["directory"] / "weights" / "model.safetensors").exists()


def last_committed_step(trial: Trial) -> int:
    history = History.of(trial)
    return int(history.entries[history.last_commit()]["step"])
