"""Rows cut over context-parallel ranks: put together again, the parts say what the whole row said."""

from itertools import accumulate

import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.keys import KeyLayout
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends.context_parallel import RowPart, cut_row
from corral.workers.backends.micro_batches import MicroBatch, make_micro_batches, plan_micro_batches
from tests.workers.backends.training_helpers import make_sample

lengths = st.lists(st.integers(2, 12), min_size=1, max_size=6)


def row_of(answers: list[int]) -> MicroBatch:
    sample = make_sample([answers], prompt_length=1)
    (row,) = make_micro_batches(
        sample, plan_micro_batches(sample, MicroBatchSpec()), count=1, device=torch.device("cpu")
    )
    return row


def parts_of(row: MicroBatch, num_ranks: int) -> list[RowPart]:
    return [cut_row(row, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]


@given(lengths, st.integers(1, 5))
def test_parts_are_equally_long_and_make_the_row_with_padding_behind_it(answers: list[int], num_ranks: int) -> None:
    row = row_of(answers)
    parts = [part.micro_batch for part in parts_of(row, num_ranks)]
    assert len({part.input_ids.shape for part in parts}) == 1
    num_tokens = row.input_ids.shape[0]
    for field in ("input_ids", "position_ids"):
        joined = torch.cat([getattr(part, field) for part in parts])
        assert joined[:num_tokens].equal(getattr(row, field))
        assert not joined[num_tokens:].any() and len(joined) - num_tokens < num_ranks
    for part in parts:
        bounds = [0, *accumulate(part.segment_lengths)]
        assert bounds[-1] == num_ranks * parts[0].input_ids.shape[0]
        assert part.cu_seqlens.tolist() == bounds and part.cu_seqlens.dtype == torch.int32


@given(lengths, st.integers(1, 3), st.integers(1, 4))
def test_parts_are_as_long_as_those_who_share_them_need(answers: list[int], num_ranks: int, multiple: int) -> None:
    row = row_of(answers)
    parts = [cut_row(row, rank=rank, num_ranks=num_ranks, part_multiple=multiple) for rank in range(num_ranks)]
    (width,) = {part.micro_batch.input_ids.shape[0] for part in parts}
    assert width % multiple == 0 and 0 <= num_ranks * width - row.input_ids.shape[0] < num_ranks * multiple
    for part in parts:
        assert sum(part.micro_batch.segment_lengths) == num_ranks * width
        assert sum(part.counts[KeyLayout.PER_TOKEN]) == row.input_ids.shape[0]


@given(lengths, st.integers(1, 5))
def test_each_token_is_predicted_by_the_rank_that_has_the_one_before_it(answers: list[int], num_ranks: int) -> None:
    row = row_of(answers)
    parts = parts_of(row, num_ranks)
    width = parts[0].micro_batch.input_ids.shape[0]
    for places, field in ((row.predicting, "predicting"), (row.last_tokens, "last_tokens")):
        own = [getattr(part.micro_batch, field) for part in parts]
        assert all(bool((places >= 0).all() and (places < width).all()) for places in own)
        assert torch.cat([own + part.rank * width for own, part in zip(own, parts, strict=True)]).equal(places)
    assert torch.cat([part.micro_batch.labels for part in parts]).equal(row.labels)


@given(lengths, st.integers(1, 5))
def test_every_rank_knows_how_many_scores_each_has(answers: list[int], num_ranks: int) -> None:
    row = row_of(answers)
    parts = parts_of(row, num_ranks)
    width, num_tokens = parts[0].micro_batch.input_ids.shape[0], row.input_ids.shape[0]
    expected = {
        KeyLayout.PER_SHIFTED_TOKEN: [len(part.micro_batch.labels) for part in parts],
        KeyLayout.PER_ANSWER: [len(part.micro_batch.last_tokens) for part in parts],
        KeyLayout.PER_TOKEN: [
            len(range(rank * width, min((rank + 1) * width, num_tokens))) for rank in range(num_ranks)
        ],
    }
    for part in parts:
        assert {layout: list(counts) for layout, counts in part.counts.items()} == expected
