"""What the PPO actor makes of a batch: advantages, masks, statistics, and weights that move the right way."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corral.experiments.config.algorithm import KLConfig, PPOConfig
from corral.experiments.config.presets import PRESETS, fill_in
from corral.experiments.config.rollout import SamplingConfig
from corral.experiments.worker_specs import BehaviourSpec
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.advantage import advantage_named
from corral.workers.algorithms.base import compute_logprobs, deal_mini_batches, response_mask
from corral.workers.algorithms.ppo_actor import PPOActorInterface, batch_stats
from corral.workers.algorithms.ppo_batch import prepare_actor_sample, shape_rewards
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.algorithms.small_engine import SmallEngine
from tests.workers.backends.training_helpers import make_sample, save_tiny_model, tiny_engine
from tests.workers.some_samples import some_of

SAMPLED_AT_08 = BehaviourSpec(sampling=SamplingConfig(temperature=0.8))


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


make_engine = partial(tiny_engine, max_tokens=64)


def prepare(config: PPOConfig, sample: SequenceSample) -> SequenceSample:
    return prepare_actor_sample(
        config,
        sample,
        estimator=advantage_named(config.advantage),
        kl_coefficient=config.kl.coef,
        context=ParallelContext(),
    )


def test_the_response_mask_marks_predicted_response_tokens() -> None:
    sample = make_sample([[5, 3], [4]], prompt_length=2)
    # Answers of 5, 3 and 4 tokens with 2 prompt tokens: the first prediction of each is still prompt.
    assert response_mask(sample).tolist() == [False, True, True, True] + [False, True] + [False, True, True]
    assert response_mask(some_of(sample, [])).tolist() == []


def test_rewards_of_answers_that_were_cut_off_may_be_0() -> None:
    sample = make_sample([[3, 3, 3]])
    sample.data["rewards"] = np.array([1.0, -3.0, 9.0], np.float32)
    sample.data["seq_no_eos_mask"] = np.array([False, True, False])
    assert shape_rewards(PPOConfig(), sample).tolist() == [1.0, -3.0, 9.0]
    assert shape_rewards(PPOConfig(mask_no_eos_with_zero=True), sample).tolist() == [1.0, 0.0, 9.0]


def test_every_response_token_gets_its_answers_advantage_and_prompts_get_none() -> None:
    sample = make_sample([[4, 3], [3, 3]])
    sample.data["rewards"] = np.array([1.0, 0.0, 3.0, 1.0], np.float32)
    config = PPOConfig(group_std_normalization=False, use_decoupled_loss=False)
    prepared = prepare(config, sample)
    assert np.asarray(prepared.data["advantages"]).tolist() == [0, 0.5, 0.5] + [0, -0.5] + [0, 1.0] + [0, -1.0]
    assert "behaviour_weights" not in prepared.data


def test_tokens_above_the_cap_leave_the_loss_mask() -> None:
    sample = make_sample([[4, 4]])
    old = np.asarray(sample.data["proximal_logprobs"]).copy()
    old[2] -= 3.0  # e^3 times likelier now than when it was generated
    sample.data["old_logprobs"] = old
    prepared = prepare(PPOConfig(is_ratio_clip=5.0), sample)
    assert np.asarray(prepared.data["loss_mask"]).tolist() == [False, True, False, False, True, True]
    assert np.asarray(prepared.data["behaviour_weights"]).tolist() == [0, 1, 0, 0, 1, 1]
    stats = batch_stats(prepared, version=3, context=ParallelContext())
    assert stats["ppo/capped_fraction"] == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("loss", "mode", "reduction"),
    [
        ("ppo", "token_mask", "token_mean"),
        ("gspo", "token_mask", "answer_mean"),
        ("cispo", "token_mask", "fixed_divisor"),
        ("ppo", "token_truncate", "answer_mean"),
    ],
)
def test_one_update_learns_without_an_inference_call_what_it_learns_with_one(
    loss: str, mode: str, reduction: str, model_directory: Path
) -> None:
    config = PPOConfig.model_validate(
        {"loss": loss, "is_ratio_mode": mode, "is_ratio_clip": 1.3, "loss_reduction": reduction}
        | ({"loss_divisor": 20} if reduction == "fixed_divisor" else {})
    )
    learned = []
    for calls in (True, False):
        engine, actor = make_engine(model_directory), PPOActorInterface(config, behaviour=SAMPLED_AT_08)
        sample = make_sample([[8, 12, 9, 5], [6, 6, 10, 7]])
        sample.data["rewards"] = np.array([1, 0, 1, 0, 0, 0, 1, 1], np.float32)
        proximal = actor.inference(engine, sample)["logprobs"]
        drift = np.random.default_rng(0).normal(0.0, 0.3, len(proximal)).astype(np.float32)
        keys = [key for key in sample.seqlens if key != "proximal_logprobs"]
        sample = sample.select_keys(keys).with_key("old_logprobs", proximal + drift)
        stats = actor.train_step(engine, sample.with_key("proximal_logprobs", proximal) if calls else sample, version=0)
        learned.append((stats, {name: tensor.clone() for name, tensor in engine.export_weights()}))
    (with_call, weights), (without, own) = learned
    assert without == pytest.approx(with_call, rel=1e-6, abs=1e-6)
    assert (with_call["ppo/capped_fraction"] > 0.0) == (mode == "token_mask") and with_call["ppo/clip_fraction"] == 0.0
    for name, tensor in weights.items():
        torch.testing.assert_close(own[name], tensor, rtol=0.0, atol=1e-6)


def test_statistics_describe_the_global_batch() -> None:
    sample = make_sample([[4, 6]])
    sample.data["rewards"] = np.array([1.0, 0.0], np.float32)
    sample.data["seq_no_eos_mask"] = np.array([True, False])
    sample.data["versions"] = np.array([-1, 7, 7, -1, 6, 6, 5, 5], np.int32)
    prepared = prepare(PPOConfig(is_ratio_clip=None), sample)
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
        ({"use_decoupled_loss": True, "n_minibatches": 2}, "proximal_logprobs"),
        ({"kl": {"coef": 0.1}}, "ref_logprobs"),
        ({"mask_no_eos_with_zero": True}, "seq_no_eos_mask"),
        ({"advantage": "gae"}, "values"),
        ({"advantage": "gae"}, "seq_no_eos_mask"),
    ],
)
def test_a_setting_that_needs_a_key_declares_it(settings: dict[str, Any], key: str) -> None:
    def needed(config: PPOConfig) -> set[str]:
        return {declared.name for declared in PPOActorInterface(config).inputs[CallType.TRAIN_STEP]}

    assert key in needed(PPOConfig.model_validate(settings))
    assert key not in needed(PPOConfig(use_decoupled_loss=False))


def test_the_first_pass_over_fresh_answers_has_ratio_one(model_directory: Path) -> None:
    engine = make_engine(model_directory)
    actor = PPOActorInterface(PPOConfig(), behaviour=SAMPLED_AT_08)
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
        actor = PPOActorInterface(PPOConfig(kl=KLConfig(coef=kl_coef), use_decoupled_loss=False, eps_clip=10.0))
        sample = make_sample([[8, 12, 9, 5]])
        start = compute_logprobs(engine, sample)
        sample = sample.with_key("old_logprobs", start).with_key("ref_logprobs", start)
        sample.data["rewards"] = np.array([1, 0, 1, 0], np.float32)
        for version in range(8):
            stats = actor.train_step(engine, sample, version=version)
        return stats["ppo/ref_kl"]

    assert drift(10.0) < 0.2 * drift(1e-6)


def parts(config: PPOConfig, *, seed: int, version: int) -> list[list[int]]:
    """By their numbers of tokens, which differ."""
    sample = make_sample([[4, 5, 6, 7], [8, 9, 10, 11]])
    return [part.answer_lengths() for part in deal_mini_batches(config, sample, seed=(seed, version, 0))]


def test_mini_batches_are_drawn_from_seed_and_version_alone() -> None:
    config = PPOConfig(n_minibatches=3)
    assert parts(config, seed=1, version=5) == parts(config, seed=1, version=5)
    assert parts(config, seed=1, version=5) != parts(config, seed=1, version=6)


def test_every_pass_deals_all_answers_anew() -> None:
    dealt = parts(PPOConfig(n_minibatches=2, sample_reuse=3), seed=1, version=5)
    passes = [dealt[0:2], dealt[2:4], dealt[4:6]]
    assert all(sorted(one[0] + one[1]) == list(range(4, 12)) for one in passes)
    assert passes[0] != passes[1] != passes[2]


def on_policy(engine: SmallEngine, sample: SequenceSample) -> SequenceSample:
    """The sample as if the engine's present weights had generated it."""
    logprobs = compute_logprobs(engine, sample)
    return sample.with_key("old_logprobs", logprobs).with_key("proximal_logprobs", logprobs)


