"""Sampling follows the distribution it says, exactly where it must: support, greedy rows, neighbours."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.workers.engine.sampling import SamplingBatch, SamplingParams, TokenUniforms, sample_tokens, token_uniforms

LOGITS = [2.0, 1.5, 0.5, 0.0, -0.5, -1.0, -4.0, 1.0]
NUM_DRAWS = 40_000


def draw(rows: list[SamplingParams], logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch = SamplingBatch(rows, vocab_size=logits.shape[-1], device=torch.device("cpu"))
    sampled = sample_tokens(logits.clone(), batch, uniforms)
    return sampled.token_ids, sampled.logprobs


def exact_distribution(temperature: float, top_p: float, top_k: int, min_p: float) -> list[float]:
    """By a slow loop in double precision: take tokens in order of probability while all limits allow."""
    weights = [math.exp(logit / temperature) for logit in LOGITS]
    probabilities = [weight / sum(weights) for weight in weights]
    kept = [0.0] * len(LOGITS)
    mass = 0.0
    for rank, token in enumerate(sorted(range(len(LOGITS)), key=lambda token: -probabilities[token])):
        is_rare = probabilities[token] < min_p * max(probabilities)
        if mass >= top_p or (top_k != -1 and rank >= top_k) or is_rare:
            break
        kept[token] = probabilities[token]
        mass += probabilities[token]
    return [probability / mass for probability in kept]


@cache
def uniforms_of_answers() -> torch.Tensor:
    """Of the same token of many answers to one prompt."""
    streams = [TokenUniforms.of(seed).on_device for seed in range(NUM_DRAWS)]
    return token_uniforms(*torch.tensor(streams).unbind(1), torch.tensor(9)).float()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        (1.0, 1.0, -1, 0.0),
        (0.5, 1.0, -1, 0.0),
        (2.0, 1.0, 3, 0.0),
        (1.0, 0.7, -1, 0.0),
        (1.5, 0.9, 4, 0.0),
        (1.0, 0.3, -1, 0.0),
        (1.0, 1.0, 100, 0.0),
        (1.0, 1.0, -1, 0.1),
        (2.0, 1.0, -1, 0.3),
        (1.0, 0.8, 6, 0.2),
        (1.0, 1.0, -1, 1.0),
    ],
)
def test_draws_follow_the_truncated_distribution(temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    logits = torch.tensor([LOGITS]).expand(NUM_DRAWS, -1)
    token_ids, logprobs = draw([params] * NUM_DRAWS, logits, uniforms_of_answers())
    counts = token_ids.bincount(minlength=len(LOGITS)).tolist()
    for count, probability in zip(counts, exact_distribution(temperature, top_p, top_k, min_p), strict=True):
        deviation = math.sqrt(NUM_DRAWS * probability * (1 - probability))
        assert abs(count - NUM_DRAWS * probability) <= 5 * deviation  # zero deviation: never, or always, drawn
    untruncated = torch.log_softmax(torch.tensor(LOGITS) / temperature, dim=-1)
    torch.testing.assert_close(logprobs, untruncated[token_ids])


def test_temperature_zero_takes_the_most_likely_token_with_its_model_logprob() -> None:
    token_ids, logprobs = draw([SamplingParams(temperature=0)], torch.tensor([LOGITS]), torch.tensor([0.99]))
    assert token_ids.tolist() == [0]
    torch.testing.assert_close(logprobs, torch.log_softmax(torch.tensor(LOGITS), dim=-1)[:1])


def test_a_row_draws_the_same_token_whatever_its_neighbours_ask_for() -> None:
    uniforms = torch.rand(64, generator=torch.Generator().manual_seed(1))
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(2))
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.5},
        {"top_k": 3},
        {"temperature": 0},
        {"temperature": 0.3, "top_p": 0.9},
        {"min_p": 0.2},
    ]
    rows = [SamplingParams(**kinds[index % len(kinds)]) for index in range(64)]
    together, logprobs_together = draw(rows, logits, uniforms)
    for index, params in enumerate(rows):
        alone, logprob_alone = draw([params], logits[index : index + 1], uniforms[index : index + 1])
        assert alone.tolist() == together[index : index + 1].tolist()
        torch.testing.assert_close(logprob_alone, logprobs_together[index : index + 1])


@given(
    temperatures=st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5]), min_size=1, max_size=8),
    wanted=st.sets(st.integers(0, 7)),
)
def test_rows_that_ask_get_the_logprobs_before_the_temperature_too(temperatures: list[float], wanted: set[int]) -> None:
    rows = [SamplingParams(temperature=temperature) for temperature in temperatures]
    asking = sorted(row for row in wanted if row < len(rows))
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(2))
    uniforms = torch.rand(len(rows), generator=torch.Generator().manual_seed(3))
    batch = SamplingBatch(rows, vocab_size=50, device=torch.device("cpu"), original_rows=asking)
    token_ids, logprobs, originals = sample_tokens(logits.clone(), batch, uniforms)
    without = draw(rows, logits, uniforms)
    assert torch.equal(token_ids, without[0]) and torch.equal(logprobs, without[1])
    expected = [math.log(torch.softmax(logits[row].double(), dim=-1)[token_ids[row]]) for row in asking]
    assert ([] if originals is None else originals.tolist()) == pytest.approx(expected, abs=1e-5)
    assert originals is None or [originals[index] for index, row in enumerate(asking) if temperatures[row] == 1] == [
        logprobs[row] for row in asking if temperatures[row] == 1
    ]


@given(
    logits=st.lists(st.floats(min_value=-200, max_value=200, width=32), min_size=2, max_size=40),
    uniform=st.one_of(st.floats(min_value=0, max_value=1, width=32), st.just(1.0), st.just(1 - 2**-24)),
    top_k=st.sampled_from([-1, 1, 2, 50]),
    top_p=st.sampled_from([1.0, 0.9, 1e-6]),
)
def test_no_uniform_number_draws_a_token_without_probability(
    logits: list[float], uniform: float, top_k: int, top_p: float
) -> None:
    row = torch.tensor([logits])
    token_ids, logprobs = draw([SamplingParams(top_k=top_k, top_p=top_p)], row, torch.tensor([uniform]))
    probabilities = torch.softmax(row, dim=-1)[0]
    drawn = probabilities[token_ids[0]]
    assert drawn > 0
    assert torch.isfinite(logprobs).all()
    clearly_likelier = probabilities > drawn * (1 + 1e-6)  # than the drawn one; rounding makes ties of smaller gaps
    if top_k != -1:
        assert int(clearly_likelier.sum()) < top_k
    if top_p == 1e-6:
        assert not clearly_likelier.any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, "temperature\n.*greater than or equal to 0 .*input_value=-0.1"),
        ({"temperature": math.nan}, "temperature\n.* finite number .*input_value=nan"),
        ({"top_p": 0.0}, "top_p\n.*greater than 0 .*input_value=0.0"),
        ({"top_p": 1.1}, "top_p\n.*less than or equal to 1 .*input_value=1.1"),
        ({"top_k": 0}, "top_k must be at least 1, or -1 .*input_value=0"),
        ({"min_p": 1.5}, "min_p\n.*less than or equal to 1 .*input_value=1.5"),
        ({"min_p": math.nan}, "min_p\n.* finite number .*input_value=nan"),
        ({"stop": ("a",) * 33}, "stop\n.*at most 32 items .*not 33"),
        ({"stop": ("a", "")}, "stop.1\n.*at least 1 character .*input_value=''"),
        ({"max_new_tokens": 0}, "max_new_tokens\n.*greater than or equal to 1 .*input_value=0"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused_by_name_and_value(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)


# --- the random numbers of answers ----------------------------------------------------------------------------------

SEEDS = st.integers(min_value=-(2**63), max_value=2**63 + 1024)
NUM_CELLS = 64
NUM_UNIFORMS = 64_000


def uniforms_of(streams: Sequence[TokenUniforms], positions: Sequence[int]) -> list[float]:
    """Of each stream at its own position; one stream, or one position, is of all."""
    starts, gammas = torch.tensor([stream.on_device for stream in streams]).unbind(1)
    drawn: list[float] = token_uniforms(starts, gammas, torch.tensor(positions)).tolist()
    return drawn


def along(seed: int) -> list[float]:
    return uniforms_of([TokenUniforms.of(seed)], range(NUM_UNIFORMS))


def across(seeds: int, position: int) -> list[float]:
    return uniforms_of([TokenUniforms.of(seed) for seed in range(seeds)], [position])


def cell(uniform: float, *, num_cells: int = NUM_CELLS) -> int:
    return int(uniform * num_cells)


def assert_even(cells: Iterable[int], *, num_cells: int = NUM_CELLS) -> None:
    """Pearson's chi-square: its mean is num_cells - 1, its deviation sqrt(2 (num_cells - 1)); 5 of them are allowed."""
    counts = Counter(cells)
    expected = counts.total() / num_cells
    statistic = sum((counts[number] - expected) ** 2 / expected for number in range(num_cells))
    freedom = num_cells - 1
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


