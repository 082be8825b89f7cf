"""GRPO of a tiny mixture: the experts that made each token travel with it to the trainer, which takes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from corral.workers.data.arithmetic import write_model
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_generator_and_trainer_agreed,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.test_synchronous_ppo import synchronous
from tests.integration.trial_helpers import Trial

_START_S = 480.0  # SGLang's own start is 20 s of computing, beside the trial's
SHARED_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


def write_mixture(directory: Path) -> None:
    """A Qwen3-MoE of four experts in each layer, of which a token takes two, and an untied output."""
    write_model(directory, seed=1, hidden_size=32, num_layers=2)
    dense = Qwen2Config.from_pretrained(directory).to_dict()
    shared = {name: dense[name] for name in SHARED_SETTINGS}
    config = Qwen3MoeConfig(
        **shared,
        tie_word_embeddings=False,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=44,
        norm_topk_prob=True,
    )
    torch.manual_seed(1)
    auto_class: Any = AutoModelForCausalLM  # transformers leaves these methods untyped
    auto_class.from_config(config).save_pretrained(directory, safe_serialization=True)


@pytest.mark.slow
@pytest.mark.parametrize("allocation", ["hf:d1+fsdp:d1", "sglang:d1+fsdp:d1", "hf:d1+megatron:d2e2"])
def test_a_mixture_is_trained_by_the_experts_that_made_its_answers(
    start_trial: Callable[..., Trial], tmp_path: Path, allocation: str
) -> None:
    write_mixture(tmp_path / "mixture")
    trial = start_trial(
        num_rows=32,
        overrides={
            "allocation": allocation,
            "actor.path": tmp_path / "mixture",
            "evaluation.every": "1000 steps",
        },
    )
    trial.wait_for_steps(1, timeout_s=_START_S)
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
    assert trial.train_steps() == [1, 2, 3, 4]
    assert [line["ppo/replayed_fraction"] for line in trial.metrics() if "ppo/loss" in line] == [1.0] * 4
    check_generator_and_trainer_agreed(trial, nats=0.05)  # an answer of two versions keeps the experts of both


@pytest.mark.slow
def test_a_mixture_that_generates_in_the_graph_replays_its_own_choice(
    start_trial: Callable[..., Trial], tmp_path: Path
) -> None:
    write_mixture(tmp_path / "mixture")
    overrides = {"actor.path": tmp_path / "mixture", "evaluation": "null"}
    trial = start_trial(num_rows=16, overrides=overrides, file=synchronous(tmp_path))
    trial.wait_for_end()
    check_nothing_is_left(trial)
    assert [line["ppo/replayed_fraction"] for line in trial.metrics() if "ppo/loss" in line] == [1.0] * 2
    check_generator_and_trainer_agreed(trial)
