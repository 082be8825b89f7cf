"""Advantages against slow float64 loops and cases worked by hand."""

import math

import numpy as np
import pytest
import torch

from corral.workers.algorithms.functional.advantages import (
    bootstrap_values,
    gae,
    group_relative,
    opo,
    overlong_penalty,
    rewards_to_go,
    rloo,
)


def slow_gae(rewards: list[float], values: list[float], *, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Equation 16 as its infinite sum says it: every advantage summed over all later temporal differences."""
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(len(rewards))]
    advantages = [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(rewards)))
        for t in range(len(rewards))
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=False)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_equals_the_sum_of_temporal_differences(gamma: float, lam: float) -> None:
    rng = np.random.default_rng(0)
    lengths = [1, 7, 0, 128, 300, 4, 129, 0]
    rewards = [rng.normal(size=n).tolist() for n in lengths]
    values = [rng.normal(size=n + 1).tolist() for n in lengths]
    values[1][-1] = 0.0  # this one ended; the others are bootstrapped
    advantages, returns = gae(
        torch.tensor([r for sequence in rewards for r in sequence], dtype=torch.float64),
        torch.tensor([v for sequence in values for v in sequence], dtype=torch.float64),
        torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
        gamma=gamma,
        lam=lam,
    )
    slow = [slow_gae(r, v, gamma=gamma, lam=lam) for r, v in zip(rewards, values, strict=True)]
    np.testing.assert_allclose(advantages, [a for s in slow for a in s[0]], atol=1e-6)
    np.testing.assert_allclose(returns, [x for s in slow for x in s[1]], atol=1e-6)
    assert advantages.dtype == torch.float32


def test_gae_without_values_is_the_remaining_reward() -> None:
    advantages, _ = gae(torch.tensor([0.0, 0.0, 1.0]), torch.zeros(4), torch.tensor([0, 3]), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [1.0, 1.0, 1.0]


def test_gae_refuses_values_without_a_bootstrap_entry() -> None:
    with pytest.raises(
        ValueError, match="one bootstrap value per sequence: 3 rewards in 1 sequences want 4 values, got 3"
    ):
        gae(torch.zeros(3), torch.zeros(3), torch.tensor([0, 3]), gamma=1.0, lam=1.0)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_group_relative_compares_each_reward_with_its_own_group(normalize_std: bool) -> None:
    rng = np.random.default_rng(1)
    sizes = [4, 1, 8, 3]
    rewards = rng.normal(size=sum(sizes)) * 5
    expected: list[float] = []
    start = 0
    for size in sizes:
        group = [float(r) for r in rewards[start : start + size]]
        mean = math.fsum(group) / size
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / size)
        expected += [(r - mean) / (std + 1e-6) if normalize_std else r - mean for r in group]
        start += size
    actual = group_relative(torch.from_numpy(rewards), sizes, normalize_std=normalize_std)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    assert group_relative(torch.tensor([0.1, 0.1, 0.1, 5.0]), [3, 1]).abs().max() < 1e-6


def test_group_sizes_must_cover_the_rewards() -> None:
    with pytest.raises(ValueError, match="add up to 3, not to 4"):
        group_relative(torch.zeros(4), [2, 1])


@pytest.mark.parametrize("is_truncated", [True, False])
def test_only_an_answer_that_was_cut_off_expects_more_after_its_last_token(is_truncated: bool) -> None:
    """Four tokens, two of them response: deltas written out from values V(0..3) and a reward at the end."""
    gamma, lam, value = 0.9, 0.8, [9.0, 0.5, 0.7, 2.0]
    values = bootstrap_values(torch.tensor(value), torch.tensor([is_truncated]), [4])
    advantages, returns = gae(torch.tensor([0.0, 0.0, 1.0]), values, torch.tensor([0, 3]), gamma=gamma, lam=lam)
    last = 1.0 + gamma * (value[3] if is_truncated else 0.0) - value[2]
    first = 0.0 + gamma * value[2] - value[1] + gamma * lam * last
    np.testing.assert_allclose(advantages[1:], [first, last], atol=1e-6)
    np.testing.assert_allclose(returns[1:], [first + value[1], last + value[2]], atol=1e-6)


def test_each_answer_keeps_its_own_last_value() -> None:
    values = bootstrap_values(torch.arange(1.0, 7.0), torch.tensor([False, True, False]), [3, 2, 1])
    assert values.tolist() == [1.0, 2.0, 0.0, 4.0, 5.0, 0.0]


def test_rloo_compares_each_reward_with_the_mean_of_the_others() -> None:
    rng = np.random.default_rng(2)
    sizes, expected, start = [4, 1, 2], list[float](), 0
    rewards = [float(x) for x in rng.normal(size=sum(sizes))]
    for size in sizes:
        group = rewards[start : start + size]
        for index, reward in enumerate(group):
            others = group[:index] + group[index + 1 :]
            expected.append(reward - math.fsum(others) / len(others) if others else 0.0)
        start += size
    np.testing.assert_allclose(rloo(torch.tensor(rewards), sizes), expected, atol=1e-6)


def test_rewards_to_go_are_discounted_sums_of_what_follows() -> None:
    rewards, gamma = [[1.0, 2.0, 4.0], [3.0]], 0.5
    expected = [1.0 + 1.0 + 1.0, 2.0 + 2.0, 4.0, 3.0]
    actual = rewards_to_go(torch.tensor([r for one in rewards for r in one]), torch.tensor([0, 3, 4]), gamma=gamma)
    assert actual.tolist() == expected


def test_opo_compares_each_reward_with_the_mean_over_the_groups_tokens() -> None:
    rng = np.random.default_rng(3)
    sizes, expected, start = [4, 1, 3, 2], list[float](), 0
    rewards = [float(x) for x in rng.normal(size=sum(sizes))]
    tokens = [int(n) for n in rng.integers(1, 50, size=sum(sizes) - 2)] + [0, 0]
    for size in sizes:
        group, lengths = rewards[start : start + size], tokens[start : start + size]
        per_token = [reward for reward, n in zip(group, lengths, strict=True) for _ in range(n)] or group
        expected += [reward - math.fsum(per_token) / len(per_token) for reward in group]
        start += size
    np.testing.assert_allclose(opo(torch.tensor(rewards), torch.tensor(tokens), sizes), expected, atol=1e-6)


def test_an_answer_is_overlong_by_what_it_has_used_of_the_buffer() -> None:
    def eq_13(length: int, longest: int, cache: int) -> float:
        if length <= longest - cache:
            return 0.0
        return ((longest - cache) - length) / cache if length <= longest else -1.0

    lengths = [0, 15, 16, 17, 19, 20, 30]
    actual = -overlong_penalty(torch.tensor(lengths), limit=20, buffer=4)
    np.testing.assert_allclose(actual, [eq_13(length, 20, 4) for length in lengths], atol=1e-12)
