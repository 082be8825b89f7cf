"""Meshes: who stands where in a role's layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.parallel import Mesh, ParallelDims

layouts = st.builds(
    ParallelDims, dp=st.integers(1, 4), tp=st.integers(1, 3), pp=st.integers(1, 3), cp=st.integers(1, 3)
)


@given(layouts, st.randoms(use_true_random=False))
def test_every_rank_works_for_one_data_parallel_rank_and_so_does_its_head(dims, random) -> None:  # type: ignore[no-untyped-def]
    ranks = random.sample(range(200), dims.world_size)
    mesh = Mesh(ranks=tuple(ranks), dims=dims)
    groups = [mesh.ranks_of_dp(dp_rank) for dp_rank in range(dims.dp)]
    assert sorted(rank for group in groups for rank in group) == sorted(ranks)
    for dp_rank, (group, head) in enumerate(zip(groups, mesh.dp_heads, strict=True)):
        assert head in group
        assert {mesh.coords(rank).dp_rank for rank in group} == {dp_rank}
        assert mesh.coords(head)[1:] == (0, dims.pp - 1, 0)


def test_a_mesh_knows_who_is_in_it() -> None:
    mesh = Mesh(ranks=(2, 3), dims=ParallelDims(dp=2))
    assert (2 in mesh, 1 in mesh, str(mesh)) == (True, False, "d2t1p1 on model_worker/2-3")
    with pytest.raises(ValueError, match="model_worker/1 is not in the mesh of model_worker/2-3"):
        mesh.coords(1)


@pytest.mark.parametrize(("ranks", "reason"), [((0,), "needs 2 ranks, got 1"), ((1, 1), "each of its ranks once")])
def test_ranks_that_do_not_fill_the_layout_are_refused(ranks: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Mesh(ranks=ranks, dims=ParallelDims(dp=2))
