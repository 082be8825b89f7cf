"""Samples go from any owners to any ranks, once and bit for bit, whatever they are doing; or an error names a rank."""

import itertools
import multiprocessing
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral.scheduling.keys import BUILT_IN_KEYS, Key
from corral.scheduling.redistribution import Demand, Transfer
from corral.workers.backends.parallel_context import connect_store, host_store
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.model.data_plane import DataPlane
from corral.workers.model.data_store import DataStore
from corral.workers.model.network import TransferError
from tests.workers.model.planes import (
    DEADLINE_S,
    Rank,
    connected_ranks,
    counted_bytes,
    on_all,
    plan_for,
    random_sample,
    redistribute,
)

WIDE = {
    "test_positions": Key("test_positions", "per_token", "int64"),
    "test_halves": Key("test_halves", "per_shifted_token", "int16"),
    "test_experts": Key("test_experts", "per_token", "int16", (2, 3)),
}
SPECS = {**BUILT_IN_KEYS, **WIDE}
KEYS = ("input_ids", "prompt_mask", "old_logprobs", "rewards", *WIDE)
UIDS = ("0:a", "0:b", "0:c", "0:d", "0:e")
LAYOUTS = {"apart": "ABCD", "together": "AAAA", "pairs": "AABB"}


@dataclass
class Group:
    """Four ranks on some hosts, and the numbers that their transfers have not had."""

    hosts: str
    ranks: list[Rank]
    tags: "itertools.count[int]"


@pytest.fixture(scope="module", params=LAYOUTS)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    hosts = LAYOUTS[request.param]
    with connected_ranks(hosts, specs=SPECS) as ranks:
        yield Group(hosts, ranks, itertools.count(step=1000))


numbers = st.integers(0, 3)
demands = st.builds(
    Demand,
    ranks=st.sets(numbers, min_size=1).map(lambda ranks: tuple(sorted(ranks))),
    uids=st.lists(st.sampled_from(UIDS), unique=True),
    keys=st.lists(st.sampled_from(KEYS), unique=True),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.fixed_dictionaries({uid: st.lists(st.integers(1, 3000), min_size=1, max_size=3) for uid in UIDS}),
    owners=st.fixed_dictionaries({(uid, key): st.sets(numbers, min_size=1) for uid in UIDS for key in KEYS}),
    wanted=st.lists(demands, max_size=4),
    takes_first=st.sets(numbers),
)
def test_any_ownership_becomes_any_layout_bit_for_bit(
    group: Group,
    lengths: dict[str, list[int]],
    owners: dict[tuple[str, str], set[int]],
    wanted: list[Demand],
    takes_first: set[int],
) -> None:
    samples = {uid: random_sample(uid, lengths[uid], KEYS, SPECS) for uid in UIDS}
    for rank in group.ranks:
        rank.store.drop(UIDS)
    for (uid, key), holders in owners.items():
        for number in holders:
            group.ranks[number].store.put(samples[uid].select_keys([key]))
    plan = plan_for(group.ranks, wanted, group.hosts, first_tag=next(group.tags))
    with counted_bytes() as sent_bytes:
        redistribute(group.ranks, plan, lengths, takes_first=sorted(takes_first))

    expected = {(number, place) for place, holders in owners.items() for number in holders}
    needed = {(n, (uid, key)) for demand in wanted for n in demand.ranks for uid in demand.uids for key in demand.keys}
    held = {(n, place) for n in range(4) for place in owners if group.ranks[n].store.holds(*place)}
    assert held >= expected | needed
    for number, (uid, key) in needed:
        assert_same(group.ranks[number].store.gather([uid], [key]), samples[uid], key)
    lacking = sum(samples[uid].data[key].nbytes for _, (uid, key) in needed - expected)
    if group.hosts == LAYOUTS["apart"]:
        assert held == expected | needed
        assert sum(sent_bytes()) == lacking
    if group.hosts == LAYOUTS["together"]:
        assert held == expected | needed
        assert sum(sent_bytes()) == 24 * len(needed - expected)  # where it lies, and no values


def assert_same(actual: SequenceSample, expected: SequenceSample, key: str) -> None:
    assert actual.data[key].dtype == expected.data[key].dtype
    assert actual.data[key].tobytes() == expected.data[key].tobytes()
    assert actual.seqlens[key] == expected.seqlens[key]


def test_values_cross_to_a_host_once_and_are_passed_on_there() -> None:
    sample = random_sample("0:a", [500, 20], KEYS, SPECS)
    hosts = "ABBB"
    with connected_ranks(hosts, specs=SPECS) as ranks:
        ranks[0].store.put(sample)
        wanted = [Demand(ranks=(1, 2, 3), uids=["0:a"], keys=KEYS)]
        with counted_bytes() as sent_bytes:
            redistribute(ranks, plan_for(ranks, wanted, hosts), {"0:a": [500, 20]})
        for rank in ranks[1:]:
            for key in KEYS:
                assert_same(rank.store.gather(["0:a"], [key]), sample, key)
        size_bytes = sum(array.nbytes for array in sample.data.values())
        assert sent_bytes() == [size_bytes, 2 * 24 * len(KEYS), 0, 0]  # the second one says where it lies