def test_reused_samples_are_trained_on_that_many_times() -> None:
    engine = SmallEngine("lm", lr=0.01)
    sample = on_policy(engine, make_sample([[8, 12, 9, 5]]))
    stats = PPOActorInterface(PPOConfig(sample_reuse=3, n_minibatches=2)).train_step(engine, sample, version=0)
    assert engine.step == 6 == PPOConfig(sample_reuse=3, n_minibatches=2).updates_per_step
    assert stats["train/tokens"] == 3 * response_mask(sample).sum()


def test_a_policy_that_has_moved_too_far_is_left_where_it_is() -> None:
    engine = SmallEngine("lm", lr=5.0)
    sample = on_policy(engine, make_sample([[8, 12, 9, 5]]))
    sample.data["rewards"] = np.array([1, 0, 1, 0], np.float32)
    config = PPOConfig.model_validate({"sample_reuse": 5, "eps_clip": 10.0, "early_stop_imp_ratio": 1.0001})
    stats = PPOActorInterface(config).train_step(engine, sample, version=0)
    assert engine.step == 1  # the first pass has ratio 1; the second finds the policy gone
    assert stats["train/skipped_early_stop"] == 4.0
    free = SmallEngine("lm", lr=5.0)
    PPOActorInterface(PPOConfig(sample_reuse=5, eps_clip=10.0, early_stop_imp_ratio=None)).train_step(
        free, sample, version=0
    )
    assert free.step == 5