def test_numbers_are_those_of_splitmix64() -> None:
    """The first outputs of the reference implementation for seed 1234567, as published with it."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    uniforms = TokenUniforms(start=1234567, gamma=0x9E3779B97F4A7C15)
    assert [uniforms.seed(place) for place in range(1, 5)] == [number >> 1 for number in published]
    assert uniforms_of([uniforms], range(1, 5)) == [(number >> 11) / 2**53 for number in published]


@given(SEEDS, st.integers(min_value=0, max_value=2**40))
def test_tensors_and_integers_draw_the_same(seed: int, position: int) -> None:
    stream = TokenUniforms.of(seed)
    assert uniforms_of([stream], [position]) == [(stream.seed(position) >> 10) / 2**53]


def test_numbers_are_uniform_along_an_answer_and_across_answers() -> None:
    assert_even(map(cell, along(1)))
    assert_even(map(cell, across(NUM_UNIFORMS, 0)))
    # The low bits too: tokens at the end of a large vocabulary are told apart by them.
    assert_even(int(uniform * 2**53) % NUM_CELLS for uniform in along(1))


def test_neighbouring_positions_and_neighbouring_seeds_are_independent() -> None:
    neighbours = [along(2), *(across(NUM_UNIFORMS // 2, position) for position in (0, 1, 500))]
    for drawn in neighbours:
        assert_even(cell(a, num_cells=8) * 8 + cell(b, num_cells=8) for a, b in itertools.pairwise(drawn))
    # What one seed draws at a position, the next draws at none nearby: answers of a group are no shifted copies.
    assert set(along(3)[:5000]).isdisjoint(along(4)[:5000])


@given(SEEDS, st.integers(min_value=0, max_value=2**20), st.integers(min_value=0, max_value=62))
def test_any_bit_of_the_seed_changes_every_number(seed: int, position: int, bit: int) -> None:
    uniforms, other = TokenUniforms.of(seed), TokenUniforms.of(seed ^ (1 << bit))
    assert uniforms_of([uniforms], [position]) != uniforms_of([other], [position])
    assert uniforms.seed(position) != other.seed(position)


@given(SEEDS, st.integers(min_value=0, max_value=2**40))
def test_every_number_is_in_its_range(seed: int, position: int) -> None:
    uniforms = TokenUniforms.of(seed)
    assert 0 <= uniforms_of([uniforms], [position])[0] < 1
    assert 0 <= uniforms.seed(position) < 2**63
    # A step of the counter moves by an odd amount, whose bits change often: the paper's condition on a gamma.
    changes = sum(a != b for a, b in itertools.pairwise(f"{uniforms.gamma:064b}"))
    assert uniforms.gamma % 2 == 1 and changes >= 23
