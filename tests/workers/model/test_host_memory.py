"""Memory that another process can look at: the same bits, nobody else's, and gone when nobody looks any more."""

import gc
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from corral.workers.model.host_memory import HostMemory, NotSharedError
from tests.workers.model.planes import DEADLINE_S


def num_segments() -> int:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return len({link.stat().st_ino for link in links if "corral-samples" in os.readlink(link)})


def place_of(memory: HostMemory, array: npt.NDArray[Any]) -> list[int]:
    """File descriptor, inode, offset."""
    assert memory.holds(array)
    (place,) = memory.addresses_of([array]).tolist()
    return list(place)


def open_one(memory: HostMemory, pid: int, place: list[int], dtype: npt.DTypeLike, length: int) -> npt.NDArray[Any]:
    (array,) = memory.open(pid, np.array([place]), [(np.dtype(dtype), length)])
    return array


def test_stored_arrays_are_the_same_and_can_be_opened_elsewhere() -> None:
    owner, reader = HostMemory(), HostMemory()
    arrays = {
        "ids": np.arange(1001, dtype=np.int64),
        "mask": np.array([True, False, True]),
        "empty": np.empty(0, np.float32),
        "strided": np.arange(10, dtype=np.int32)[::2],
    }
    stored = owner.store(arrays)
    for name, array in arrays.items():
        assert stored[name].dtype == array.dtype
        np.testing.assert_array_equal(stored[name], array)
        if array.size:
            seen = open_one(reader, os.getpid(), place_of(owner, stored[name]), array.dtype, array.size)
            np.testing.assert_array_equal(seen, array)


def test_what_is_there_already_is_not_copied_again() -> None:
    memory = HostMemory()
    stored = memory.store({"ids": np.arange(5)})["ids"]
    again = memory.store({"ids": stored[1:3]})["ids"]
    assert np.shares_memory(again, stored)
    assert place_of(memory, again)[2] == place_of(memory, stored)[2] + 8


def test_an_array_with_gaps_is_copied_together() -> None:
    memory = HostMemory()
    with_gaps = memory.store({"ids": np.arange(10)})["ids"][::2]
    assert not memory.holds(with_gaps)
    together = memory.store({"ids": with_gaps})["ids"]
    assert open_one(HostMemory(), os.getpid(), place_of(memory, together), np.int64, 5).tolist() == [0, 2, 4, 6, 8]


def test_what_a_process_writes_into_its_array_stays_there() -> None:
    owner, reader = HostMemory(), HostMemory()
    mine = owner.store({"ids": np.arange(5)})["ids"]
    place = place_of(owner, mine)
    theirs = open_one(reader, os.getpid(), place, np.int64, mine.size)
    mine[0], theirs[1] = 100, 200
    assert theirs.tolist() == [0, 200, 2, 3, 4]
    assert mine.tolist() == [100, 1, 2, 3, 4]
    later = owner.store({"ids": np.arange(7)})["ids"]  # in the same segment, whose first page has been written to
    assert later.tolist() == list(range(7))


def test_a_segment_goes_with_the_last_array_in_it() -> None:
    gc.collect()
    before = num_segments()
    memory = HostMemory(segment_bytes=4096)
    stored = [memory.store({"ids": np.arange(400)})["ids"] for _ in range(5)]
    assert num_segments() == before + 5
    del stored[1:]
    gc.collect()
    assert num_segments() == before + 2  # the first, and the one that is filled next
    assert stored[0][399] == 399


def test_much_data_takes_few_file_descriptors() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    memory = HostMemory(segment_bytes=4096)
    stored = [memory.store({"ids": np.arange(500)}) for _ in range(1000)]
    assert len(os.listdir("/proc/self/fd")) - before < 150
    assert [arrays["ids"][499] for arrays in stored] == [499] * 1000


def test_a_place_that_is_given_to_another_segment_is_not_taken_for_the_old_one() -> None:
    owner, reader = HostMemory(segment_bytes=4096), HostMemory()
    array = owner.store({"ids": np.arange(600)})["ids"]
    place = place_of(owner, array)
    del array
    successor = owner.store({"ids": np.arange(600) * 2})["ids"]
    assert place_of(owner, successor)[0] == place[0]
    with pytest.raises(NotSharedError, match="is no longer segment"):
        open_one(reader, os.getpid(), place, np.int64, 1)


def test_nothing_beyond_a_segment_is_looked_at() -> None:
    owner, reader = HostMemory(), HostMemory()
    place = place_of(owner, owner.store({"ids": np.arange(5)})["ids"])
    with pytest.raises(NotSharedError, match="of a segment of"):
        open_one(reader, os.getpid(), place, np.int64, 2**27)


def show_and_wait(pipe: Connection) -> None:
    memory = HostMemory()
    array = memory.store({"ids": np.arange(1000)})["ids"]
    place = place_of(memory, array)
    pipe.send_bytes(" ".join(map(str, [os.getpid(), *place])).encode())
    pipe.recv_bytes()  # until killed


def test_what_was_opened_outlives_a_killed_owner_and_the_rest_goes_with_it() -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, its = spawn.Pipe()
    owner = spawn.Process(target=show_and_wait, args=(its,))
    owner.start()
    try:
        assert ours.poll(DEADLINE_S)
        pid, *place = map(int, ours.recv_bytes().split())
        reader = HostMemory()
        seen = open_one(reader, pid, place, np.int64, 1000)
    finally:
        owner.kill()
        owner.join(DEADLINE_S)
    assert seen.tolist() == list(range(1000))
    with pytest.raises(NotSharedError, match="cannot open file descriptor"):
        open_one(HostMemory(), pid, place, np.int64, 1000)
