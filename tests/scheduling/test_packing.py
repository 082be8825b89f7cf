"""Packing keeps the token budget with few bins; partitions keep the work equal; both lose and repeat nothing."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from corral.scheduling.packing import (
    TYPICAL_SHAPE,
    MicroBatchSpec,
    TransformerShape,
    forward_flops,
    pack_first_fit_decreasing,
)
from corral.scheduling.redistribution import balanced_partition, partition_near_owners

lengths_up_to_100 = st.lists(st.integers(0, 100), max_size=40)


def sequence_flops(length: int, shape: TransformerShape = TYPICAL_SHAPE) -> float:
    return forward_flops([[length]], [shape])[0]


def slow_first_fit_decreasing(lengths: list[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        for candidate in bins:
            if sum(lengths[other] for other in candidate) + lengths[index] <= max_tokens:
                candidate.append(index)
                break
        else:
            bins.append([index])
    return bins


@given(lengths_up_to_100, st.integers(100, 300))
def test_packing_is_first_fit_decreasing(lengths: list[int], max_tokens: int) -> None:
    assert pack_first_fit_decreasing(lengths, max_tokens=max_tokens) == slow_first_fit_decreasing(lengths, max_tokens)


@given(lengths_up_to_100, st.integers(100, 300), st.integers(1, 12))
def test_packing_keeps_the_budget_and_loses_nothing(lengths: list[int], max_tokens: int, min_bins: int) -> None:
    bins = pack_first_fit_decreasing(lengths, max_tokens=max_tokens, min_bins=min_bins)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(0 < len(members) for members in bins)
    assert all(sum(lengths[index] for index in members) <= max_tokens for members in bins)
    assert len(bins) >= min(min_bins, len(lengths))


def test_packing_matches_the_documented_example() -> None:
    assert pack_first_fit_decreasing([5, 3, 4, 2], max_tokens=7) == [[0, 3], [2, 1]]


def test_more_bins_than_needed_are_filled_evenly() -> None:
    bins = pack_first_fit_decreasing([10] * 12, max_tokens=1000, min_bins=4)
    assert [len(members) for members in bins] == [3, 3, 3, 3]


def test_evenly_filled_bins_still_keep_the_budget() -> None:
    # Ten bins of 100 hold these; spread evenly over eleven, one finds no room and needs a twelfth.
    lengths = [95, 67, 56, 51, 49, 46, 43, 43, 42, 41, 40, 40, 38, 37, 35, 33, 32, 28, 27, 26, 26, 25]
    bins = pack_first_fit_decreasing(lengths, max_tokens=100, min_bins=11)
    assert len(pack_first_fit_decreasing(lengths, max_tokens=100)) == 10
    assert max(sum(lengths[index] for index in members) for members in bins) <= 100
    assert len(bins) == 12


def test_a_sequence_longer_than_the_budget_is_named_with_the_remedy() -> None:
    with pytest.raises(
        ValueError, match="sequence 1 has 9 tokens but a micro-batch holds at most 8; raise max_tokens.* 10"
    ):
        pack_first_fit_decreasing([8, 9, 10], max_tokens=8)


def test_nonsense_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="min_bins=0"):
        pack_first_fit_decreasing([1], max_tokens=1, min_bins=0)
    with pytest.raises(ValueError, match="sequence 0 has the negative length -1"):
        pack_first_fit_decreasing([-1], max_tokens=1)
    with pytest.raises(ValueError, match="num_parts must be at least 1"):
        balanced_partition([1], num_parts=0)
    with pytest.raises(ValueError, match="item 1 has the cost nan"):
        balanced_partition([1.0, float("nan")], num_parts=1)
    with pytest.raises(ValidationError, match="max_tokens_per_micro_batch"):
        MicroBatchSpec(max_tokens_per_micro_batch=0)


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(1, 9))
def test_a_partition_loses_nothing_and_leaves_no_part_empty(lengths: list[int], num_parts: int) -> None:
    parts = balanced_partition(lengths, num_parts=num_parts)
    assert len(parts) == num_parts
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    if len(lengths) >= num_parts:
        assert all(parts)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=8), st.integers(1, 3))
def test_a_partition_is_near_the_best_possible(costs: list[int], num_parts: int) -> None:
    parts = balanced_partition(costs, num_parts=num_parts)
    heaviest = max(sum(costs[index] for index in part) for part in parts)
    best = min(
        max(sum(cost for cost, place in zip(costs, places, strict=True) if place == part) for part in range(num_parts))
        for places in itertools.product(range(num_parts), repeat=len(costs))
    )
    assert heaviest <= best * 4 / 3  # what longest-first guarantees; refinement never makes it worse


def test_refinement_finds_what_longest_first_misses() -> None:
    assert balanced_partition([8, 7, 6, 5, 4], num_parts=2) == [[2, 3, 4], [0, 1]]


owned_items = st.integers(1, 6).flatmap(
    lambda num_parts: st.tuples(
        st.lists(st.tuples(st.integers(0, 1000), st.none() | st.integers(0, num_parts - 1)), max_size=40),
        st.just(num_parts),
    )
)


@given(owned_items)
def test_a_partition_near_owners_loses_nothing_and_leaves_no_part_empty(
    situation: tuple[list[tuple[int, int | None]], int],
) -> None:
    items, num_parts = situation
    parts = partition_near_owners([cost for cost, _ in items], [owner for _, owner in items], num_parts=num_parts)
    assert len(parts) == num_parts
    assert sorted(itertools.chain(*parts)) == list(range(len(items)))
    assert all(part == sorted(part) for part in parts)
    if len(items) >= num_parts:
        assert all(parts)


@given(owned_items)
def test_a_partition_near_owners_is_balanced_wherever_a_new_deal_would_be(
    situation: tuple[list[tuple[int, int | None]], int],
) -> None:
    items, num_parts = situation
    costs = [cost for cost, _ in items]
    parts = partition_near_owners(costs, [owner for _, owner in items], num_parts=num_parts)
    anew = balanced_partition(costs, num_parts=num_parts)
    limit = 1.05 * sum(costs) / num_parts
    assert heaviest(parts, costs) <= max(limit, heaviest(anew, costs)) * (1 + 1e-9)


@given(owned_items)
def test_nothing_moves_where_the_owners_have_balanced_work(
    situation: tuple[list[tuple[int, int | None]], int],
) -> None:
    items, num_parts = situation
    costs = [cost for cost, _ in items]
    settled = partition_near_owners(costs, [owner for _, owner in items], num_parts=num_parts)
    owners: list[int | None] = [None] * len(items)
    for number, part in enumerate(settled):
        for index in part:
            owners[index] = number
    limit = max(1.05 * sum(costs) / num_parts, heaviest(settled, costs))
    tolerance = limit * num_parts / sum(costs) if any(costs) else 1.05
    assert partition_near_owners(costs, owners, num_parts=num_parts, max_over_mean=tolerance * (1 + 1e-9)) == settled


@pytest.mark.parametrize("per_rank", [8, 16, 128])
def test_little_more_than_the_excess_moves_for_log_normal_lengths_on_64_ranks(per_rank: int) -> None:
    draw = random.Random(per_rank)
    num_parts, count = 64, 64 * per_rank
    costs = [sum(sequence_flops(int(draw.lognormvariate(7, 0.8)) + 16) for _ in range(8)) for _ in range(count)]
    owners = [index % num_parts for index in range(count)]
    parts = partition_near_owners(costs, owners, num_parts=num_parts)
    limit = 1.05 * sum(costs) / num_parts
    assert heaviest(parts, costs) <= limit
    moved = sum(costs[index] for number, part in enumerate(parts) for index in part if owners[index] != number)
    held = [sum(costs[index] for index in range(number, count, num_parts)) for number in range(num_parts)]
    excess = sum(max(0.0, load - limit) for load in held)
    assert excess <= moved <= 2 * excess
    anew = balanced_partition(costs, num_parts=num_parts)
    moved_anew = sum(costs[index] for number, part in enumerate(anew) for index in part if owners[index] != number)
    assert moved < moved_anew / 10


def heaviest(parts: list[list[int]], costs: list[int] | list[float]) -> float:
    return max(sum(costs[index] for index in part) for part in parts)


def test_partitions_near_owners_match_the_documented_example_and_keep_what_is_too_large_anywhere() -> None:
    assert partition_near_owners([5, 5, 1, 5, 4], [0, 0, 0, 1, 1], num_parts=2) == [[0, 1], [2, 3, 4]]
    assert partition_near_owners([100, 30, 30], [1, 1, 0], num_parts=2) == [[1, 2], [0]]


def test_every_item_needs_an_owner_or_none() -> None:
    with pytest.raises(ValueError, match="2 items need as many owners, got 1"):
        partition_near_owners([1, 2], [0], num_parts=2)


def test_work_is_balanced_by_attention_and_not_by_tokens() -> None:
    lengths = [100_000] + [10_000] * 10
    by_tokens = balanced_partition(lengths, num_parts=2)
    by_flops = balanced_partition([sequence_flops(length) for length in lengths], num_parts=2)
    assert sorted(len(part) for part in by_tokens) == [1, 10]
    work = [sum(sequence_flops(lengths[index]) for index in part) for part in by_flops]
    assert max(work) == sequence_flops(100_000)
    assert sequence_flops(100_000) > sum(sequence_flops(10_000) for _ in range(10))


def test_flops_are_counted_as_by_hand() -> None:
    shape = TransformerShape(
        num_layers=2, hidden_size=8, intermediate_size=16, vocab_size=32, num_heads=3, num_key_value_heads=1, head_dim=4
    )
    projections = 2 * (8 * 12 + 8 * 4 + 8 * 4 + 12 * 8)
    mlp = 2 * 3 * 8 * 16
    attention_pairs = 10 * 10 / 2
    attention = 2 * 2 * 12 * attention_pairs
    assert sequence_flops(10, shape=shape) == 2 * (10 * (projections + mlp) + attention) + 10 * 2 * 8 * 32


def test_groups_take_what_their_sequences_take_in_each_model() -> None:
    other = replace(TYPICAL_SHAPE, hidden_size=896, num_heads=8)
    groups = [[10, 2000, 7], [], [31]]
    assert forward_flops(groups, [TYPICAL_SHAPE, other, other]) == [
        pytest.approx(sum(sequence_flops(n) + 2 * sequence_flops(n, shape=other) for n in group)) for group in groups
    ]
