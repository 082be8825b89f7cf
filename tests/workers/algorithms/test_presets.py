"""Algorithms as a trial trains by them: the same update however the batch is cut, and one that learns."""

from typing import Any

import numpy as np
import pytest

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.config.presets import PRESETS, fill_in
from corral.workers.algorithms.base import compute_logprobs, response_mask
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.algorithms.small_engine import SmallEngine
from tests.workers.backends.training_helpers import make_sample

LENGTHS = [[6, 9, 12, 5], [7, 8, 6, 10], [11, 4, 9, 8]]
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name, preset in PRESETS.items() if preset.get("advantage") != "gae"},
    "of-whole-answers": {"is_ratio_mode": "sequence_truncate"},
    "geometric": {"is_ratio_mode": "geometric_mask", "is_ratio_clip": [0.9, 1.1]},
    "entropy": {"entropy_coef": 0.1},
    "overlong": {"overlong_buffer": 4},
}


def config_of(settings: dict[str, Any]) -> PPOConfig:
    return PPOConfig.model_validate({**settings, **fill_in(settings, max_new_tokens=8)[0]})


def judged(engine: SmallEngine) -> SequenceSample:
    """Answers of a policy that has moved since, half of them right, as a teacher finds, too."""
    sample, rng = make_sample(LENGTHS), np.random.default_rng(1)
    logprobs = compute_logprobs(engine, sample)  # type: ignore[arg-type]
    noise = np.float32(0.5) * rng.normal(size=len(logprobs)).astype(np.float32)
    sample = sample.with_key("old_logprobs", np.where(response_mask(sample), logprobs + noise, np.float32(0.0)))
    sample.data["rewards"] = np.array([1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 1], np.float32)
    lengths = [length - 1 for length in sample.answer_lengths()]
    liking = np.repeat(2 * sample.data["rewards"] - 1, lengths)
    return sample.with_key("teacher_logprobs", (sample.data["old_logprobs"] + liking).astype(np.float32))


def updated(settings: dict[str, Any], *, max_tokens: int) -> tuple[dict[str, float], list[float]]:
    """(statistics of one step, the weights after it)"""
    engine = SmallEngine("lm", lr=0.05, max_tokens=max_tokens)
    stats = PPOActorInterface(config_of(settings)).train_step(engine, judged(engine), version=0)  # type: ignore[arg-type]
    assert engine.step == 1
    return stats, [float(x) for parameter in engine.model.parameters() for x in parameter.flatten()]


@pytest.mark.parametrize("name", SETTINGS)
def test_an_update_is_the_same_whatever_the_micro_batches(name: str) -> None:
    stats, weights = updated(SETTINGS[name], max_tokens=1000)
    in_parts, weights_in_parts = updated(SETTINGS[name], max_tokens=16)
    assert stats["ppo/loss"] == pytest.approx(in_parts["ppo/loss"], abs=1e-6)
    np.testing.assert_allclose(weights, weights_in_parts, atol=1e-6)


def test_each_setting_changes_the_update() -> None:
    losses = {name: updated(SETTINGS[name], max_tokens=1000)[0]["ppo/loss"] for name in SETTINGS}
    usual = updated({}, max_tokens=1000)[0]["ppo/loss"]
    # With one update a step the clip of dapo cannot act, and no answer here is as long as to be punished or filtered.
    assert {name for name, loss in losses.items() if loss == pytest.approx(usual, abs=1e-9)} <= {"dapo"}


@pytest.mark.parametrize("name", SETTINGS)
def test_rewarded_answers_become_likelier(name: str) -> None:
    engine = SmallEngine("lm", lr=0.02)
    sample = judged(engine)
    before = compute_logprobs(engine, sample)  # type: ignore[arg-type]
    PPOActorInterface(config_of(SETTINGS[name])).train_step(engine, sample, version=0)  # type: ignore[arg-type]
    gains = compute_logprobs(engine, sample) - before  # type: ignore[arg-type]
    lengths = [length - 1 for length in sample.answer_lengths()]
    centred = np.repeat(sample.data["rewards"] - sample.data["rewards"].mean(), lengths)
    assert float((gains * centred).sum()) > 0.0
