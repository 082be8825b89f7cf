"""Parallel layouts: ranks and coordinates are inverse, neighbours are tensor-parallel, heads sit in the last stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.parallel import ParallelCoords, ParallelDims, stage_layers

sizes = st.integers(1, 4)


@st.composite
def _layouts(draw: st.DrawFn) -> ParallelDims:
    dp, tp, pp, cp = (draw(sizes) for _ in range(4))
    divisors = [ep for ep in range(1, dp * cp + 1) if dp * cp % ep == 0]
    return ParallelDims(dp=dp, tp=tp, pp=pp, cp=cp, ep=draw(st.sampled_from(divisors)))


layouts = _layouts()


def rank_of(dims: ParallelDims, *, dp_rank: int, tp_rank: int, pp_rank: int, cp_rank: int) -> int:
    return ((pp_rank * dims.dp + dp_rank) * dims.cp + cp_rank) * dims.tp + tp_rank


@given(layouts)
def test_ranks_and_coordinates_are_inverse_and_complete(dims: ParallelDims) -> None:
    coords = [dims.coords(rank) for rank in range(dims.world_size)]
    assert len(set(coords)) == dims.dp * dims.tp * dims.pp * dims.cp
    assert [rank_of(dims, **at._asdict()) for at in coords] == list(range(dims.world_size))


@given(layouts)
def test_every_rank_works_for_exactly_one_dp_rank(dims: ParallelDims) -> None:
    ranks = [rank for dp_rank in range(dims.dp) for rank in dims.ranks_of_dp(dp_rank)]
    assert sorted(ranks) == list(range(dims.world_size))
    for dp_rank, head in enumerate(dims.dp_heads):
        assert list(dims.ranks_of_dp(dp_rank)) == [
            r for r in range(dims.world_size) if dims.coords(r).dp_rank == dp_rank
        ]
        assert dims.coords(head) == ParallelCoords(dp_rank=dp_rank, tp_rank=0, pp_rank=dims.pp - 1)


@given(layouts)
def test_ranks_that_talk_more_are_closer(dims: ParallelDims) -> None:
    at = {"dp_rank": dims.dp - 1, "tp_rank": 0, "pp_rank": dims.pp - 1, "cp_rank": 0}
    first = rank_of(dims, **at)
    tensor = [rank_of(dims, **at | {"tp_rank": tp_rank}) for tp_rank in range(dims.tp)]
    context = [rank_of(dims, **at | {"cp_rank": cp_rank}) for cp_rank in range(dims.cp)]
    assert tensor == list(range(first, first + dims.tp))
    assert context == list(range(first, first + dims.tp * dims.cp, dims.tp))


@given(layouts)
def test_experts_are_spread_over_the_neighbours_that_have_all_else_alike(dims: ParallelDims) -> None:
    at = {rank: dims.expert_coords(rank) for rank in range(dims.world_size)}
    assert len(set(at.values())) == dims.world_size
    for rank, expert_coords in at.items():
        coords = dims.coords(rank)
        assert expert_coords[2:] == (coords.tp_rank, coords.pp_rank)
        with_other_experts = [
            r for r, other in at.items() if other._replace(ep_rank=expert_coords.ep_rank) == expert_coords
        ]
        first = with_other_experts[0]
        assert with_other_experts == list(range(first, first + dims.ep * dims.tp, dims.tp))
        assert [at[r].ep_rank for r in with_other_experts] == list(range(dims.ep))


def test_a_layout_of_eight_has_the_documented_ranks() -> None:
    dims = ParallelDims(dp=2, tp=2, pp=2)
    assert (dims.world_size, dims.dp_heads) == (8, (4, 6))
    assert dims.coords(6) == ParallelCoords(dp_rank=1, tp_rank=0, pp_rank=1)
    assert dims.ranks_of_dp(0) == (0, 1, 4, 5)


@given(layouts)
def test_a_layout_reads_back(dims: ParallelDims) -> None:
    assert ParallelDims.parse(str(dims)) == dims


@pytest.mark.parametrize("text", ["d4m2p1", "p1d4t2", "t2d4"])
def test_letters_may_come_in_any_order_and_m_is_t(text: str) -> None:
    assert ParallelDims.parse(text) == ParallelDims(dp=4, tp=2, pp=1)


def test_context_parallelism_is_spelled_where_there_is_any() -> None:
    dims = ParallelDims.parse("c2d4")
    assert (dims, str(dims), dims.short) == (ParallelDims(dp=4, cp=2), "d4t1p1c2", "d4c2")
    assert (str(ParallelDims(dp=4)), dims.world_size, dims.dp_heads) == ("d4t1p1", 8, (0, 2, 4, 6))


def test_expert_parallelism_adds_no_ranks_and_is_spelled_where_there_is_any() -> None:
    dims = ParallelDims.parse("d4e2")
    assert (dims.world_size, str(dims), dims.short) == (4, "d4t1p1e2", "d4e2")
    assert ParallelDims.parse("d2c2e4").ep == 4
    with pytest.raises(ValueError, match="e3 does not divide the 4 ranks of d2 x c2"):
        ParallelDims.parse("d2c2e3")


@pytest.mark.parametrize(
    "text", ["", "d0", "d", "4", "d4d2", "d4t2m2", "c2c2", "d4x2", "d4oops", "D4", "d-1", "d04", " d4"]
)
def test_other_layouts_are_refused_with_the_value(text: str) -> None:
    with pytest.raises(ValueError) as refusal:
        ParallelDims.parse(text)
    assert repr(text) in str(refusal.value)


def test_errors_name_rank_range_and_layout() -> None:
    dims = ParallelDims(dp=2, tp=3, pp=1)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 6\), got -1"):
        dims.coords(-1)
    with pytest.raises(ValueError, match="tp must be at least 1, got 0"):
        ParallelDims(tp=0)


@pytest.mark.parametrize(
    ("num_layers", "stages", "counts"),
    [
        (8, 4, [2, 2, 2, 2]),
        (94, 4, [23, 24, 24, 23]),
        (94, 8, [11, *[12] * 6, 11]),
        (3, 2, [2, 1]),
        (5, 1, [5]),
        (3, 3, [1, 1, 1]),
        (13, 8, [13, *[0] * 7]),  # two each leave the ends one
    ],
)
def test_stages_at_the_ends_have_fewer_layers_where_all_cannot_have_as_many(
    num_layers: int, stages: int, counts: list[int]
) -> None:
    layers = stage_layers(num_layers, stages)
    assert [len(stage) for stage in layers] == counts
    assert [layer for stage in layers for layer in stage] == list(range(num_layers))
