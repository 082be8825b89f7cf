"""A GRPO trial on this machine, from rl-submit to its report: five kinds of real processes, and their own Redis."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.broken_agents import reads_a_field_that_no_row_has
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_generator_and_trainer_agreed,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import WORKERS, Trial

TORCH_FREE = ("master_worker/0", "gserver_manager/0", "rollout_worker/0")


@pytest.mark.parametrize(
    ("eta", "commit_every_steps", "transport", "shared_prompts"),
    [(1, 1, "shared_memory", "off"), pytest.param(0, 3, "broadcast", "auto", marks=pytest.mark.slow)],
)
def test_a_trial_trains_every_prompt_once_and_within_the_staleness_bound(
    start_trial: Callable[..., Trial], eta: int, commit_every_steps: int, transport: str, shared_prompts: str
) -> None:
    trial = start_trial(
        num_rows=44,  # no multiple of the batch: the last one is smaller
        num_passes=2,
        pause_s=0.1,
        overrides={
            "rollout.max_head_offpolicyness": eta,
            "control.commit_every_steps": commit_every_steps,
            "evaluation.every_steps": 5,
            "weights.transport": transport,
            "actor.shared_prompts": shared_prompts,
        },
    )
    trial.wait_for_steps(1)
    rows = trial.wait_until_running()
    assert set(rows) == set(WORKERS)
    for worker, row in rows.items():
        assert (row["state"], row["restarts"], row["node"]) == ("UP", 0, socket.gethostname()), row
        assert row["pid"] == trial.pid(worker) and row["phase"], row
    holders = set(WORKERS) - {"rollout_worker/0"}  # it holds no weights
    assert {worker for worker in WORKERS if rows[worker]["version"].rpartition(".")[2].isdigit()} == holders
    assert [worker for worker in WORKERS if not _maps_torch(trial.pid(worker))] == sorted(TORCH_FREE, key=WORKERS.index)
    trial.wait_for(
        lambda: _last_update(trial).get("bytes_read", 0) > 0, "a server to say what its new weights have cost"
    )
    assert _last_update(trial)["staged_s"] > 0.0 and _last_update(trial)["stopped_s"] > 0.0
    trial.full_speed()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert check_no_token_was_too_old(trial, eta=eta) == eta  # the bound is met, and made use of
    assert trial.train_steps() == list(range(1, 12))
    compared = check_generator_and_trainer_agreed(trial)
    trained = sum(line.get("train/tokens", 0.0) for line in trial.metrics())
    assert compared == trained if eta == 0 else 0 < compared < trained
    assert "found      generator and trainer agree at version 0" in trial.run("rl-status")
    evaluated = [line["step"] for line in trial.metrics() if "eval/accuracy" in line]
    assert evaluated == [0, 5, 10, 11]
    assert "eval/accuracy" in trial.metrics()[0]
    assert ("answers of one prompt share it" in trial.logs("model_worker/0")) == (shared_prompts == "auto")
    assert [event["returncode"] for event in trial.events("worker_exited")] == [0] * len(WORKERS)
    assert (trial.directory.exports_path / "final" / "model.safetensors").exists()


def test_an_agent_that_always_fails_ends_the_trial_and_its_line_is_named(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(
        num_rows=64,
        overrides={
            "rollout.agent": "broken_agents:reads_a_field_that_no_row_has",
            "rollout.reward_retries": 0,
        },
    )
    trial.wait_for_end("FAILED")
    line = reads_a_field_that_no_row_has.__code__.co_firstlineno + 2
    cause = f"KeyError: 'solution' (broken_agents.py:{line})"
    shown = trial.logs("--errors")
    assert "first failure: rollout_worker/0" in shown and cause in shown
    assert cause in trial.run("rl-status") and cause in trial.run("rl-status", "--explain")
    assert len(trial.events("worker_exited", worker="rollout_worker/0")) == 1, "no restart was spent on it"


def _last_update(trial: Trial) -> dict[str, Any]:
    return trial.workers()["generation_server/0"]["weight_update"] or {}


def _maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
