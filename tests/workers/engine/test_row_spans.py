"""Rows of like length are attended together: each position once, at the least cost, as each row alone would be."""

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from corral.workers.engine.attention import KVCache, RowSpan, RowSpans, TokenAttention, call_cost, cut_rows

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def cost_of(lengths: Sequence[int], stops: Sequence[int], *, call_cost: int) -> int:
    starts = [0, *stops[:-1]]
    return sum(call_cost + (stop - start) * max(lengths[start:stop]) for start, stop in zip(starts, stops, strict=True))


@given(lengths=LENGTHS, call_cost=st.integers(0, 60))
def test_no_other_cuts_are_cheaper(lengths: list[int], call_cost: int) -> None:
    stops = cut_rows(lengths, call_cost=call_cost)
    assert stops == sorted(set(stops)) and stops[-1] == len(lengths)
    every_way = (
        [*inner, len(lengths)]
        for num_inner in range(len(lengths))
        for inner in combinations(range(1, len(lengths)), num_inner)
    )
    least = min(cost_of(lengths, stops, call_cost=call_cost) for stops in every_way)
    assert cost_of(lengths, stops, call_cost=call_cost) == least


@given(lengths=LENGTHS, other=LENGTHS, num_steps=st.integers(0, 5), call_cost=st.integers(0, 60))
def test_spans_follow_rows_that_grow_join_and_leave(
    lengths: list[int], other: list[int], num_steps: int, call_cost: int
) -> None:
    spans = RowSpans(call_cost=call_cost)
    for first in (lengths, other, lengths):
        for step in range(num_steps + 1):
            now = [length + step for length in first]
            assert spans.of(now) == RowSpans(call_cost=call_cost).of(now)
            assert [row for span in spans.of(now) for row in range(span.start, span.stop)] == list(range(len(now)))
            for span in spans.of(now):
                inside = now[span.start : span.stop]
                assert (span.shortest, span.longest) == (min(inside), max(inside))


def test_where_a_call_costs_nothing_rows_are_read_to_their_own_end_and_else_in_one_call() -> None:
    lengths = [9, 9, 2, 3, 3, 9]
    assert cut_rows(lengths, call_cost=0) == [2, 3, 5, 6]
    assert RowSpans(call_cost=None).of(lengths) == [RowSpan(0, 6, 2, 9)]
    assert RowSpans(call_cost=1000).of(lengths) == [RowSpan(0, 6, 2, 9)]


NUM_LAYERS, NUM_KV_HEADS, GROUP, HEAD_DIM = 2, 2, 3, 8


def row_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One row, [K, G, D] over [K, length, D] -> [K * G * D], in float64 by the definition."""
    queries, keys, values = queries.double(), keys.double(), values.double()
    heads = []
    for kv_head, group in enumerate(queries):
        for query in group:
            weights = torch.softmax(keys[kv_head] @ query * HEAD_DIM**-0.5, dim=0)
            heads.append(weights @ values[kv_head])
    return torch.cat(heads)


@pytest.mark.parametrize("stops", [[7], [1, 7], [3, 5, 7], [1, 2, 3, 4, 5, 6, 7]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_attention_in_spans_is_that_of_each_row_over_its_own_past(
    stops: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    lengths = [20, 20, 33, 2, 1, 33, 7]
    empty = torch.empty(0, NUM_KV_HEADS, 0, HEAD_DIM, dtype=dtype)
    cache = KVCache(empty, num_layers=NUM_LAYERS, max_rows=8, max_total_tokens=8 * 64)
    cache.reserve(num_rows=len(lengths), length=max(lengths), longest_reserved=64)
    past = torch.randn(2, NUM_LAYERS, len(lengths), NUM_KV_HEADS, max(lengths), HEAD_DIM, dtype=dtype)
    for layer in range(NUM_LAYERS):
        for row in range(len(lengths)):
            keys, values = past[:, layer, row : row + 1]
            cache.write(layer, row=row, start=0, keys=keys, values=values)
    starts = [0, *stops[:-1]]
    attend = TokenAttention(
        cache,
        positions=torch.tensor(lengths) - 1,
        spans=[
            RowSpan(start, stop, min(lengths[start:stop]), max(lengths[start:stop]))
            for start, stop in zip(starts, stops, strict=True)
        ],
        dtype=dtype,
        softmax_scale=HEAD_DIM**-0.5,
    )
    for layer in range(NUM_LAYERS):
        queries = torch.randn(len(lengths), NUM_KV_HEADS * GROUP, HEAD_DIM, dtype=dtype)
        keys, values = torch.randn(2, len(lengths), NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
        output = attend(layer, queries, keys, values)
        for row, length in enumerate(lengths):
            row_keys, row_values = past[:, layer, row, :, :length].clone()
            row_keys[:, -1], row_values[:, -1] = keys[row], values[row]
            expected = row_attention(queries[row].view(NUM_KV_HEADS, GROUP, HEAD_DIM), row_keys, row_values)
            torch.testing.assert_close(output[row].double(), expected, atol=tolerance, rtol=0)


def test_a_call_costs_as_much_as_fewer_positions_the_larger_they_are() -> None:
    def cost(num_kv_heads: int) -> int | None:
        return call_cost(KVCache(torch.empty(0, num_kv_heads, 0, 32), num_layers=1, max_rows=1, max_total_tokens=1))

    assert (cost(4), cost(8)) == (256, 128)
