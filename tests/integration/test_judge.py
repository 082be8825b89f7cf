"""A whole trial whose answers a frozen model judges, on a generation server of its own."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from corral.experiments.prompts.tokens import encode_answer, load_tokenizer
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_generator_and_trainer_agreed,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import Material, Trial

JUDGE = """{
    digits: {function: "paced_rewards:digits"},
    good: {
        function: "corral.workers.rewards:Judge",
        settings: {url: trial, prompt: "{problem[prompt]}{answer}", verdict: '([0-9])', sampling: {max_tokens: 3}}
    }
}"""


def saying(text: str, model: Path, directory: Path) -> Path:
    """A model that says this again and again, whatever it is told."""
    shutil.copytree(model, directory)
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    (token,) = encode_answer(load_tokenizer(model), text)
    with torch.no_grad():
        for layer in judge.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for embedding in (judge.get_input_embeddings(), judge.get_output_embeddings()):
            embedding.weight.fill_(1.0)
            embedding.weight[token] = 2.0
    judge.save_pretrained(directory)
    return directory


def test_a_judge_of_the_trial_is_asked_by_its_rewards_and_comes_back_when_it_is_lost(
    start_trial: Callable[..., Trial], material: Material, tmp_path: Path
) -> None:
    trial = start_trial(
        num_rows=32,
        pause_s=0.1,
        overrides={
            "allocation": "hf:d2+fsdp:d1",
            "evaluation.every": "1000 steps",
            "rollout.judge.path": saying("7", material.model, tmp_path / "judge"),
            "rollout.reward": " ".join(JUDGE.split()),
        },
    )
    trial.wait_for_steps(1)
    trial.kill("generation_server/1")
    trial.full_speed()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_generator_and_trainer_agreed(trial)  # whose answers the judge has not made
    lines = [line for line in trial.metrics() if "ppo/loss" in line]
    assert len(lines) == 4
    for line in lines:
        assert line["reward/part/good"] == 7.0
        assert line["rewards/mean"] == pytest.approx(7.0 + line["reward/part/digits"], abs=1e-5)
    evaluated = [line["eval/reward/mean"] for line in trial.metrics() if "eval/reward/mean" in line]
    assert len(evaluated) == 2 and min(evaluated) >= 7.0
    lost, last = trial.events("task_ended", who="generation_server/1")
    assert (lost["code"], last["code"]) == (-9, 0)
    assert "own judge" in trial.run("rl-eval", "--local", exit_code=2)
