"""Each rank is told what it gives and what it takes, and of nothing else."""

import numpy as np
import pytest

from corral.scheduling.keys import BUILT_IN_KEYS
from corral.scheduling.redistribution import Parcel
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.master.calls import TransferPlanner
from corral.workers.master.sample_source import BufferedSample, SequenceBuffer
from corral.workers.requests.messages import DataTransfer, Give

KEYS = ("input_ids", "rewards")


def buffer_of(owner_by_uid: dict[str, int], keys: tuple[str, ...] = KEYS) -> SequenceBuffer:
    buffer = SequenceBuffer(is_consumed=lambda uid: False)
    for order, (uid, owner) in enumerate(owner_by_uid.items()):
        buffer.put(
            BufferedSample(
                uid=uid, order=order, owner=owner, num_tokens=[5, 3], versions=frozenset(), keys=frozenset(keys)
            )
        )
    return buffer


def test_each_rank_is_told_of_its_own_parcels_only() -> None:
    buffer = buffer_of({"0:a": 0, "0:b": 1, "0:c": 2})
    planner = TransferPlanner({0: "A", 1: "A", 2: "B", 3: "B"})
    transfers = planner.plan([((2, 3), buffer.find(["0:a", "0:c"]))], KEYS)
    to_2 = Parcel(tag=0, source=0, destinations=(2,), uids=("0:a",), keys=KEYS)
    to_3 = Parcel(tag=1, source=2, destinations=(3,), uids=("0:c",), keys=KEYS)
    onward = Parcel(tag=2, source=2, destinations=(3,), uids=("0:a",), keys=KEYS, is_passed_on=True)
    assert transfers.gives == {0: Give(parcels=[to_2]), 2: Give(parcels=[to_3])}
    assert transfers.takes == {
        2: DataTransfer(parcels=[to_2, onward], num_tokens={"0:a": [5, 3]}),
        3: DataTransfer(parcels=[to_3, onward], num_tokens={"0:a": [5, 3], "0:c": [5, 3]}),
    }


def test_nothing_moves_twice_and_no_two_parcels_have_one_number() -> None:
    buffer = buffer_of({"0:a": 0, "0:b": 0})
    planner = TransferPlanner({0: "A", 1: "A"})
    first = planner.plan([((1,), buffer.find(["0:a"]))], ("input_ids",))
    assert first.takes.keys() == {1}
    first.note_arrival()
    again = planner.plan([((1,), buffer.find(["0:a"]))], ("input_ids",))
    assert (again.gives, again.takes, again.size_bytes) == ({}, {}, 0)
    more = planner.plan([((1,), buffer.find(["0:a", "0:b"]))], KEYS)
    more.note_arrival()
    tags = [parcel.tag for transfers in (first, more) for give in transfers.gives.values() for parcel in give.parcels]
    assert len(set(tags)) == len(tags) == 3
    assert buffer.release(["0:a", "0:b"]) == {0: ["0:a", "0:b"], 1: ["0:a", "0:b"]}


def test_nobody_gives_away_what_is_still_on_its_way_to_it() -> None:
    buffer = buffer_of({"0:a": 0})
    planner = TransferPlanner({0: "A", 1: "B", 2: "B"})
    under_way = planner.plan([((1,), buffer.find(["0:a"]))], KEYS)
    beside_it = planner.plan([((2,), buffer.find(["0:a"]))], KEYS)
    assert beside_it.gives.keys() == {0}
    under_way.note_arrival()
    assert planner.plan([((2,), buffer.find(["0:a"]))], KEYS).gives.keys() == {1}


@pytest.mark.parametrize("key", sorted(BUILT_IN_KEYS))
def test_sizes_are_those_of_the_arrays(key: str) -> None:
    ids: list[list[int]] = [[1] * 5, [1] * 3]
    sample = SequenceSample.from_group("0:a", {"input_ids": ids})
    layout, dtype = BUILT_IN_KEYS[key].layout, BUILT_IN_KEYS[key].dtype
    values = np.zeros(sum(layout.length(len(answer)) for answer in ids), dtype)
    buffer = buffer_of({"0:a": 0}, ("input_ids", key))
    transfers = TransferPlanner({0: "A", 1: "A"}).plan([((1,), buffer.find(["0:a"]))], (key,))
    assert transfers.size_bytes == sample.with_key(key, values).data[key].nbytes
