"""What the PPO actor and SFT make of a batch: advantages, masks, statistics, and weights that move the right way."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corral.experiments.config.algorithm import PPOConfig
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.algorithms.base import compute_logprobs, response_mask
from corral.workers.algorithms.ppo import PPOActorInterface, batch_stats, prepare_actor_sample, shape_rewards
from corral.workers.algorithms.sft import SFTInterface
from corral.workers.backends.fsdp import FSDPEngine
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
from tests.workers.backends.training_helpers import load_reference, make_sample, optimizer_config, save_tiny_model


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def make_engine(directory: Path, **overrides: Any) -> FSDPEngine:
    return FSDPEngine(
        directory,
        context=ParallelContext(),
        optimizer=optimizer_config(**overrides),
        total_steps=100,
        micro_batches=MicroBatchSpec(max_tokens_per_micro_batch=64),
    )


def test_the_response_mask_marks_predicted_response_tokens() -> None:
    sample = make_sample([[5, 3], [4]], prompt_length=2)
    # Answers of 5, 3 and 4 tokens with 2 prompt tokens: the first prediction of each is still prompt.
    assert response_mask(sample).tolist() == [False, True, True, True] + [False, True] + [False, True, True]
    assert response_mask(sample.select([])).tolist() == []


def test_rewards_are_shifted_scaled_clipped_and_masked() -> None:
    sample = make_sample([[3, 3, 3]])
    sample.data["rewards"] = np.array([1.0, 0.0, 9.0], np.float32)
    sample.data["seq_no_eos_mask"] = np.array([False, True, False])
    config = PPOConfig(reward_bias=0.5, reward_scale=4.0, max_reward_clip=10.0)
    assert shape_rewards(config, sample).tolist() == [2.0, -2.0, 10.0]
    config = config.model_copy(update={"mask_no_eos_with_zero": True})
    assert shape_rewards(config, sample).tolist() == [2.0, 0.0, 10.0]


def test_every_response_token_gets_its_answers_advantage_and_prompts_get_none() -> None:
    sample = make_sample([[4, 3], [3, 3]])
    sample.data["rewards"] = np.array([1.0, 0.0, 3.0, 1.0], np.float32)
    config = PPOConfig(group_std_normalization=False, use_decoupled_loss=False)
    prepared = prepare_actor_sample(config, sample)
    assert np.asarray(prepared.data["advantages"]).tolist() == [0, 0.5, 0.5] + [0, -0.5] + [0, 1.0] + [0, -1.0]
    assert "behaviour_weights" not in prepared.data


def test_tokens_above_the_cap_leave_the_loss_mask() -> None:
    sample = make_sample([[4, 4]])
    old = np.asarray(sample.data["proximal_logprobs"]).copy()
    old[2] -= 3.0  # e^3 times likelier now than when it was generated
    sample.data["old_logprobs"] = old
    prepared = prepare_actor_sample(PPOConfig(behav_imp_weight_cap=5.0), sample)
    assert np.asarray(prepared.data["loss_mask"]).tolist() == [False, True, False, False, True, True]
    assert np.asarray(prepared.data["behaviour_weights"]).tolist() == [0, 1, 0, 0, 1, 1]
    stats = batch_stats(prepared, version=3, context=ParallelContext())
    assert stats["ppo/capped_fraction"] == pytest.approx(1 / 4)


def test_statistics_describe_the_global_batch() -> None:
    sample = make_sample([[4, 6]])
    sample.data["rewards"] = np.array([1.0, 0.0], np.float32)
    sample.data["seq_no_eos_mask"] = np.array([True, False])
    sample.data["versions"] = np.array([-1, 7, 7, -1, 6, 6, 5, 5], np.int32)
    prepared = prepare_actor_sample(PPOConfig(behav_imp_weight_cap=None), sample)
    assert batch_stats(prepared, version=7, context=ParallelContext()) == {
        "rewards/mean": 0.5,
        "rewards/std": 0.5,
        "response_length/mean": 3.0,
        "response_length/max": 4.0,
        "ppo/capped_fraction": 0.0,
        "ppo/num_answers": 2.0,
        "no_eos_fraction": 0.5,
        "staleness/mean": 1.0,
        "staleness/max": 2.0,
    }


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"use_decoupled_loss": True}, "proximal_logprobs"),
        ({"kl_coef": 0.1}, "ref_logprobs"),
        ({"mask_no_eos_with_zero": True}, "seq_no_eos_mask"),
    ],
)
def test_a_missing_key_is_named_with_the_setting_that_needs_it(settings: dict[str, Any], key: str) -> None:
    sample = make_sample([[4, 6]])
    without = sample.select_keys([name for name in sample.seqlens if name != key])
    with pytest.raises(ValueError, match=key):
        prepare_actor_sample(PPOConfig.model_validate(settings), without)


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_training_makes_rewarded_answers_likelier_and_others_less_so(is_decoupled: bool, model_directory: Path) -> None:
    engine = make_engine(model_directory)
    actor = PPOActorInterface(PPOConfig(use_decoupled_loss=is_decoupled, n_minibatches=2), temperature=0.8, seed=1)
    sample = make_sample([[8, 12, 9, 5], [6, 6, 10, 7]])
    sample.data["rewards"] = np.array([1, 0, 1, 0, 0, 0, 1, 1], np.float32)
    before = actor.inference(engine, sample)["logprobs"]
    sample = sample.with_key("old_logprobs", before).with_key("proximal_logprobs", before)
    for version in range(3):
        stats = actor.train_step(engine, sample, version=version)
    after = actor.inference(engine, sample)["logprobs"]
    slices = answer_slices(sample.answer_lengths("old_logprobs"))
    change = [float((after - before)[s].sum()) for s in slices]
    assert [c > 0 for c in change] == [r == 1 for r in np.asarray(sample.data["rewards"])]
    assert engine.step == 6
    assert {"ppo/loss", "ppo/approx_kl", "ppo/clip_fraction", "ppo/importance_weight", "ppo/entropy"} <= stats.keys()
    assert ("ppo/behav_weight" in stats) == is_decoupled


def test_the_first_pass_over_fresh_answers_has_ratio_one(model_directory: Path) -> None:
    engine = make_engine(model_directory)
    actor = PPOActorInterface(PPOConfig(), temperature=0.8)
    sample = make_sample([[8, 12, 9, 5]])
    logprobs = actor.inference(engine, sample)["logprobs"]
    sample = sample.with_key("old_logprobs", logprobs).with_key("proximal_logprobs", logprobs)
    stats = actor.train_step(engine, sample, version=0)
    assert stats["ppo/importance_weight"] == pytest.approx(1.0, abs=1e-5)
    assert stats["ppo/behav_weight"] == pytest.approx(1.0, abs=1e-5)
    assert stats["ppo/approx_kl"] == pytest.approx(0.0, abs=1e-5)
    assert stats["ppo/clip_fraction"] == 0.0


def test_a_kl_penalty_holds_the_policy_near_the_reference(model_directory: Path) -> None:
    def drift(kl_coef: float) -> float:
        engine = make_engine(model_directory)
        actor = PPOActorInterface(PPOConfig(kl_coef=kl_coef, use_decoupled_loss=False, eps_clip=10.0))
        sample = make_sample([[8, 12, 9, 5]])
        start = compute_logprobs(engine, sample)
        sample = sample.with_key("old_logprobs", start).with_key("ref_logprobs", start)
        sample.data["rewards"] = np.array([1, 0, 1, 0], np.float32)
        for version in range(8):
            stats = actor.train_step(engine, sample, version=version)
        return stats["ppo/ref_kl"]

    assert drift(10.0) < 0.2 * drift(1e-6)


def test_mini_batches_are_drawn_from_seed_and_version_alone() -> None:
    config = PPOConfig(n_minibatches=3)
    sample = prepare_actor_sample(config, make_sample([[4, 5, 6, 7], [8, 9, 10, 11]]))

    def parts(seed: int, version: int) -> list[list[str]]:
        actor = PPOActorInterface(config, seed=seed)
        return [part.uids for part in actor._mini_batches(sample, version=version, dp_rank=0)]

    assert parts(1, 5) == parts(1, 5)
    assert parts(1, 5) != parts(1, 6)
    assert sorted(uid for part in parts(1, 5) for uid in part) == sorted(sample.ungroup().uids)


def test_sft_learns_and_evaluates_the_loss_that_transformers_computes(model_directory: Path) -> None:
    engine, sft = make_engine(model_directory), SFTInterface()
    sample = make_sample([[9], [14], [6]], prompt_length=3)
    evaluation = sft.evaluate(engine, sample)
    assert evaluation["sft/eval_loss"] == pytest.approx(transformers_loss(model_directory, sample), abs=1e-5)
    assert evaluation["sft/eval_perplexity"] == pytest.approx(math.exp(evaluation["sft/eval_loss"]))
    first = sft.train_step(engine, sample, version=0)["sft/loss"]
    assert first == pytest.approx(evaluation["sft/eval_loss"], abs=1e-5)
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
