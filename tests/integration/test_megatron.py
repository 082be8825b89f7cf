"""A GRPO trial whose policy is trained by megatron-core over tensor-parallel ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.test_lora import ALPHA, RANK, assert_is_base_and_adapter, read_adapter, write_adapter
from tests.integration.trial_helpers import Material, Trial


def test_a_trial_on_megatron_survives_the_kill_of_a_rank(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(
        num_rows=48,
        pause_s=0.1,
        overrides={
            "allocation": "hf:d1+megatron:t2",
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
    assert trial.train_steps() == list(range(1, 7))


@pytest.mark.slow
def test_adapters_are_trained_by_megatron_served_and_resumed_from(
    start_trial: Callable[..., Trial], material: Material, tmp_path: Path
) -> None:
    base = load_file(material.model / "model.safetensors")
    trial = start_trial(
        num_rows=40,
        pause_s=0.1,
        overrides={
            "allocation": "hf:d1+megatron:t2",
            "actor.lora": f"{{rank: {RANK}, alpha: {ALPHA}, adapter: {write_adapter(tmp_path / 'adapter', base)}}}",
            "actor.optimizer.lr": 1e-2,
            "weights.transport": "lora",
            "control.commit_every": "2 steps",
            "evaluation.every": "1000 steps",
        },
    )
    trial.wait_for_steps(3)
    trial.kill("model_worker/1")
    trial.full_speed()
    trial.wait_for_end()
    first = next(line for line in trial.metrics() if line["step"] == 1 and "gap/tokens" in line)
    assert first["gap/tokens"] > 0 and first["gap/max"] < 1e-3  # servers answer with base and adapter
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
    assert trial.train_steps() == [1, 2, 3, 4, 5]
    log = trial.directory.worker_log(0, "generation_server", 0).read_text()
    assert "files from the version before, 0 read whole" in log
    final = trial.directory.exports_path / "final"
    assert_is_base_and_adapter(final, base, read_adapter(final))
