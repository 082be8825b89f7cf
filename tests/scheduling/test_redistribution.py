"""Every rank gets what it lacks, once, from a rank that has it, and each byte comes to a host once."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.redistribution import Demand, Locations, Transfer, plan_redistribution

Item = tuple[str, str]
Situation = tuple[dict[str, dict[str, frozenset[int]]], list[Demand], dict[int, str] | None]

UIDS = ("0:a", "0:b", "0:c", "0:d")
KEYS = ("input_ids", "rewards", "values")
ranks = st.integers(0, 5)
locations = st.fixed_dictionaries(
    {uid: st.fixed_dictionaries({key: st.frozensets(ranks, min_size=1) for key in KEYS}) for uid in UIDS}
)
demands = st.builds(
    Demand,
    ranks=st.sets(ranks, min_size=1).map(lambda chosen: tuple(sorted(chosen))),
    uids=st.lists(st.sampled_from(UIDS), unique=True),
    keys=st.lists(st.sampled_from(KEYS), unique=True),
)
hosts = st.none() | st.fixed_dictionaries({rank: st.sampled_from("ABC") for rank in range(6)})
situations = st.tuples(locations, st.lists(demands, max_size=5), hosts)


def same_size(uid: str, keys: Sequence[str]) -> int:
    return len(keys)


def plan(located: Locations, wanted: Sequence[Demand], host_by_rank: Mapping[int, str] | None) -> list[Transfer]:
    return plan_redistribution(located, wanted, size_bytes=same_size, host_by_rank=host_by_rank)


def lacking(located: Locations, wanted: Sequence[Demand]) -> set[tuple[int, Item]]:
    return {
        (rank, (uid, key))
        for demand in wanted
        for rank in demand.ranks
        for uid in demand.uids
        for key in demand.keys
        if rank not in located[uid][key]
    }


def items(transfer: Transfer) -> list[Item]:
    return [(uid, key) for uid in transfer.uids for key in transfer.keys]


@given(situations)
def test_every_rank_gets_what_it_lacks_exactly_once(situation: Situation) -> None:
    located, wanted, host_by_rank = situation
    arrivals = Counter(
        (rank, item)
        for transfer in plan(located, wanted, host_by_rank)
        for rank in transfer.destinations
        for item in items(transfer)
    )
    assert arrivals == Counter(lacking(located, wanted))


@given(situations)
def test_every_rank_sends_what_it_has_and_passes_on_what_it_gets(situation: Situation) -> None:
    located, wanted, host_by_rank = situation
    transfers = plan(located, wanted, host_by_rank)
    held = {(rank, (uid, key)) for uid, of_uid in located.items() for key, of_key in of_uid.items() for rank in of_key}
    got = {
        (rank, item)
        for transfer in transfers
        if not transfer.is_passed_on
        for rank in transfer.destinations
        for item in items(transfer)
    }
    for transfer in transfers:
        assert {(transfer.source, item) for item in items(transfer)} <= (got if transfer.is_passed_on else held)


@given(situations)
def test_every_item_comes_to_a_host_that_lacks_it_once_and_to_no_other(situation: Situation) -> None:
    located, wanted, host_by_rank = situation
    host = host_by_rank or dict.fromkeys(range(6), "A")
    crossings: Counter[tuple[str, Item]] = Counter()
    for transfer in plan(located, wanted, host_by_rank):
        where = {host[rank] for rank in transfer.destinations}
        assert len(where) == 1
        if where != {host[transfer.source]}:
            assert len(transfer.destinations) == 1 and not transfer.is_passed_on
            crossings.update((where.copy().pop(), item) for item in items(transfer))
    hosts_of: defaultdict[Item, set[str]] = defaultdict(set)
    for uid, of_uid in located.items():
        for key, holders in of_uid.items():
            hosts_of[uid, key] = {host[rank] for rank in holders}
    needed = {(host[rank], item) for rank, item in lacking(located, wanted) if host[rank] not in hosts_of[item]}
    assert crossings == Counter(needed)


@given(situations)
def test_the_plan_does_not_depend_on_the_order_of_what_is_known(situation: Situation) -> None:
    located, wanted, host_by_rank = situation
    transfers = plan(located, wanted, host_by_rank)
    turned = {uid: dict(reversed(of_uid.items())) for uid, of_uid in reversed(located.items())}
    assert plan(turned, wanted[::-1], host_by_rank) == transfers
    assert [transfer.tag for transfer in transfers] == list(range(len(transfers)))


@given(locations, st.integers(0, 5), st.integers(0, 5))
def test_all_keys_of_a_sample_come_in_one_message_where_one_rank_has_them(
    located: dict[str, dict[str, frozenset[int]]], holder: int, taker: int
) -> None:
    for of_uid in located.values():
        for key, holders in of_uid.items():
            of_uid[key] = (holders | {holder}) - {taker}
        of_uid["input_ids"] = frozenset((holder,)) - {taker}
    wanted = [Demand(ranks=(taker,), uids=UIDS, keys=KEYS)]
    if holder != taker:
        assert plan(located, wanted, None) == [
            Transfer(tag=0, source=holder, destinations=(taker,), uids=UIDS, keys=tuple(sorted(KEYS)))
        ]


def test_between_hosts_the_first_rank_that_gets_something_passes_it_on() -> None:
    located = {"0:a": {"input_ids": frozenset({0}), "rewards": frozenset({0})}}
    wanted = [Demand(ranks=(1, 2, 3), uids=("0:a",), keys=("rewards", "input_ids"))]
    transfers = plan_redistribution(
        located, wanted, size_bytes=same_size, host_by_rank={0: "A", 1: "A", 2: "B", 3: "B"}, first_tag=7
    )
    both = ("input_ids", "rewards")
    assert transfers == [
        Transfer(tag=7, source=0, destinations=(1,), uids=("0:a",), keys=both),
        Transfer(tag=8, source=0, destinations=(2,), uids=("0:a",), keys=both),
        Transfer(tag=9, source=2, destinations=(3,), uids=("0:a",), keys=both, is_passed_on=True),
    ]


def test_a_holder_on_the_same_host_sends() -> None:
    located = {f"0:{number}": {"input_ids": frozenset({0, 2})} for number in range(8)}
    wanted = [Demand(ranks=(3,), uids=tuple(located), keys=("input_ids",))]
    (transfer,) = plan(located, wanted, {0: "A", 2: "B", 3: "B"})
    assert (transfer.source, transfer.destinations) == (2, (3,))


def test_sources_share_bytes() -> None:
    size = {f"0:{number}": size for number, size in enumerate([100, 20, 30, 50])}
    located = {uid: {"input_ids": frozenset({0, 1})} for uid in size}
    wanted = [Demand(ranks=(2,), uids=tuple(size), keys=("input_ids",))]
    transfers = plan_redistribution(located, wanted, size_bytes=lambda uid, keys: size[uid])
    assert {transfer.source: sum(size[uid] for uid in transfer.uids) for transfer in transfers} == {0: 100, 1: 100}


def test_what_nobody_has_is_named_with_who_wants_it() -> None:
    wanted = [Demand(ranks=(1, 2), uids=("0:a",), keys=("values",))]
    with pytest.raises(ValueError, match=r"no rank holds 'values' of '0:a' \(for ranks \[1, 2\]\)"):
        plan({"0:a": {"input_ids": frozenset({0})}}, wanted, None)
    many = [Demand(ranks=(1,), uids=tuple(f"0:{number}" for number in range(8)), keys=("x",))]
    with pytest.raises(ValueError, match="and 3 more"):
        plan({"0:0": {"x": frozenset()}}, many, None)