def test_a_rank_whose_main_thread_is_busy_still_gives() -> None:
    sample = random_sample("0:a", [7], KEYS, SPECS)
    with connected_ranks("AB", specs=SPECS) as ranks:
        ranks[0].store.put(sample)
        plan = plan_for(ranks, [Demand(ranks=(1,), uids=["0:a"], keys=KEYS)], "AB")
        taken = threading.Event()
        was_taken: list[bool] = []

        def play(number: int, rank: Rank) -> None:
            if number == 0:  # computes until the other one has what it needs
                io_thread = threading.Thread(target=rank.plane.give, args=(plan,))
                io_thread.start()
                was_taken.append(taken.wait(30.0))
                io_thread.join()
            else:
                rank.plane.take(plan, {"0:a": [7]})
                taken.set()

        on_all(ranks, play)
        assert was_taken == [True]
        assert_same(ranks[1].store.gather(["0:a"], ["input_ids"]), sample, "input_ids")


def test_what_was_given_is_what_was_there_when_it_was_given() -> None:
    first, second = random_sample("0:a", [40], ["rewards"]), random_sample("0:a", [41], ["rewards"])
    assert first.data["rewards"] != second.data["rewards"]
    with connected_ranks("AB") as ranks:
        ranks[0].store.put(first)
        plan = plan_for(ranks, [Demand(ranks=(1,), uids=["0:a"], keys=["rewards"])], "AB")
        ranks[0].plane.give(plan)
        ranks[0].store.put(second)
        ranks[0].store.drop(["0:a"])
        ranks[1].plane.take(plan, {"0:a": [40]})
        assert_same(ranks[1].store.gather(["0:a"], ["rewards"]), first, "rewards")


def test_what_is_not_here_is_not_given() -> None:
    with connected_ranks("AB") as ranks, pytest.raises(ValueError, match="'0:a', 'rewards'"):
        ranks[0].plane.give([Transfer(tag=1, source=0, destinations=(1,), uids=("0:a",), keys=("rewards",))])


def test_a_length_that_nobody_said_is_named() -> None:
    transfer = Transfer(tag=1, source=0, destinations=(1,), uids=("0:a",), keys=("rewards",))
    with connected_ranks("AB") as ranks, pytest.raises(ValueError, match=r"\['0:a'\] from rank 0 have no"):
        ranks[1].plane.take([transfer], {})


@pytest.mark.parametrize("hosts", ["AB", "AA"])
def test_a_peer_that_gives_nothing_is_named_with_the_deadline(hosts: str) -> None:
    transfer = Transfer(tag=1, source=0, destinations=(1,), uids=("0:a",), keys=("rewards",))
    with (
        connected_ranks(hosts, timeout_s=1.0) as ranks,
        pytest.raises(TransferError, match=r"rank 1 did not get rewards of 1 samples from rank 0 within 1 s"),
    ):
        ranks[1].plane.take([transfer], {"0:a": [3]})


def test_samples_that_were_dropped_too_early_are_not_taken_for_others() -> None:
    transfer = Transfer(tag=1, source=0, destinations=(1,), uids=("0:a",), keys=("input_ids",))
    with connected_ranks("AA") as ranks:
        ranks[0].store.put(random_sample("0:a", [5_000_000], ["input_ids"]))  # more than a segment holds: its own
        is_gone = threading.Event()
        weakref.finalize(ranks[0].store.arrays(["0:a"], ["input_ids"])[0].base, is_gone.set)
        ranks[0].plane.give([transfer])
        ranks[0].store.drop(["0:a"])
        assert is_gone.wait(DEADLINE_S)  # the transfer server holds it until it has said where it was
        with pytest.raises(TransferError, match="rank 0 has dropped samples before they were taken"):
            ranks[1].plane.take([transfer], {"0:a": [5_000_000]})


def test_a_new_epoch_forgets_what_nobody_took() -> None:
    old, new = random_sample("0:a", [9], ["rewards"]), random_sample("0:a", [10], ["rewards"])
    transfer = Transfer(tag=1, source=0, destinations=(1,), uids=("0:a",), keys=("rewards",))
    with connected_ranks("AB") as ranks:
        ranks[0].store.put(old)
        ranks[0].plane.give([transfer])
        ranks[0].store.put(new)
        on_all(ranks, lambda _, rank: rank.plane.begin(2))
        ranks[0].plane.give([transfer])
        ranks[1].plane.take([transfer], {"0:a": [10]})
        assert_same(ranks[1].store.gather(["0:a"], ["rewards"]), new, "rewards")


def join_and_wait(address: str, ready: Connection) -> None:
    """Rank 1: there, until it is killed."""
    rendezvous = connect_store(address, timeout_s=DEADLINE_S)
    plane = DataPlane(
        DataStore(), rendezvous, rank=1, world_size=2, address="127.0.0.1", host="B", timeout_s=DEADLINE_S
    )
    plane.begin(1)
    ready.send_bytes(b"begun")
    ready.recv_bytes()


def test_a_peer_that_dies_is_named_at_once() -> None:
    rendezvous, address = host_store("127.0.0.1", timeout_s=DEADLINE_S)
    spawn = multiprocessing.get_context("spawn")
    ours, its = spawn.Pipe()
    peer = spawn.Process(target=join_and_wait, args=(address, its))
    peer.start()
    plane = DataPlane(
        DataStore(), rendezvous, rank=0, world_size=2, address="127.0.0.1", host="A", timeout_s=DEADLINE_S
    )
    with closing(plane):
        plane.begin(1)
        assert ours.poll(DEADLINE_S)
        transfer = Transfer(tag=1, source=1, destinations=(0,), uids=("0:a",), keys=("rewards",))
        with ThreadPoolExecutor(1) as thread:
            taking = thread.submit(plane.take, [transfer], {"0:a": [3]})
            peer.kill()
            peer.join(DEADLINE_S)
            with pytest.raises(
                TransferError, match="rank 0 (did not get rewards of 1 samples|cannot receive) from rank 1"
            ):
                taking.result(DEADLINE_S / 2)
