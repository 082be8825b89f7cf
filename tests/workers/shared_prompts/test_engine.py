"""An engine that computes prompts once says and learns what one says and learns that computes them for each answer."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corral.experiments.config.algorithm import CriticConfig, DPOConfig, PPOConfig
from corral.experiments.config.model import LoraConfig
from corral.scheduling.keys import routed_experts_key
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from corral.workers.algorithms.ppo_critic import PPOCriticInterface
from corral.workers.algorithms.preferences import DPOInterface
from corral.workers.algorithms.sft import SFTInterface
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.replay_scene import EXPERT_LAYERS, NUM_EXPERTS, TOP_K, save_tiny_mixture
from tests.workers.backends.training_helpers import VOCAB_SIZE, save_tiny_model, score_loss, value_loss
from tests.workers.shared_prompts.scene import (
    NUM_STEPS,
    counted_tokens,
    grouped_batch,
    make_engine,
    shares,
    train_actor,
    weights_of,
)

LORA = LoraConfig(rank=4, alpha=8)

Stats = list[dict[str, float]]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def both(directory: Path, **settings: Any) -> list[FSDPEngine]:
    """One with each answer's prompt to itself, and one with shared prompts."""
    return [make_engine(directory, shares_prompts=shares_prompts, **settings) for shares_prompts in (False, True)]


def assert_same_numbers(found: Stats, expected: Stats, *, tolerance: float = 1e-5) -> None:
    for of_found, of_expected in zip(found, expected, strict=True):
        assert of_found == pytest.approx(of_expected, rel=tolerance, abs=tolerance)


def assert_same_model(found: FSDPEngine, expected: FSDPEngine, sample: SequenceSample, *, tolerance: float) -> None:
    wanted = weights_of(expected)
    for name, tensor in weights_of(found).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0.0, atol=tolerance)
    said = expected.forward(sample)
    for name, values in found.forward(sample).items():
        np.testing.assert_allclose(values, said[name], rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("config", [PPOConfig(), PPOConfig(n_minibatches=2)], ids=["one update", "two updates"])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_train_step_computes_a_prompt_once_for_its_answers_in_a_mini_batch(
    role: str, config: PPOConfig, model_directory: Path
) -> None:
    engines = both(model_directory, head="lm" if role == "actor" else "value", max_tokens=None)
    interface = PPOActorInterface(config) if role == "actor" else PPOCriticInterface(config, CriticConfig())
    # Eight answers of one prompt: 50 tokens of it, 10 of each answer.
    sample = grouped_batch(0, prompts=[50], answers=[[10] * 8])
    sample = sample.with_key("values", np.full(8 * 60, 0.1, np.float32))
    found, stats, counts = [], [], []
    for engine in engines:
        with counted_tokens(engine) as tokens:
            stats.append([interface.train_step(engine, sample, version=0)])
        counts.append(sum(tokens))
        found.append(weights_of(engine))
        interface = PPOActorInterface(config) if role == "actor" else PPOCriticInterface(config, CriticConfig())
    few = 2 if config.n_minibatches == 1 else 1  # answers of the first mini-batch that are scored after the updates
    again = (few * 60, 50 + few * 10) if role == "actor" else (0, 0)
    assert counts == [8 * 60 + again[0], config.n_minibatches * 50 + 8 * 10 + again[1]]
    assert_same_numbers(stats[1], stats[0])
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "num_steps"),
    [
        ({}, NUM_STEPS),
        ({"recompute": "selective"}, 1),
        ({"recompute": "full", "max_tokens": None}, 2),
        ({"lora": LORA, "max_tokens": 48}, 2),
    ],
    ids=["plain", "selective", "full, one row", "adapters"],
)
def test_steps_with_shared_prompts_are_those_with_a_prompt_for_each_answer(
    settings: dict[str, Any], num_steps: int, model_directory: Path
) -> None:
    each, once = both(model_directory, **settings)
    before = weights_of(once)
    assert [shares(engine, grouped_batch(0)) for engine in (each, once)] == [False, True]
    assert_same_numbers(train_actor(once, num_steps=num_steps), train_actor(each, num_steps=num_steps))
    assert_same_model(once, each, grouped_batch(9), tolerance=1e-5)
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights_of(once).items())


def test_a_branch_has_once_what_its_episode_made_before_and_trains_it_once(model_directory: Path) -> None:
    """Each prompt has two episodes; of the first, a second sequence begins with all of the first, as given."""
    rng, groups = np.random.default_rng(0), []
    for number in range(3):
        first, other = rng.integers(0, VOCAB_SIZE, 12), rng.integers(0, VOCAB_SIZE, 9)
        other[:6] = first[:6]
        ids = [first, np.concatenate([first, rng.integers(0, VOCAB_SIZE, 5)]), other]
        made = [np.arange(len(one)) >= start for one, start in zip(ids, (6, 14, 6), strict=True)]
        groups.append(
            SequenceSample.from_group(
                f"0:{number}",
                {
                    "input_ids": ids,
                    "prompt_mask": [~one for one in made],
                    "old_logprobs": [np.where(one, -4.0, 0.0)[1:] for one in made],
                    "rewards": [1.0, 1.0, 0.0],
                    "episodes": [0, 0, 1],
                    "turn_rewards": [np.zeros(len(one) - 1) for one in ids],
                },
            )
        )
    sample = SequenceSample.gather(groups)
    config = PPOConfig(use_decoupled_loss=False, loss_reduction="answer_mean")
    each, once = both(model_directory, max_tokens=36)
    assert [shares(engine, sample) for engine in (each, once)] == [False, True]
    stats = [[PPOActorInterface(config).train_step(engine, sample, version=0)] for engine in (once, each)]
    assert_same_numbers(*stats)
    assert stats[0][0]["train/tokens"] == 3 * (6 + 3 + 3)
    assert_same_model(once, each, sample, tolerance=1e-5)


