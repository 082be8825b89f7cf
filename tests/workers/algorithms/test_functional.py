"""Advantages against slow float64 loops and cases worked by hand."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean, pstdev
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.workers.algorithms.functional.advantages import gae, group_relative, opo, overlong_penalty
from corral.workers.algorithms.functional.kl import (
    KLEstimator,
    adapt_kl_coefficient,
    approximate_kl,
    entropy_of_samples,
    token_rewards,
)
from corral.workers.algorithms.functional.normalization import RunningMoments, SumOverRanks, normalize_over_batch
from corral.workers.algorithms.functional.packed import mean_per_answer, per_token, sum_per_answer
from corral.workers.algorithms.functional.policy_losses import LossReduction, reduction_weights


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


def test_gae_refuses_values_without_a_bootstrap_entry() -> None:
    with pytest.raises(
        ValueError, match="one bootstrap value per sequence: 3 rewards in 1 sequences want 4 values, got 3"
    ):
        gae(torch.zeros(3), torch.zeros(3), torch.tensor([0, 3]), gamma=1.0, lam=1.0)


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    assert group_relative(torch.tensor([0.1, 0.1, 0.1, 5.0]), [3, 1]).abs().max() < 1e-6


def test_group_sizes_must_cover_the_rewards() -> None:
    with pytest.raises(ValueError, match="add up to 3, not to 4"):
        group_relative(torch.zeros(4), [2, 1])


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


# --- normalization and the weights of tokens ------------------------------------------------------------------------

Result = TypeVar("Result")
numbers = st.floats(-1e3, 1e3, width=32)
ragged = st.lists(st.lists(st.tuples(numbers, st.booleans()), max_size=6), min_size=1, max_size=4)


def on_ranks(jobs: Sequence[Callable[[SumOverRanks], Result]]) -> list[Result]:
    """Each job as one rank, with sums over all of them."""
    barrier, said = threading.Barrier(len(jobs), timeout=30), [dict[str, float]() for _ in jobs]

    def rank_of(rank: int) -> SumOverRanks:
        def sum_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
            said[rank] = dict(values)
            barrier.wait()
            total = {name: math.fsum(one[name] for one in said) for name in values}
            barrier.wait()  # nobody says something new before all have added up
            return total

        return sum_over_ranks

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda rank: jobs[rank](rank_of(rank)), range(len(jobs))))


@given(ranks=ragged)
def test_the_batch_is_normalised_over_the_masked_tokens_of_all_ranks(ranks: list[list[tuple[float, bool]]]) -> None:
    def job(tokens: list[tuple[float, bool]]) -> Callable[[SumOverRanks], torch.Tensor]:
        values, mask = torch.tensor([v for v, _ in tokens]), torch.tensor([m for _, m in tokens], dtype=torch.bool)
        return lambda sums: normalize_over_batch(values, mask, sum_over_ranks=sums)

    results = on_ranks([job(tokens) for tokens in ranks])
    chosen = [value for tokens in ranks for value, is_chosen in tokens if is_chosen]
    for tokens, result in zip(ranks, results, strict=True):
        expected = [(v - fmean(chosen)) / (pstdev(chosen) + 1e-5) if is_chosen else 0.0 for v, is_chosen in tokens]
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def update(moments: RunningMoments, batch: Sequence[float]) -> RunningMoments:
    return moments.updated(count=len(batch), total=math.fsum(batch), square_total=math.fsum(x * x for x in batch))


@given(batches=st.lists(st.lists(st.floats(-50.0, 50.0), min_size=1, max_size=5), min_size=1, max_size=6))
def test_plain_moments_are_those_of_all_that_was_seen(batches: list[list[float]]) -> None:
    moments = RunningMoments(decay=None)
    for batch in batches:
        moments = update(moments, batch)
    seen = [x for batch in batches for x in batch]
    assert moments.mean == pytest.approx(fmean(seen), abs=1e-9)
    assert moments.std == pytest.approx(max(pstdev(seen), 0.1), abs=1e-6)


@given(
    decay=st.floats(0.1, 0.999),
    batches=st.lists(st.lists(st.floats(-50.0, 50.0), min_size=1, max_size=5), min_size=1, max_size=6),
)
def test_exponential_moments_weigh_batches_by_age_without_a_bias_to_zero(
    decay: float, batches: list[list[float]]
) -> None:
    moments = RunningMoments(decay=decay)
    for batch in batches:
        moments = update(moments, batch)
    weights = [decay**age for age in reversed(range(len(batches)))]
    mean = math.fsum(w * fmean(b) for w, b in zip(weights, batches, strict=True)) / math.fsum(weights)
    square = math.fsum(w * fmean(x * x for x in b) for w, b in zip(weights, batches, strict=True)) / math.fsum(weights)
    assert moments.mean == pytest.approx(mean, rel=1e-6, abs=1e-6)
    assert moments.std == pytest.approx(math.sqrt(max(square - mean**2, 1e-2)), rel=1e-3, abs=1e-3)


def test_moments_turn_values_into_the_heads_units_and_back() -> None:
    values = np.array([3.0, -7.0, 12.5], np.float32)
    assert RunningMoments(decay=0.9).normalize(values).tolist() == values.tolist()
    moments = update(RunningMoments(decay=0.9), [10.0, 14.0])
    assert moments.normalize(np.array([12.0, 14.0], np.float32)).tolist() == [0.0, 1.0]
    np.testing.assert_allclose(moments.denormalize(moments.normalize(values)), values, rtol=1e-6)
    assert moments.normalize(values).dtype == np.float32


def test_moments_pass_over_batches_that_are_empty_or_not_finite() -> None:
    moments = update(RunningMoments(decay=0.9), [1.0, 2.0])
    assert moments.updated(count=0, total=0.0, square_total=0.0) is moments
    assert moments.updated(count=2, total=math.nan, square_total=1.0) is moments
    assert moments.updated(count=2, total=1.0, square_total=math.inf) is moments


def test_moments_go_on_from_their_state() -> None:
    moments = update(update(RunningMoments(decay=0.7), [1.0, 5.0]), [2.0])
    restored = RunningMoments(decay=0.7).with_state(moments.state_dict())
    assert restored == moments
    assert update(restored, [9.0]) == update(moments, [9.0])
    with pytest.raises(ValueError, match="needs the number 'weight'"):
        RunningMoments(decay=0.7).with_state({"total": 1.0, "square_total": 1.0})


@given(
    ranks=st.lists(st.lists(st.lists(st.booleans(), max_size=5), max_size=4), min_size=1, max_size=3),
    reduction=st.sampled_from(["token_mean", "answer_mean", "fixed_divisor"]),
)
def test_weighted_token_means_are_the_means_that_the_papers_write(
    ranks: list[list[list[bool]]], reduction: LossReduction
) -> None:
    """Losses of 1, 2, 3, ... per token, summed with the weights and divided by what all ranks say."""

    flat: list[float] = []
    denominator = 0.0
    for answers in ranks:
        mask = torch.tensor([m for answer in answers for m in answer], dtype=torch.bool)
        weights, part = reduction_weights(mask, [len(answer) for answer in answers], reduction=reduction, divisor=7.0)
        flat += weights.tolist()
        denominator += float(part)
    masks = [answer for answers in ranks for answer in answers]
    losses = iter(range(1, 100))
    per_answer = [[float(next(losses)) if m else math.nan for m in answer] for answer in masks]
    kept = [[x for x in answer if not math.isnan(x)] for answer in per_answer]
    kept = [answer for answer in kept if answer]
    num_tokens = sum(map(len, kept))
    if not num_tokens:
        return
    reference = {
        "token_mean": lambda: math.fsum(map(math.fsum, kept)) / num_tokens,
        "answer_mean": lambda: fmean(map(fmean, kept)),
        "fixed_divisor": lambda: fmean(math.fsum(answer) / 7.0 for answer in kept),
    }
    everything = [x for answer in per_answer for x in answer]
    actual = math.fsum(w * x for w, x in zip(flat, everything, strict=True) if not math.isnan(x)) / denominator
    assert actual == pytest.approx(reference[reduction](), rel=1e-5)


def test_a_fixed_divisor_must_be_given() -> None:
    with pytest.raises(ValueError, match="needs a divisor"):
        reduction_weights(torch.ones(2, dtype=torch.bool), [2], reduction="fixed_divisor", divisor=None)


def test_sums_and_means_are_those_of_each_answer() -> None:
    values, lengths = torch.tensor([1.0, 2.0, 4.0, 8.0]), [2, 0, 1, 1]
    assert sum_per_answer(values, lengths).tolist() == [3.0, 0.0, 4.0, 8.0]
    mask = torch.tensor([True, False, True, False])
    assert mean_per_answer(values, mask, lengths).tolist() == [1.0, 0.0, 4.0, 0.0]
    assert per_token(torch.tensor([5.0, 6.0, 7.0, 8.0]), lengths).tolist() == [5.0, 5.0, 7.0, 8.0]


# --- KL divergence --------------------------------------------------------------------------------------------------


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
