"""Estimators of the KL divergence, its penalty in the rewards, and its controller."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.workers.algorithms.functional.kl import (
    KLEstimator,
    adapt_kl_coefficient,
    approximate_kl,
    entropy_of_samples,
    token_rewards,
)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_equal_their_formulas(estimator: KLEstimator) -> None:
    current, reference = -np.random.default_rng(1).exponential(size=(2, 200))
    formula: dict[str, Callable[[float], float]] = {
        "k1": lambda r: -math.log(r),
        "k2": lambda r: math.log(r) ** 2 / 2,
        "k3": lambda r: r - 1 - math.log(r),
    }
    expected = [formula[estimator](math.exp(reference[i] - current[i])) for i in range(200)]
    actual = approximate_kl(torch.tensor(current), torch.tensor(reference), estimator=estimator)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_k1_and_k3_average_to_the_exact_divergence() -> None:
    rng = np.random.default_rng(2)
    policy = torch.tensor(rng.dirichlet(np.ones(8)))
    reference = torch.tensor(rng.dirichlet(np.ones(8)))
    exact = float((policy * (policy / reference).log()).sum())
    estimators: tuple[KLEstimator, ...] = ("k1", "k3")
    for estimator in estimators:
        estimate = approximate_kl(policy.log(), reference.log(), estimator=estimator)
        assert float((policy * estimate).sum()) == pytest.approx(exact, abs=1e-9)


def test_the_gradient_of_k2_averages_to_the_gradient_of_the_divergence() -> None:
    rng = np.random.default_rng(3)
    logits = torch.tensor(rng.normal(size=8), requires_grad=True)
    reference = torch.tensor(rng.dirichlet(np.ones(8))).log()
    policy = torch.log_softmax(logits, dim=0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    sampled = (policy.exp().detach() * approximate_kl(policy, reference, estimator="k2")).sum()
    (estimated,) = torch.autograd.grad(sampled, logits)
    np.testing.assert_allclose(estimated, exact, atol=1e-12)


def test_an_unknown_kl_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="'k4'; choose k1, k2 or k3"):
        approximate_kl(torch.zeros(1), torch.zeros(1), estimator="k4")  # type: ignore[arg-type]


def test_an_answers_reward_stands_at_its_last_token_and_the_penalty_at_all_of_its_response() -> None:
    # Answers of 3, 0 and 2 predictions; the first of each is prompt, where nobody knows what the estimate says.
    rewards = token_rewards(
        torch.tensor([1.0, 7.0, -2.0]),
        torch.tensor([math.nan, 0.5, -0.25, math.inf, 1.0]),
        torch.tensor([False, True, True, False, True]),
        [3, 0, 2],
        kl_coefficient=0.1,
    )
    np.testing.assert_allclose(rewards, [0.0, -0.05, 0.025 + 1.0, 0.0, -0.1 - 2.0], atol=1e-7)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [(6.0, 0.1), (6.6, 0.1 * (1 + 0.1 * 50 / 1000)), (600.0, 0.1 * 1.01), (0.0, 0.1 * 0.99), (math.nan, 0.1)],
)
def test_the_coefficient_follows_the_divergence_within_a_bound(observed: float, expected: float) -> None:
    adapted = adapt_kl_coefficient(0.1, observed_kl=observed, target=6.0, horizon=1000.0, num_answers=50.0)
    assert adapted == pytest.approx(expected, abs=1e-12)


@given(observed=st.floats(0.0, 1e6), num_answers=st.floats(1.0, 1e9))
def test_however_many_answers_a_step_has_the_coefficient_moves_by_at_most_a_fifth(
    observed: float, num_answers: float
) -> None:
    adapted = adapt_kl_coefficient(0.1, observed_kl=observed, target=6.0, horizon=100.0, num_answers=num_answers)
    assert 0.08 - 1e-12 <= adapted <= 0.12 + 1e-12


@given(drift=st.floats(0.2, 5.0))
def test_the_controller_settles_where_the_divergence_is_the_target(drift: float) -> None:
    # A policy that goes as far as the penalty lets it: KL = drift / coefficient.
    coefficient = 1.0
    for _ in range(400):
        coefficient = adapt_kl_coefficient(
            coefficient, observed_kl=drift / coefficient, target=2.0, horizon=100.0, num_answers=20.0
        )
    assert drift / coefficient == pytest.approx(2.0, rel=1e-3)


def test_the_gradient_of_the_entropy_is_right_in_the_mean_over_what_is_drawn() -> None:
    logits = torch.tensor(np.random.default_rng(5).normal(size=(1, 7)), requires_grad=True)
    logprobs = torch.log_softmax(logits, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    (exact,) = torch.autograd.grad(entropy.sum(), logits, retain_graph=True)
    estimates = entropy_of_samples(logprobs[0], entropy.detach().expand(7))
    np.testing.assert_allclose(estimates.detach(), [float(entropy.detach())] * 7)
    (mean,) = torch.autograd.grad((logprobs.exp().detach()[0] * estimates).sum(), logits)
    np.testing.assert_allclose(mean, exact, atol=1e-12)
