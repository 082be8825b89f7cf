"""Answers that were shown have no policy that generated them: their log-probability of 0 is compared with nothing.

The first answer of each group is a demonstration; the policy is the one that generated the others, exactly.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from corral.experiments.config.algorithm import DistillationConfig, KLConfig, PPOConfig
from corral.workers.algorithms.base import response_mask
from corral.workers.algorithms.ppo_actor import PPOActorInterface, batch_stats
from corral.workers.algorithms.ppo_batch import advantage_batch, measure_batch, teacher_advantages, weigh_behaviour
from corral.workers.backends.base import TokenScores
from corral.workers.backends.micro_batches import make_micro_batches
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.training_helpers import make_sample

LENGTHS = [[9, 7, 8, 6], [8, 8, 9, 7]]
ENTROPY = 1.5


class ScoresEngine:
    """Log-probabilities are parameters: one row with all answers, whose gradient is kept."""

    def __init__(self, logprobs: npt.NDArray[np.floating[Any]]) -> None:
        self.context, self.step = ParallelContext(), 0
        self.logprobs = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
        self.has_stepped = False

    @property
    def gradient(self) -> Tensor:
        assert self.logprobs.grad is not None
        return self.logprobs.grad

    def train_batch(self, sample: SequenceSample, *, loss_fn: Any, may_step: Any, **_: Any) -> dict[str, float]:
        answers = list(range(len(sample.answer_lengths())))
        (micro_batch,) = make_micro_batches(sample, [answers], count=1, device=torch.device("cpu"))
        output = loss_fn(TokenScores(self.logprobs, torch.full_like(self.logprobs, ENTROPY).detach()), micro_batch)
        of_loss, of_stats = output.denominators
        (output.loss_sum / of_loss).backward()
        means = {name: float(value) / float(of_stats) for name, value in output.stats.items()}
        self.has_stepped = may_step(means)
        return means | {"loss": float(output.loss_sum.detach() / of_loss)}

    def forward(self, sample: SequenceSample, **_: Any) -> Mapping[str, npt.NDArray[np.float32]]:
        raise AssertionError("nothing is scored again where no update was made")


def shown_first(sample: SequenceSample) -> tuple[SequenceSample, npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """(the sample whose first answers are demonstrations, the policy's log-probabilities, which tokens are shown)."""
    numbers = np.concatenate([np.arange(len(group)) for group in LENGTHS])
    of_answer = np.repeat(numbers == 0, [length - 1 for length in sample.answer_lengths()])
    is_shown = of_answer & response_mask(sample)
    policy = np.asarray(sample.data["old_logprobs"], np.float32)
    made = {
        "old_logprobs": np.where(is_shown, 0.0, policy),
        "versions": np.where(is_shown, -1, sample.data["versions"]),
    }
    made["rewards"] = np.where(numbers == 0, 1.0, sample.data["rewards"])
    for key, values in made.items():
        sample = sample.with_key(key, values.astype(sample.data[key].dtype))
    return sample.select_keys([key for key in sample.data if key != "proximal_logprobs"]), policy, is_shown


def train(**settings: Any) -> tuple[ScoresEngine, dict[str, float], npt.NDArray[np.bool_]]:
    sample, policy, is_shown = shown_first(make_sample(LENGTHS))
    engine = ScoresEngine(policy)
    stats = PPOActorInterface(PPOConfig(**settings)).train_step(engine, sample, version=3)  # type: ignore[arg-type]
    return engine, stats, is_shown


@pytest.mark.parametrize("algorithm", ["luffy", "sft_mix"])
def test_early_stops_and_their_statistics_are_of_generated_tokens(algorithm: str) -> None:
    engine, stats, _ = train(algorithm=algorithm, early_stop_imp_ratio=1.001)
    assert engine.has_stepped
    assert stats["ppo/approx_kl"] == 0.0 and stats["ppo/importance_weight"] == pytest.approx(1.0, abs=1e-6)
    assert stats["ppo/clip_fraction"] == stats["ppo/dual_clip_fraction"] == 0.0


def test_their_means_are_over_generated_tokens_alone() -> None:
    sample, policy, is_shown = shown_first(make_sample(LENGTHS))
    drift = np.random.default_rng(1).normal(size=len(policy)).astype(np.float32) * 0.2
    engine = ScoresEngine(policy + drift)
    settings = PPOConfig(algorithm="luffy", kl=KLConfig(coef=0.1))
    stats = PPOActorInterface(settings).train_step(engine, sample, version=3)  # type: ignore[arg-type]
    made = response_mask(sample) & ~is_shown
    assert stats["ppo/approx_kl"] == pytest.approx(-drift[made].mean(), abs=1e-6)
    assert stats["ppo/importance_weight"] == pytest.approx(np.exp(drift[made]).mean(), abs=1e-6)
    apart = sample.data["ref_logprobs"][made] - (policy + drift)[made]
    assert stats["ppo/ref_kl"] == pytest.approx((np.exp(apart) - 1 - apart).mean(), abs=1e-5)


def test_demonstrations_are_charged_no_divergence_and_move_no_coefficient() -> None:
    sample, policy, is_shown = shown_first(make_sample(LENGTHS))
    config = PPOConfig(algorithm="luffy", kl=KLConfig(coef=0.05, place="reward", target=6.0))
    rewards = advantage_batch(config, sample, kl_coefficient=0.05).token_rewards.numpy()
    apart = policy - sample.data["ref_logprobs"]
    assert rewards[is_shown].sum() == 2.0  # the rewards of the two, and nothing else
    made = response_mask(sample) & ~is_shown
    assert rewards[made].sum() == pytest.approx(sample.data["rewards"].sum() - 2.0 - 0.05 * apart[made].sum(), abs=1e-4)
    facts = measure_batch(sample, ParallelContext())
    assert facts.num_answers == 6.0
    assert facts.kl_per_answer == pytest.approx(apart[made].sum() / 6.0, abs=1e-5)


def test_a_sampled_teacher_says_nothing_of_demonstrations() -> None:
    sample, policy, is_shown = shown_first(make_sample(LENGTHS))
    sample = sample.with_key("teacher_logprobs", (policy - 1.0).astype(np.float32))
    config = PPOConfig(algorithm="luffy", distillation=DistillationConfig(coef=1.0))
    advantages = teacher_advantages(advantage_batch(config, sample, kl_coefficient=0.0)).numpy()
    made = response_mask(sample) & ~is_shown
    assert np.all(advantages[~made] == 0.0) and advantages[made] == pytest.approx(-1.0, abs=1e-6)
    engine = ScoresEngine(policy)
    stats = PPOActorInterface(config).train_step(engine, sample, version=3)  # type: ignore[arg-type]
    assert stats["ppo/teacher_kl"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("settings", [{"entropy_coef": 0.3}, {"kl": KLConfig(coef=0.3)}], ids=["entropy", "reference"])
def test_terms_that_are_estimated_from_draws_leave_demonstrations_alone(settings: dict[str, Any]) -> None:
    engine, _, is_shown = train(algorithm="luffy", **settings)
    plain, _, _ = train(algorithm="luffy")
    assert torch.equal(engine.gradient[is_shown], plain.gradient[is_shown])
    assert not torch.equal(engine.gradient, plain.gradient)


@pytest.mark.parametrize(
    "bounds",
    [
        {"is_ratio_clip": (0.5, 1.5)},
        {"is_ratio_clip": 2.0, "is_ratio_mode": "sequence_mask"},
    ],
    ids=["icepop", "mis"],
)
def test_bounds_on_the_weights_of_decoupled_ppo_leave_no_demonstration_out(bounds: dict[str, Any]) -> None:
    sample, policy, is_shown = shown_first(make_sample(LENGTHS))
    config = PPOConfig(**bounds)
    mask = torch.from_numpy(response_mask(sample))
    keys: dict[str, Tensor] = {key: torch.from_numpy(sample.data[key]) for key in ("old_logprobs", "versions")}
    keys["advantages"] = torch.full_like(keys["old_logprobs"], -1.0)
    lengths = [length - 1 for length in sample.answer_lengths()]
    weights, kept = weigh_behaviour(config, keys, torch.from_numpy(policy), mask, answer_lengths=lengths)
    assert torch.equal(kept, mask)
    assert weights[is_shown].tolist() == pytest.approx(np.exp(policy[is_shown]).tolist())
    assert weights[mask & ~torch.from_numpy(is_shown)].numpy() == pytest.approx(1.0)


def test_staleness_is_that_of_generated_tokens() -> None:
    sample, _, is_shown = shown_first(make_sample(LENGTHS))
    sample = sample.with_key("loss_mask", response_mask(sample))
    made = response_mask(sample) & ~is_shown
    stats = batch_stats(sample, version=3, context=ParallelContext())
    assert stats["staleness/mean"] == pytest.approx((3 - sample.data["versions"][made]).mean())


def test_self_imitation_by_its_name_is_the_documented_loss() -> None:
    """Beside a loop in float64: PPO's clip around the policy that generated, and better answers whatever the ratio."""
    sample = make_sample(LENGTHS)
    sample = sample.select_keys([key for key in sample.data if key != "proximal_logprobs"])
    old = sample.data["old_logprobs"].astype(np.float64)
    current = old + np.random.default_rng(2).normal(size=len(old)) * 1.0
    engine = ScoresEngine(current)
    settings = PPOConfig(algorithm="self_imitation", early_stop_imp_ratio=None)
    stats = PPOActorInterface(settings).train_step(engine, sample, version=3)  # type: ignore[arg-type]
    loss, gradient, mask = 0.0, np.zeros(len(old)), response_mask(sample)
    rewards, start, at = sample.data["rewards"].astype(np.float64), 0, 0
    for group in LENGTHS:
        of_group = rewards[at : at + len(group)]
        for number, length in enumerate(group):
            advantage = (of_group[number] - of_group.mean()) / (of_group.std() + 1e-6)
            for i in range(start, start + length - 1):
                if mask[i]:
                    ratio = math.exp(current[i] - old[i])
                    unclipped, clipped = -advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)
                    loss += max(unclipped, clipped) - 0.1 * max(advantage, 0.0) * current[i]
                    gradient[i] = (unclipped if unclipped >= clipped else 0.0) - 0.1 * max(advantage, 0.0)
            start += length - 1
        at += len(group)
    assert stats["ppo/loss"] == pytest.approx(loss / mask.sum(), abs=2e-5)
    np.testing.assert_allclose(engine.gradient.numpy(), gradient / mask.sum(), atol=2e-5)
