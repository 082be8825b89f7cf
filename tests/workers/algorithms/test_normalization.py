"""Normalised advantages, running moments and the weights of tokens, against slow loops over all ranks together."""

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

from corral.workers.algorithms.functional.normalization import (
    RunningMoments,
    SumOverRanks,
    normalize_over_batch,
    normalize_per_group,
)
from corral.workers.algorithms.functional.packed import mean_per_answer, per_token, sum_per_answer
from corral.workers.algorithms.functional.policy_losses import LossReduction, reduction_weights

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


def alone(values: Mapping[str, float]) -> dict[str, float]:
    return dict(values)


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


@given(answers=ragged, cut=st.integers(0, 4))
def test_a_group_is_normalised_over_all_tokens_of_its_answers(
    answers: list[list[tuple[float, bool]]], cut: int
) -> None:
    groups = [group for group in (answers[:cut], answers[cut:]) if group]
    flat = [token for answer in answers for token in answer]
    result = normalize_per_group(
        torch.tensor([value for value, _ in flat]),
        torch.tensor([is_chosen for _, is_chosen in flat], dtype=torch.bool),
        [len(answer) for answer in answers],
        [len(group) for group in groups],
    )
    expected: list[float] = []
    for group in groups:
        chosen = [value for answer in group for value, is_chosen in answer if is_chosen]
        for value, is_chosen in (token for answer in group for token in answer):
            expected.append((value - fmean(chosen)) / (pstdev(chosen) + 1e-5) if is_chosen else 0.0)
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
