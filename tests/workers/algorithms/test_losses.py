"""Losses of critics, reward models, preferences and language models against slow loops, values and gradients."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from corral.workers.algorithms.functional.losses import (
    bradley_terry_loss,
    dpo_loss,
    sft_loss,
    value_loss,
)

NUM = 200


def gradient_of(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    point = at.clone().requires_grad_()
    function(point).sum().backward()  # type: ignore[no-untyped-call]
    assert point.grad is not None
    return point.grad


def slope(function: Callable[[float], float], at: float) -> float:
    return (function(at + 1e-6) - function(at - 1e-6)) / 2e-6


@pytest.mark.parametrize("value_eps_clip", [None, 0.2])
def test_value_loss_takes_the_larger_of_clipped_and_unclipped(value_eps_clip: float | None) -> None:
    values, old_values, returns = np.random.default_rng(3).normal(size=(3, NUM))

    def slow(value: float, i: int) -> float:
        def error(distance: float) -> float:
            return distance**2 / 2

        if value_eps_clip is None:
            return error(value - returns[i])
        near_old = min(max(value, old_values[i] - value_eps_clip), old_values[i] + value_eps_clip)
        return max(error(value - returns[i]), error(near_old - returns[i]))

    def fast(at: Tensor) -> Tensor:
        return value_loss(
            at,
            old_values=torch.tensor(old_values),
            returns=torch.tensor(returns),
            value_eps_clip=value_eps_clip,
        ).losses

    at = torch.tensor(values)
    np.testing.assert_allclose(fast(at), [slow(values[i], i) for i in range(NUM)], atol=1e-9)
    slopes = [slope(lambda x, i=i: slow(x, i), values[i]) for i in range(NUM)]  # type: ignore[misc]
    np.testing.assert_allclose(gradient_of(fast, at), slopes, atol=1e-5)


def test_value_loss_says_which_values_the_clip_decided() -> None:
    # old value 0, return 1: at 0.5 the clipped value 0.2 is further off; at 0.1 the clip does not act.
    result = value_loss(torch.tensor([0.5, 0.1]), old_values=torch.zeros(2), returns=torch.ones(2), value_eps_clip=0.2)
    assert result.stats["critic/clip_fraction"].tolist() == [True, False]


def test_sft_loss_is_the_negative_logprob() -> None:
    assert sft_loss(torch.tensor([-1.0, -4.0])).losses.tolist() == [1.0, 4.0]


def test_the_bradley_terry_loss_is_the_surprise_at_the_winner() -> None:
    chosen, rejected = np.random.default_rng(5).normal(size=(2, NUM)) * 3
    surprise = [-math.log(math.exp(c) / (math.exp(c) + math.exp(r))) for c, r in zip(chosen, rejected, strict=True)]
    np.testing.assert_allclose(bradley_terry_loss(torch.tensor(chosen), torch.tensor(rejected)), surprise, atol=1e-9)
    pushed = gradient_of(lambda at: bradley_terry_loss(at, torch.tensor(rejected)), torch.tensor(chosen))
    loses = [math.exp(r) / (math.exp(c) + math.exp(r)) for c, r in zip(chosen, rejected, strict=True)]
    np.testing.assert_allclose(pushed, [-p for p in loses], atol=1e-9)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_dpo_loss_is_the_likelihood_of_the_preference_under_the_implicit_rewards(label_smoothing: float) -> None:
    policy_chosen, policy_rejected, ref_chosen, ref_rejected = np.random.default_rng(6).normal(size=(4, NUM)) * 4
    beta = 0.3
    expected = []
    for i in range(NUM):
        winner = math.exp(beta * (policy_chosen[i] - ref_chosen[i]))
        loser = math.exp(beta * (policy_rejected[i] - ref_rejected[i]))
        wins = winner / (winner + loser)
        expected.append(-(1 - label_smoothing) * math.log(wins) - label_smoothing * math.log(1 - wins))
    margins = torch.tensor(beta * ((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)))
    np.testing.assert_allclose(dpo_loss(margins, label_smoothing=label_smoothing), expected, atol=1e-9)


@pytest.mark.parametrize("margin", [math.inf, -math.inf, math.nan])
def test_a_margin_that_is_not_finite_has_no_finite_loss(margin: float) -> None:
    assert not math.isfinite(float(dpo_loss(torch.tensor(margin))))