@pytest.mark.parametrize("key", ["rewards", "old_logprobs", "proximal_logprobs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_trains_nothing(key: str, value: float) -> None:
    engine = SmallEngine("lm")
    sample = on_policy(engine, make_sample([[8, 12], [9, 5]]))
    sample.data[key] = np.array(sample.data[key])
    sample.data[key][-1] = value
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    stats = PPOActorInterface(PPOConfig(n_minibatches=2)).train_step(engine, sample, version=0)
    assert (engine.step, engine.num_nonfinite, stats["train/skipped_nonfinite"]) == (0, 2, 2.0)
    assert all(bool((before[name] == tensor).all()) for name, tensor in engine.model.state_dict().items())


def test_what_stands_on_prompt_tokens_stops_nothing() -> None:
    engine = SmallEngine("lm")
    sample = on_policy(engine, make_sample([[8, 12]], prompt_length=3))
    sample.data["old_logprobs"] = np.where(response_mask(sample), sample.data["old_logprobs"], np.float32(math.nan))
    PPOActorInterface(PPOConfig()).train_step(engine, sample, version=0)
    assert engine.step == 1


def test_the_kl_coefficient_is_adapted_once_per_step_and_goes_on_from_its_state() -> None:
    config = PPOConfig(kl=KLConfig(coef=0.1, target=1.0), n_minibatches=2, sample_reuse=2)
    engine, actor = SmallEngine("lm"), PPOActorInterface(config)
    sample = on_policy(engine, make_sample([[8, 12], [9, 5]]))
    responses = response_mask(sample)
    kl = float((sample.data["old_logprobs"] - sample.data["ref_logprobs"])[responses].sum()) / 4
    stats = actor.train_step(engine, sample, version=0)
    assert stats["ppo/kl_coef"] == 0.1
    assert stats["ppo/ref_kl_per_answer"] == pytest.approx(kl, rel=1e-5)
    expected = 0.1 * (1 + min(max(kl / 1.0 - 1, -0.2), 0.2) * 4 / 10_000)
    assert actor.state_dict()["kl_coefficient"] == pytest.approx(expected, rel=1e-6)
    resumed = PPOActorInterface(config)
    resumed.load_state_dict(actor.state_dict())
    assert resumed.train_step(engine, sample, version=1)["ppo/kl_coef"] == pytest.approx(expected, rel=1e-6)
    assert PPOActorInterface(PPOConfig(kl=KLConfig(coef=0.1))).state_dict() == {}
    with pytest.raises(ValueError, match="written without an adaptive coefficient"):
        PPOActorInterface(config).load_state_dict({})


def test_a_batch_that_is_not_finite_leaves_the_kl_coefficient_alone() -> None:
    actor, engine = PPOActorInterface(PPOConfig(kl=KLConfig(coef=0.1, target=1.0))), SmallEngine("lm")
    sample = on_policy(engine, make_sample([[8, 12]]))
    sample.data["rewards"] = np.array([math.nan, 1.0], np.float32)
    actor.train_step(engine, sample, version=0)
    assert actor.state_dict()["kl_coefficient"] == 0.1


# --- the algorithms that ship ---------------------------------------------------------------------------------------

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
