"""Real SGLang in a whole trial whose loads of new weights fail once, fail for good on one server, and never end."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.config.rollout import SglangConfig
from corral.experiments.inputs.other_pythons import sglang_python
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.master.weights import weights_name
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import Material, Trial, looking, read_lines
from tests.workers.engine.tiny_models import load_reference, reference_logprobs

START_S = 300.0  # two starts of SGLang, side by side
TOLERANCE = 1e-4  # nats in float32; what is seen is 3e-6


def unruly_sglang(folder: Path) -> Path:
    """The Python that has SGLang, with unruly_sglang/ on its path."""
    python = folder / "python"
    path = Path(__file__).parent / "unruly_sglang"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{path}:$PYTHONPATH" exec "{sglang_python(SglangConfig())}" "$@"\n')
    python.chmod(0o755)
    return python


def keep_weights(trial: Trial, folder: Path) -> None:
    """Every version's files stay in a folder of its name, though the trial removes them."""
    for file in trial.directory.weights_path.glob("v*/*"):
        kept = folder / file.parent.name / file.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError, FileNotFoundError):
            os.link(file, kept)


@pytest.mark.slow
def test_a_trial_goes_on_past_loads_that_fail_and_every_token_is_that_of_its_tag(
    start_trial: Callable[..., Trial], material: Material, tmp_path: Path
) -> None:
    loads, answers, weights = tmp_path / "loads", tmp_path / "answers", tmp_path / "weights"
    loads.mkdir()
    trial = start_trial(
        num_rows=240,
        pause_s=0.05,
        overrides={
            "allocation": "sglang:d2+fsdp:d1",
            "evaluation.every": "1000 steps",
            "supervision.setup_timeout_s": START_S,
            "sglang.python": unruly_sglang(tmp_path),
            "rollout.agent": "recording_agents:single_turn",
            "weights.update_timeout_s": 15,
            "rollout.sampling.max_new_tokens": 32,
        },
        environment={"CORRAL_TEST_LOADS": str(loads), "CORRAL_TEST_ANSWERS": str(answers)},
    )
    logs = [trial.directory.worker_log(0, "generation_server", server) for server in (0, 1)]

    def order(server: int, what: str) -> None:
        (loads / "new").write_text(what)
        (loads / "new").rename(loads / str(server))

    def count(server: int, words: str) -> int:
        return logs[server].read_text().count(words)

    def go_on_until(condition: Callable[[], object], what: str) -> None:
        """Step by step, while there are any."""
        trial.wait_for_steps(1, timeout_s=START_S)
        trial.wait_for(condition, what, timeout_s=START_S)

    with looking(lambda: keep_weights(trial, weights)):
        trial.wait_for_steps(1, timeout_s=START_S)
        trial.wait_for(lambda: all(count(server, "holds version") for server in (0, 1)), "both", timeout_s=START_S)

        for server in (0, 1):
            order(server, "once")
        go_on_until(lambda: all(count(server, "once more: ") for server in (0, 1)), "a load of each server to fail")

        order(1, "for good")
        go_on_until(lambda: count(1, "again, which it held: "), "a server to read what it held")
        held = count(1, "holds version")
        trial.wait_for_steps(2)  # by the other one
        assert count(1, "holds version") == held and count(1, "starts its server again") == 0
        (loads / "1").unlink()
        go_on_until(lambda: count(1, "holds version") > held, "the server to take over a version")

        for server in (0, 1):
            order(server, "never")
        trial.full_speed()
        trial.wait_for(lambda: not any(loads.iterdir()), "a load of each server to hang", timeout_s=START_S)
        waits = trial.wait_for(lambda: reasons(trial, "no generation server is ready at version"), "the reason")
        assert all("generation_server" in str(chain) for chain in waits)
        note = trial.wait_for(
            lambda: "SGLang" in (said := trial.status()["note"]) and said, "rl-status to say what it ended of"
        )
        assert "cannot go on: which weights it holds is unknown after an update" in note and "within 15 s" in note
        trial.wait_for_steps(1, timeout_s=START_S)
        trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
    assert check_tokens(read_lines(answers), weights, material) > 3000


def reasons(trial: Trial, words: str) -> list[Any]:
    return [chain for chain in trial.status()["waits"] if words in str(chain)]


def check_tokens(answers: list[dict[str, Any]], weights: Path, material: Material) -> int:
    """How many there are; each was made by the weights of its tag, computed again."""
    models: dict[str, Any] = {}
    num_tokens = 0
    for answer in answers:
        for tag, start, end in answer["spans"]:
            version = PolicyVersion.parse(tag)
            if tag not in models:
                models[tag] = load_reference(weights / weights_name(version) if version.step else material.model)
            again = reference_logprobs(models[tag], answer["prompt_ids"], answer["output_ids"])[start:end]
            assert answer["logprobs"][start:end] == pytest.approx(again.tolist(), abs=TOLERANCE), tag
            num_tokens += end - start
    assert len(models) > 10
    return num_tokens
