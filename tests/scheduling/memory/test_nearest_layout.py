"""What is proposed in place of a layout that does not fit: it fits, and nothing nearer does."""

from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.parallel import ParallelDims, distance, layouts_of, nearest_layout

MAX_GPUS = 24
EVERY_LAYOUT = [dims for num_gpus in range(1, MAX_GPUS + 1) for dims in layouts_of(num_gpus, spreads_experts=True)]
layouts = st.sampled_from(EVERY_LAYOUT)


@given(layouts, st.sets(layouts), st.sets(layouts), st.integers(1, MAX_GPUS))
def test_the_proposal_fits_and_nothing_nearer_does(
    current: ParallelDims, fitting: set[ParallelDims], runnable: set[ParallelDims], max_gpus: int
) -> None:
    found = nearest_layout(
        current,
        max_gpus=max_gpus,
        may_run=runnable.__contains__,
        fits=fitting.__contains__,
        spreads_experts=True,
    )
    possible = [
        dims
        for dims in EVERY_LAYOUT
        if current.world_size <= dims.world_size <= max_gpus and dims in fitting & runnable and dims != current
    ]
    if found is None:
        assert not possible
    else:
        assert found in possible
        assert all(distance(found, current) <= distance(dims, current) for dims in possible)


@given(st.integers(1, 60))
def test_layouts_of_a_number_of_gpus_are_each_there_once(num_gpus: int) -> None:
    found = list(layouts_of(num_gpus))
    assert len(set(found)) == len(found) and all(dims.world_size == num_gpus for dims in found)
    assert ParallelDims(dp=num_gpus) in found and ParallelDims(tp=num_gpus) in found
    spread = set(layouts_of(num_gpus, spreads_experts=True))
    assert set(found) == {dims for dims in spread if dims.ep == 1}
    assert ParallelDims(dp=num_gpus, ep=num_gpus) in spread


def test_fewer_gpus_come_before_smaller_changes() -> None:
    d4 = ParallelDims(dp=4)
    near = [ParallelDims(dp=2, tp=2), ParallelDims(dp=1, tp=4), ParallelDims(dp=5), ParallelDims(dp=8)]
    assert sorted(reversed(near), key=lambda dims: distance(dims, d4)) == near


def test_what_may_not_run_is_not_asked_whether_it_fits() -> None:
    asked = []

    def fits(dims: ParallelDims) -> bool:
        asked.append(dims)
        return False

    nearest_layout(ParallelDims(dp=2), max_gpus=8, may_run=lambda dims: dims.tp == dims.pp == dims.cp == 1, fits=fits)
    assert asked == [ParallelDims(dp=size) for size in range(3, 9)]
