"""Continuous batching as a state machine: first come, first served, within the rows and the rectangle of the cache."""

from collections.abc import Iterable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from corral.workers.engine.requests import ActiveRequest, BatchScheduler, GenerationRequest
from corral.workers.engine.sampling import SamplingParams, TokenUniforms


def request(name: int, *, reserved: int) -> ActiveRequest:
    """Its prompt takes all that it reserves but one token."""
    sampling = SamplingParams(max_new_tokens=1)
    return ActiveRequest(
        request=GenerationRequest(request_id=str(name), prompt=(0,) * (reserved - 1), sampling=sampling),
        stop_token_ids=frozenset(),
        stop_strings=None,
        uniforms=TokenUniforms.of(0),
    )


def scheduler_of(*reserved: int, rows: int = 3, tokens: int = 100, least_likeness: float = 0.0) -> BatchScheduler:
    scheduler = BatchScheduler(max_running_requests=rows, max_total_tokens=tokens, least_likeness=least_likeness)
    for name, size in enumerate(reserved):
        scheduler.add(request(name, reserved=size))
    return scheduler


def name_of(active: ActiveRequest) -> int:
    return int(active.request.request_id)


def has_name(name: int, active: ActiveRequest) -> bool:
    return name_of(active) == name


def names(requests: Iterable[ActiveRequest]) -> list[int]:
    return [name_of(active) for active in requests]


def test_requests_are_admitted_in_order_until_the_rows_are_full() -> None:
    scheduler = scheduler_of(10, 10, 10, 10)
    assert names(scheduler.admit()) == [0, 1, 2]
    assert len(scheduler.waiting) == 1


def test_the_longest_reservation_counts_for_every_row() -> None:
    scheduler = scheduler_of(10, 50, 10)
    assert names(scheduler.admit()) == [0, 1]  # a third row would make 3 x 50 > 100


def test_a_long_request_is_not_passed_over_by_short_ones() -> None:
    scheduler = scheduler_of(10, 100, 10)
    assert names(scheduler.admit()) == [0]
    scheduler.remove(0)
    assert names(scheduler.admit()) == [1]


def test_the_last_row_moves_into_the_gap() -> None:
    scheduler = scheduler_of(10, 10, 10)
    scheduler.admit()
    assert scheduler.remove(0) == [(2, 0)]
    assert names(scheduler.running) == [2, 1]
    assert scheduler.remove(1) == []


def test_rows_of_like_length_move_into_gaps_where_order_is_of_use() -> None:
    scheduler = scheduler_of(90, 85, 80, 40, 39, 10, 9, rows=7, tokens=1000, least_likeness=0.75)
    scheduler.admit()
    # 80 is like 90, nothing later is like 80, so the next takes its place: 40 is followed by 39, 39 by the next, 10.
    assert scheduler.remove(0) == [(2, 0), (3, 2), (4, 3), (5, 4), (6, 5)]
    assert [active.reserved_tokens for active in scheduler.running] == [80, 85, 40, 39, 10, 9]
    assert scheduler.remove(4) == [(5, 4)]
    assert scheduler.remove(4) == []


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    rows=st.lists(st.integers(0, 11), max_size=12),
    least_likeness=st.sampled_from([0.0, 0.5, 0.75, 1.0]),
)
def test_moves_take_what_rows_hold_to_where_their_requests_are(
    lengths: list[int], rows: list[int], least_likeness: float
) -> None:
    scheduler = scheduler_of(*lengths, rows=12, tokens=2000, least_likeness=least_likeness)
    scheduler.admit()
    cache = names(scheduler.running)
    for row in (row % len(scheduler.running) for row in rows[: len(lengths) - 1]):
        for source, target in scheduler.remove(row):
            assert source > target
            cache[target] = cache[source]
        assert cache[: len(scheduler.running)] == names(scheduler.running)


def test_retracted_requests_go_before_those_that_waited() -> None:
    scheduler = scheduler_of(10, 10, 10, 10)
    scheduler.admit()
    assert names(scheduler.retract()) == [0, 1, 2]
    assert names(scheduler.admit()) == [0, 1, 2]


@given(
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 60)),
            st.tuples(st.sampled_from(["admit", "retract"]), st.just(0)),
            st.tuples(st.sampled_from(["remove", "withdraw"]), st.integers(0, 100)),
        ),
        max_size=60,
    ),
    rows=st.integers(1, 5),
)
def test_no_request_is_lost_doubled_or_run_beyond_the_limits(operations: list[tuple[str, int]], rows: int) -> None:
    scheduler = scheduler_of(rows=rows, tokens=120)
    alive: set[int] = set()
    for name, (operation, value) in enumerate(operations):
        match operation:
            case "add":
                scheduler.add(request(name, reserved=value))
                alive.add(name)
            case "admit":
                scheduler.admit()
            case "retract":
                scheduler.retract()
            case "remove" if scheduler.running:
                row = value % len(scheduler.running)
                alive.discard(name_of(scheduler.running[row]))
                scheduler.remove(row)
            case "withdraw":
                alive.difference_update(names(scheduler.withdraw(partial(has_name, value))))
        present = [*names(scheduler.running), *names(scheduler.waiting)]
        assert sorted(present) == sorted(alive)
        assert len(scheduler.running) <= rows
        assert len(scheduler.running) * scheduler.longest_reserved <= 120
    for _ in range(len(alive)):  # every waiting request runs once the rows before it are free
        if not scheduler.running:
            assert scheduler.admit()
        alive.discard(name_of(scheduler.running[0]))
        scheduler.remove(0)
    assert not alive
