"""Held-out problems: every end of answer ends one, and a reward that fails is counted instead of failing the rank."""

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from corral.experiments.config.data import DatasetConfig, EvaluationConfig, EvaluationSampling
from corral.experiments.config.rollout import RewardConfig, reward_parts
from corral.experiments.prompts.tokens import eos_token_ids, load_tokenizer
from corral.workers.data.arithmetic import make_problems, write_model
from corral.workers.data.held_out import means
from corral.workers.engine.engine import load_model
from corral.workers.evaluation.held_out import HeldOutProblems
from corral.workers.rewards.contract import Problem
from corral.workers.rollout.judging import RewardJudge

NEVER = threading.Event()


def misbehaves(problem: Problem, answer: str) -> float:
    """Raises for every fourth problem, hangs for every fourth, is not a number for every fourth."""
    number = int(problem["number"])
    if number % 4 == 1:
        raise ValueError("no such problem")
    if number % 4 == 2:
        NEVER.wait()
    return math.nan if number % 4 == 3 else 0.5 if number % 8 == 0 else 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, seed=1, hidden_size=32, num_layers=1)
    return directory


def evaluation(folder: Path, *, count: int = 8, max_prompt_tokens: int = 16) -> EvaluationConfig:
    rows = [{**row, "number": number} for number, row in enumerate(make_problems(seed=1)[:count])]
    path = folder / "held_out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvaluationConfig(
        dataset=DatasetConfig(path=path, max_prompt_tokens=max_prompt_tokens),
        sampling=EvaluationSampling(max_new_tokens=8),
    )


def put(config: EvaluationConfig, model: Path, *, reward: RewardConfig | None = None) -> HeldOutProblems:
    tokenizer = load_tokenizer(model)
    judge = RewardJudge(reward or RewardConfig(), tokenizer, stop_token_ids=eos_token_ids(model), hidden=())
    return HeldOutProblems(config, model, judge)


def load(model: Path) -> Any:
    return load_model(model, dtype=torch.float32, device="cpu")[0]


def test_a_reward_that_fails_on_a_held_out_answer_is_counted_and_left_out(tmp_path: Path, model: Path) -> None:
    reward = RewardConfig(reward=reward_parts(f"{__name__}:misbehaves"), reward_timeout_s=1.0, reward_retries=0)
    sums, failure = put(evaluation(tmp_path), model, reward=reward).put_to(load(model), batch_size=2)
    assert failure.startswith("reward_error: the reward function misbehaves failed 1 times, last: ")
    assert "test_held_out.py:29" in failure and "ValueError: no such problem" in failure
    assert (sums["problems"], sums["unjudged"], sums["correct"], sums["reward"]) == (8.0, 6.0, 1.0, 1.5)
    found = means(sums)
    assert (found["accuracy"], found["reward/mean"], found["unjudged"]) == (0.5, 0.75, 6.0)


def test_every_declared_end_ends_a_held_out_answer(tmp_path: Path, model: Path) -> None:
    several = tmp_path / "several"
    several.mkdir()
    for path in model.iterdir():
        (several / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    problems = evaluation(tmp_path)
    module = load(model)
    before = put(problems, model).put_to(module, batch_size=64)[0]["tokens"]
    assert before == 8 * 8, "the untrained model ends no answer by itself"
    # Every digit is an end too, so that whatever the model says ends at once.
    for name in ("config.json", "generation_config.json"):
        (several / name).write_text(json.dumps({**config, "eos_token_id": [config["eos_token_id"], *range(2, 14)]}))
    assert put(problems, several).put_to(module, batch_size=64)[0]["tokens"] == 8


def test_a_held_out_prompt_that_is_too_long_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ValueError, match=r"prompt of .*held_out.jsonl:1 has 6 tokens, more than max_prompt_tokens 5"):
        put(evaluation(tmp_path, max_prompt_tokens=5), model)
