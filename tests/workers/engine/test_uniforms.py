"""The random numbers of answers: uniform, independent of their neighbours, and those of SplitMix64."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.workers.engine.sampling import TokenUniforms, token_uniforms

SEEDS = st.integers(min_value=-(2**63), max_value=2**63 + 1024)
NUM_CELLS = 64
NUM_DRAWS = 64_000


def draws(streams: Sequence[TokenUniforms], positions: Sequence[int]) -> list[float]:
    """Of each stream at its own position; one stream, or one position, is of all."""
    starts, gammas = torch.tensor([stream.on_device for stream in streams]).unbind(1)
    drawn: list[float] = token_uniforms(starts, gammas, torch.tensor(positions)).tolist()
    return drawn


def along(seed: int) -> list[float]:
    return draws([TokenUniforms.of(seed)], range(NUM_DRAWS))


def across(seeds: int, position: int) -> list[float]:
    return draws([TokenUniforms.of(seed) for seed in range(seeds)], [position])


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
    assert draws([uniforms], range(1, 5)) == [(number >> 11) / 2**53 for number in published]


@given(SEEDS, st.integers(min_value=0, max_value=2**40))
def test_tensors_and_integers_draw_the_same(seed: int, position: int) -> None:
    stream = TokenUniforms.of(seed)
    assert draws([stream], [position]) == [(stream.seed(position) >> 10) / 2**53]


def test_numbers_are_uniform_along_an_answer_and_across_answers() -> None:
    assert_even(map(cell, along(1)))
    assert_even(map(cell, across(NUM_DRAWS, 0)))
    # The low bits too: tokens at the end of a large vocabulary are told apart by them.
    assert_even(int(uniform * 2**53) % NUM_CELLS for uniform in along(1))


def test_neighbouring_positions_and_neighbouring_seeds_are_independent() -> None:
    neighbours = [along(2), *(across(NUM_DRAWS // 2, position) for position in (0, 1, 500))]
    for drawn in neighbours:
        assert_even(cell(a, num_cells=8) * 8 + cell(b, num_cells=8) for a, b in itertools.pairwise(drawn))
    # What one seed draws at a position, the next draws at none nearby: answers of a group are no shifted copies.
    assert set(along(3)[:5000]).isdisjoint(along(4)[:5000])


@given(SEEDS, st.integers(min_value=0, max_value=2**20), st.integers(min_value=0, max_value=62))
def test_any_bit_of_the_seed_changes_every_number(seed: int, position: int, bit: int) -> None:
    uniforms, other = TokenUniforms.of(seed), TokenUniforms.of(seed ^ (1 << bit))
    assert draws([uniforms], [position]) != draws([other], [position])
    assert uniforms.seed(position) != other.seed(position)


@given(SEEDS, st.integers(min_value=0, max_value=2**40))
def test_every_number_is_in_its_range(seed: int, position: int) -> None:
    uniforms = TokenUniforms.of(seed)
    assert 0 <= draws([uniforms], [position])[0] < 1
    assert 0 <= uniforms.seed(position) < 2**63
    # A step of the counter moves by an odd amount, whose bits change often: the paper's condition on a gamma.
    changes = sum(a != b for a, b in itertools.pairwise(f"{uniforms.gamma:064b}"))
    assert uniforms.gamma % 2 == 1 and changes >= 23
