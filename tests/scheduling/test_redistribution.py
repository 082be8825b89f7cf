"""The plan moves what is missing, once, from one that has it; evenly, and the same on every rank."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.redistribution import Transfer, UidKey, plan_redistribution

items = st.tuples(st.sampled_from(["0:a", "0:b", "0:c", "1:a"]), st.sampled_from(["input_ids", "rewards"]))
ranks = st.integers(0, 4)
locations_of_items = st.dictionaries(items, st.sets(ranks, min_size=1), max_size=8)


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[UidKey, set[int]], dict[int, set[UidKey]]]:
    locations = draw(locations_of_items)
    known = sorted(locations)
    wanted = draw(st.dictionaries(ranks, st.sets(st.sampled_from(known)) if known else st.just(set()), max_size=5))
    return locations, wanted


@given(situations())
def test_every_rank_gets_what_it_lacks_exactly_once(
    situation: tuple[dict[UidKey, set[int]], dict[int, set[UidKey]]],
) -> None:
    locations, wanted = situation
    arrivals: Counter[tuple[int, UidKey]] = Counter()
    for transfer in plan_redistribution(locations, wanted):
        for uid in transfer.uids:
            assert transfer.source in locations[uid, transfer.key]
            arrivals.update((rank, (uid, transfer.key)) for rank in transfer.destinations)
    lacking = {(rank, item) for rank, items in wanted.items() for item in items if rank not in locations[item]}
    assert arrivals == Counter(lacking)


@given(situations())
def test_the_plan_does_not_depend_on_the_order_of_what_is_known(
    situation: tuple[dict[UidKey, set[int]], dict[int, set[UidKey]]],
) -> None:
    locations, wanted = situation
    plan = plan_redistribution(locations, wanted)
    assert plan_redistribution(dict(reversed(locations.items())), dict(reversed(wanted.items()))) == plan
    assert len({(transfer.key, transfer.source, transfer.destinations) for transfer in plan}) == len(plan)


def test_what_goes_the_same_way_goes_together() -> None:
    locations = {("0:b", "input_ids"): {0}, ("0:a", "input_ids"): {0}, ("0:a", "rewards"): {0}}
    wanted = {2: set(locations), 3: {("0:a", "input_ids"), ("0:b", "input_ids")}, 0: set(locations)}
    assert plan_redistribution(locations, wanted) == [
        Transfer(key="input_ids", source=0, destinations=(2, 3), uids=("0:a", "0:b")),
        Transfer(key="rewards", source=0, destinations=(2,), uids=("0:a",)),
    ]


def test_sources_share_the_work() -> None:
    locations = {(f"0:{number}", "input_ids"): {0, 1, 2} for number in range(9)}
    plan = plan_redistribution(locations, {3: set(locations)})
    assert {transfer.source: len(transfer.uids) for transfer in plan} == {0: 3, 1: 3, 2: 3}


def test_sources_share_bytes_where_sizes_are_known() -> None:
    sizes = {(f"0:{number}", "input_ids"): size for number, size in enumerate([100, 20, 30, 50])}
    plan = plan_redistribution({item: {0, 1} for item in sizes}, {2: set(sizes)}, sizes=sizes)
    sent = {transfer.source: sum(sizes[uid, transfer.key] for uid in transfer.uids) for transfer in plan}
    assert sent == {0: 100, 1: 100}


def test_what_nobody_has_is_named_with_who_wants_it() -> None:
    with pytest.raises(ValueError, match=r"no rank holds 'values' of '0:a' \(for ranks \[1, 2\]\)"):
        plan_redistribution({("0:a", "input_ids"): {0}}, {1: {("0:a", "values")}, 2: {("0:a", "values")}})
    with pytest.raises(ValueError, match="and 3 more"):
        plan_redistribution({("0:0", "x"): set()}, {1: {(f"0:{number}", "x") for number in range(8)}})
