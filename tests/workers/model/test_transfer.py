"""Redistribution between three real ranks over gloo: every rank ends up with what it wants, bit for bit."""

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corral.scheduling.redistribution import Transfer, plan_redistribution
from corral.workers.backends.parallel_context import (
    ParallelContext,
    connect_store,
    data_parallel_mesh,
    host_store,
    init_parallel,
)
from corral.workers.data.sequence_sample import KEY_LAYOUTS, SequenceSample
from corral.workers.model.data_store import DataStore
from corral.workers.model.transfer import DataManager, TransferError

WORLD_SIZE = 3
DEADLINE_S = 120.0
KEYS = ("input_ids", "prompt_mask", "old_logprobs", "rewards")
OWNER_BY_UID = {"0:a": 0, "0:b": 1, "0:c": 1, "0:d": 0, "0:e": 2}
LENGTHS_BY_UID = {"0:a": [5, 1000], "0:b": [1], "0:c": [7, 3, 2], "0:d": [2], "0:e": [64, 64]}
WANTED = {
    0: {("0:b", "input_ids"), ("0:c", "rewards"), ("0:a", "input_ids")},
    1: {(uid, key) for uid in LENGTHS_BY_UID for key in KEYS},
    2: {("0:a", key) for key in KEYS} | {("0:b", "old_logprobs")},
}


def make_sample(uid: str) -> SequenceSample:
    """Values that differ between all tokens, ranks and types; token ids beyond float32's integers."""
    rng = np.random.default_rng(ord(uid[-1]))
    lengths = LENGTHS_BY_UID[uid]
    return SequenceSample.from_group(
        uid,
        {
            "input_ids": [rng.integers(2**24, 2**31 - 1, n) for n in lengths],
            "prompt_mask": [rng.random(n) < 0.5 for n in lengths],
            "old_logprobs": [rng.normal(size=n - 1) for n in lengths],
            "rewards": [float(rng.normal()) for _ in lengths],
        },
    )


def plan() -> list[Transfer]:
    locations = {(uid, key): {owner} for uid, owner in OWNER_BY_UID.items() for key in KEYS}
    return plan_redistribution(locations, WANTED)


def metadata() -> SequenceSample:
    return SequenceSample.gather([make_sample(uid) for uid in LENGTHS_BY_UID]).without_data()


def join(rank: int, directory: Path, *, timeout_s: float) -> ParallelContext:
    address_file = directory / "address"
    if rank == 0:
        store, address = host_store("127.0.0.1", timeout_s=DEADLINE_S)
        (directory / "address.part").write_text(address)
        (directory / "address.part").rename(address_file)
    else:
        deadline = time.monotonic() + DEADLINE_S
        while not address_file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 published no address")
            time.sleep(0.02)
        store = connect_store(address_file.read_text(), timeout_s=DEADLINE_S)
    return init_parallel(rank=rank, world_size=WORLD_SIZE, store=store, timeout_s=timeout_s)


def play_rank(rank: int, directory: Path) -> None:
    """Move everything as planned, look at it, then wait for a transfer that the others never take part in."""
    context = join(rank, directory, timeout_s=5.0)
    store = DataStore()
    for uid, owner in OWNER_BY_UID.items():
        if owner == rank:
            store.put(make_sample(uid))
    manager = DataManager(store, context)
    stats = manager.execute(plan(), metadata())
    seen: dict[str, Any] = {
        "sent": stats.sent_bytes,
        "received": stats.received_bytes,
        "wrong": [
            [uid, key]
            for uid, key in sorted(WANTED[rank])
            if not store.holds(uid, key) or not same_values(store.gather([uid], [key]), make_sample(uid), key)
        ],
        "held": {uid: sorted(key for key in KEY_LAYOUTS if store.holds(uid, key)) for uid in store.uids},
    }
    context.barrier()
    if rank == 1:
        never = [Transfer(key="rewards", source=2, destinations=(1,), uids=("0:e",))]
        try:
            manager.execute(never, metadata())
        except TransferError as error:
            seen["error"] = str(error)
    (directory / f"rank-{rank}.json").write_text(json.dumps(seen))
    if rank == 1:
        (directory / "done").touch()
    deadline = time.monotonic() + DEADLINE_S
    while not (directory / "done").exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # leaving early would be a different error for rank 1: a peer that is gone
    context.close()


def same_values(actual: SequenceSample, expected: SequenceSample, key: str) -> bool:
    left, right = np.asarray(actual.data[key]), np.asarray(expected.data[key])
    return (
        left.dtype == right.dtype and left.tobytes() == right.tobytes() and actual.seqlens[key] == expected.seqlens[key]
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("transfer")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=play_rank, args=(rank, directory)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    exit_codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    assert exit_codes == [0] * WORLD_SIZE
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def test_every_rank_holds_what_it_wants_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    assert [rank["wrong"] for rank in ranks] == [[], [], []]


def test_no_rank_receives_what_it_did_not_ask_for(ranks: list[dict[str, Any]]) -> None:
    assert ranks[2]["held"] == {"0:a": sorted(KEYS), "0:b": ["old_logprobs"], "0:e": sorted(KEYS)}
    assert ranks[0]["held"]["0:b"] == ["input_ids"]
    assert ranks[0]["held"]["0:c"] == ["rewards"]


def test_every_byte_travels_once_in_its_native_type(ranks: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(ranks):
        missing = [item for item in WANTED[rank] if OWNER_BY_UID[item[0]] != rank]
        assert seen["received"] == sum(make_sample(uid).select_keys([key]).size_bytes for uid, key in missing)
    assert sum(seen["sent"] for seen in ranks) == sum(seen["received"] for seen in ranks)


def test_a_peer_that_does_not_send_is_named_after_the_deadline(ranks: list[dict[str, Any]]) -> None:
    assert "rank 1 could not move 'rewards' of 1 samples from rank 2 within 5 s" in ranks[1]["error"]


def test_a_receiver_without_the_lengths_says_so() -> None:
    manager = DataManager(DataStore(), ParallelContext(rank=1, mesh=data_parallel_mesh(2)))
    transfers = [Transfer(key="rewards", source=0, destinations=(1,), uids=("0:z",))]
    with pytest.raises(ValueError, match=r"rank 1 is to receive samples \['0:z'\]"):
        manager.execute(transfers, metadata())


def test_a_source_without_the_values_says_so() -> None:
    manager = DataManager(DataStore(), ParallelContext(rank=0, mesh=data_parallel_mesh(2)))
    transfers = [Transfer(key="rewards", source=0, destinations=(1,), uids=("0:a",))]
    with pytest.raises(ValueError, match="not in this store"):
        manager.execute(transfers, metadata())


def test_ranks_and_rendezvous_addresses_are_checked() -> None:
    with pytest.raises(ValueError, match="rank 2 is outside a gang of 2"):
        init_parallel(rank=2, world_size=2)
    with pytest.raises(ValueError, match="needs a rendezvous store"):
        init_parallel(rank=0, world_size=2)
    with pytest.raises(ValueError, match="not of the form host:port"):
        connect_store("nowhere")
    alone = init_parallel()
    assert alone.group is None
    assert alone.sum_over_ranks({"a": 2.5}) == {"a": 2.5}