def test_in_bfloat16_the_difference_is_that_of_its_rounding(model_directory: Path) -> None:
    each, once = both(model_directory, compute_dtype=torch.bfloat16)
    exact = make_engine(model_directory, shares_prompts=False)
    wanted, *found = (engine.forward(grouped_batch(0))["logprobs"] for engine in (exact, each, once))
    of_each, of_once = (float(np.abs(logprobs - wanted).max()) for logprobs in found)
    assert 0.0 < of_once < 2 * of_each
    assert_same_numbers(train_actor(once, num_steps=1), train_actor(each, num_steps=1), tolerance=0.05)


@pytest.mark.parametrize(
    ("head", "loss", "counted"), [("value", value_loss, "prompt_mask"), ("scalar", score_loss, "seq_no_eos_mask")]
)
def test_values_of_tokens_and_scores_of_answers_are_those_of_each_answer(
    head: str, loss: Any, counted: str, model_directory: Path
) -> None:
    each, once = both(model_directory, head=head)
    stats = [
        [engine.train_batch(grouped_batch(step), loss_fn=loss, counted=counted) for step in range(2)]
        for engine in (once, each)
    ]
    assert shares(once, grouped_batch(0))
    assert_same_numbers(*stats)
    assert_same_model(once, each, grouped_batch(9), tolerance=1e-5)


def test_pairs_of_answers_are_compared_as_ever(model_directory: Path) -> None:
    def pairs(step: int) -> SequenceSample:
        sample = grouped_batch(step, prompts=[9, 14], answers=[[3, 8], [7, 5]])
        logprobs = np.full(sum(sample.answer_lengths()) - 4, -4.0, np.float32)
        return SequenceSample(sample.uids, sample.seqlens, sample.data | {"ref_logprobs": logprobs}, sample.specs)

    each, once = both(model_directory)
    interface = DPOInterface(DPOConfig())
    stats = [[interface.train_step(engine, pairs(step), version=step) for step in range(2)] for engine in (once, each)]
    assert shares(once, pairs(0))
    assert_same_numbers(*stats)


def routed_batch(step: int) -> SequenceSample:
    """Prompts that the same experts computed in some answers, and others in the rest."""
    sample = grouped_batch(step)
    rng = np.random.default_rng([step, 5])
    lengths = sample.answer_lengths()
    told = rng.permuted(np.tile(np.arange(NUM_EXPERTS), (sum(lengths), len(EXPERT_LAYERS), 1)), axis=2)[..., :TOP_K]
    rows = np.split(told, np.cumsum(lengths)[:-1])
    rows[1][:9] = rows[2][:9] = rows[3][:9] = rows[0][:9]
    rows[4][:4] = rows[0][:4]
    rows[5][:] = -1
    key = routed_experts_key(num_layers=len(EXPERT_LAYERS), top_k=TOP_K)
    return sample.with_key(key, np.concatenate(rows).astype(np.int16).reshape(-1))


def test_experts_that_are_told_are_chosen_for_prompts_that_are_shared(tmp_path: Path) -> None:
    each, once = both(save_tiny_mixture(tmp_path / "mixture"))
    interface = SFTInterface()
    stats = [
        [interface.train_step(engine, routed_batch(step), version=step) for step in range(2)] for engine in (once, each)
    ]
    assert shares(once, routed_batch(0))
    assert_same_numbers(*stats)
    assert_same_model(once, each, routed_batch(9), tolerance=1e-5)


@pytest.mark.parametrize(
    ("overrides", "lora", "reason"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, None, "its layers see 8 tokens"),
        ({"attention_dropout": 0.1}, None, "it has dropout"),
        ({}, LoraConfig(rank=4, alpha=8, dropout=0.1), "it has dropout"),
    ],
    ids=["window", "dropout", "dropout of adapters"],
)
def test_a_model_that_cannot_share_prompts_goes_without_and_says_so_once(
    overrides: dict[str, Any], lora: LoraConfig | None, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(save_tiny_model(tmp_path, **overrides), shares_prompts=True, lora=lora)
    with caplog.at_level(logging.INFO):
        assert not shares(engine, grouped_batch(0))
        assert not shares(engine, grouped_batch(1))
    assert [reason in record.message for record in caplog.records if "may share" in record.message] == [True]
