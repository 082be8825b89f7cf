"""Reward models and DPO on pairs: losses of plain loops whatever the micro-batches, and preferences learned."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from corral.experiments.config.algorithm import DPOConfig
from corral.workers.algorithms.base import compute_logprobs, response_mask
from corral.workers.algorithms.preferences import (
    DPOInterface,
    PairedRewardInterface,
    RewardInterface,
    mark_pairs,
    num_right,
)
from corral.workers.algorithms.sft import SFTInterface
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
from tests.workers.algorithms.small_engine import SmallEngine
from tests.workers.backends.training_helpers import load_reference, make_sample, save_tiny_model, tiny_engine

LENGTHS = [[6, 9], [12, 5, 7, 8], [4, 11]]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def test_answers_are_chosen_and_rejected_in_turn() -> None:
    assert mark_pairs(make_sample(LENGTHS)).data["is_chosen"].tolist() == [True, False] * 4
    with pytest.raises(ValueError, match="'0:1' has 3 answers; pairs are"):
        mark_pairs(make_sample([[4, 4], [4, 4, 4]]))


@pytest.mark.parametrize("max_tokens", [32, 1000])
def test_a_reward_model_learns_which_answers_are_preferred(max_tokens: int) -> None:
    engine, paired = SmallEngine("scalar", max_tokens=max_tokens), PairedRewardInterface()
    sample = make_sample(LENGTHS)
    scores = RewardInterface().inference(engine, sample)["rewards"].tolist()
    margins = [scores[n] - scores[n + 1] for n in range(0, len(scores), 2)]
    expected = -math.fsum(map(log_sigmoid, margins)) / 4
    evaluation = paired.evaluate(engine, sample)
    assert evaluation == {
        "loss": pytest.approx(expected, abs=1e-6),
        "accuracy": sum(margin > 0 for margin in margins) / 4,
        "margin": pytest.approx(math.fsum(margins) / 4, abs=1e-6),
        "count": 4.0,
    }
    first = paired.train_step(engine, sample, version=0)
    assert first["reward_model/loss"] == pytest.approx(expected, abs=1e-6)
    assert first["reward_model/margin"] == pytest.approx(evaluation["margin"], abs=1e-6)
    assert first["reward_model/accuracy"] == evaluation["accuracy"]
    for version in range(1, 40):
        paired.train_step(engine, sample, version=version)
    assert paired.evaluate(engine, sample)["accuracy"] == 1.0


def test_pairs_that_nothing_sets_apart_are_half_right() -> None:
    assert num_right(torch.tensor([0.0, 0.0, 0.5, -1.0, 2.0])) == 3.0


def response_sums(sample: SequenceSample, logprobs: list[float]) -> list[float]:
    places = answer_slices([length - 1 for length in sample.answer_lengths()])
    mask = response_mask(sample)
    return [math.fsum(x for x, m in zip(logprobs[p], mask[p], strict=True) if m) for p in places]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("max_tokens", [32, 1000])
def test_dpo_starts_at_the_reference_and_raises_the_margin(label_smoothing: float, max_tokens: int) -> None:
    config = DPOConfig(beta=0.5, label_smoothing=label_smoothing)
    engine, dpo = SmallEngine("lm", max_tokens=max_tokens), DPOInterface(config)
    sample = make_sample(LENGTHS)
    sample = sample.with_key("ref_logprobs", dpo.inference(engine, sample)["logprobs"])
    first = dpo.train_step(engine, sample, version=0)
    assert first["dpo/loss"] == pytest.approx(math.log(2.0), abs=1e-5)
    assert first["dpo/margin"] == pytest.approx(0.0, abs=1e-5)

    policy = response_sums(sample, dpo.inference(engine, sample)["logprobs"].tolist())
    reference = response_sums(sample, sample.data["ref_logprobs"].tolist())
    gains = [0.5 * (p - r) for p, r in zip(policy, reference, strict=True)]
    margins = [gains[n] - gains[n + 1] for n in range(0, len(gains), 2)]
    losses = [-(1 - label_smoothing) * log_sigmoid(m) - label_smoothing * log_sigmoid(-m) for m in margins]
    evaluation = dpo.evaluate(engine, sample)
    assert evaluation["loss"] == pytest.approx(math.fsum(losses) / 4, abs=1e-5)
    assert evaluation["margin"] == pytest.approx(math.fsum(margins) / 4, abs=1e-5)
    assert evaluation["accuracy"] == sum(m > 0 for m in margins) / 4
    assert evaluation["margin"] > 0.0
    second = dpo.train_step(engine, sample, version=1)
    assert second["dpo/loss"] == pytest.approx(evaluation["loss"], abs=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reference_that_is_not_finite_trains_nothing(value: float) -> None:
    engine, dpo = SmallEngine("lm"), DPOInterface(DPOConfig())
    sample = make_sample([[6, 9], [7, 8]])
    sample.data["ref_logprobs"] = np.array(sample.data["ref_logprobs"])
    sample.data["ref_logprobs"][-1] = value
    stats = dpo.train_step(engine, sample, version=0)
    assert (engine.step, stats["train/skipped_nonfinite"]) == (0, 1.0)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def slow_pair(config: DPOConfig, chosen: list[float], rejected: list[float], point: float) -> float:
    """The loss of one pair from the log-ratios of its tokens (with simpo, their log-probabilities), by the papers."""
    gain = math.fsum(chosen) / len(chosen) - math.fsum(rejected) / len(rejected)
    if config.loss == "ipo":
        return (gain - 1.0 / (2.0 * config.beta)) ** 2
    if config.loss == "simpo":
        return -log_sigmoid(config.beta * gain - config.target_margin)
    better = 1.0 - sigmoid(config.beta * math.fsum(chosen) - point)
    worse = 1.0 - sigmoid(point - config.beta * math.fsum(rejected))
    return better + worse


@pytest.mark.parametrize("max_tokens", [32, 1000])
@pytest.mark.parametrize(
    "config",
    [
        DPOConfig(loss="ipo", beta=0.3),
        DPOConfig(loss="simpo", beta=2.0, target_margin=0.7),
        DPOConfig(loss="kto", beta=0.4),
    ],
    ids=lambda config: config.loss,
)
def test_losses_of_pairs_equal_the_slow_loop_whatever_the_micro_batches(config: DPOConfig, max_tokens: int) -> None:
    engine, dpo = SmallEngine("lm", max_tokens=max_tokens), DPOInterface(config)
    sample = make_sample(LENGTHS)
    policy, mask = compute_logprobs(engine, sample), response_mask(sample)  # type: ignore[arg-type]
    shift = np.linspace(-0.5, 0.1, len(policy), dtype=np.float32)  # most answers are likelier than to the reference
    ratios = policy if config.loss == "simpo" else -shift
    if config.loss != "simpo":
        sample = sample.with_key("ref_logprobs", np.where(mask, policy + shift, np.float32(0.0)))
    places = answer_slices([length - 1 for length in sample.answer_lengths()])
    answers = [[float(x) for x, m in zip(ratios[p], mask[p], strict=True) if m] for p in places]
    point = config.beta * max(0.0, math.fsum(map(math.fsum, answers)) / len(answers))
    pairs = zip(answers[::2], answers[1::2], strict=True)
    expected = math.fsum(slow_pair(config, *pair, point) for pair in pairs) / (len(answers) / 2)
    assert point > 0.0 or config.loss == "simpo"
    assert dpo.evaluate(engine, sample)["loss"] == pytest.approx(expected, abs=1e-5)
    stats = dpo.train_step(engine, sample, version=0)
    assert stats["dpo/loss"] == pytest.approx(expected, abs=1e-5)
    before = stats["dpo/margin"]
    for version in range(1, 5):
        stats = dpo.train_step(engine, sample, version=version)
    assert stats["dpo/margin"] > before
    assert stats["dpo/loss"] < expected


# --- supervised fine-tuning -----------------------------------------------------------------------------------------


def test_sft_learns_and_evaluates_the_loss_that_transformers_computes(tmp_path: Path) -> None:
    model_directory = save_tiny_model(tmp_path)
    engine = tiny_engine(model_directory, max_tokens=64)
    sft = SFTInterface()
    sample = make_sample([[9], [14], [6]], prompt_length=3)
    evaluation = sft.evaluate(engine, sample)
    assert evaluation["loss"] == pytest.approx(transformers_loss(model_directory, sample), abs=1e-5)
    assert evaluation["perplexity"] == pytest.approx(math.exp(evaluation["loss"]))
    assert evaluation["count"] == 6 + 11 + 3
    first = sft.train_step(engine, sample, version=0)["sft/loss"]
    assert first == pytest.approx(evaluation["loss"], abs=1e-5)
    for version in range(1, 6):
        last = sft.train_step(engine, sample, version=version)["sft/loss"]
    assert last < first - 0.1


def transformers_loss(directory: Path, sample: SequenceSample) -> float:
    """Mean cross entropy of the response tokens by transformers' own labels, one sequence at a time."""
    model, total, count = load_reference(directory), 0.0, 0
    for single in sample.unpack():
        ids = torch.as_tensor(np.asarray(single.data["input_ids"])).long()
        labels = ids.masked_fill(torch.as_tensor(np.asarray(single.data["prompt_mask"])), -100)
        with torch.no_grad():
            mean = float(model(input_ids=ids[None], labels=labels[None]).loss)
        num_tokens = int((labels[1:] != -100).sum())
        total, count = total + mean * num_tokens, count + num_tokens
    return total / count
