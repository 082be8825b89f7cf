"""Arrays that the processes of one host share: written once, mapped by those that need them, never copied between them.

    owner    HostMemory.store(arrays) ──► arrays in a segment ──addresses_of──► fd, inode, offset ──message─┐
    reader   HostMemory.open(pid, addresses, kinds) ◄────────────────── /proc/PID/fd/FD ◄───────────────────┘

A segment is a memfd. It has no name in any file system and lives as long as one process has it open or mapped, so that
nothing is left behind by processes that were killed. Only processes of the same user can open it. Its size is sealed: a
reader cannot be hurt by an owner that shrinks it.

Everybody, the owner too, looks at a segment through a private mapping: what is written into an array that lies there
stays with the process that wrote it.

Which ranks of a host can show each other their memory is tried once, by all of them, before anything depends on it.

    each rank ──"rank pid fd inode offset"──► store ──► each opens what the others of its host show ──► all, or none

Containers, namespaces and security modules have the last word on who may open what, so that it is tried; and a sender
and a receiver must be of one opinion, so that one refusal counts for the host.
"""

import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch._C._distributed_c10d import Store  # re-exported by torch.distributed, but not for type checkers

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

SEGMENT_BYTES = 16 * 2**20
"""Of the smallest segments: one old sample pins little memory."""
_SEGMENT_DIVISOR = 8  # a segment holds at least 1/8 of everything held, so that file descriptors do not run out
_ALIGNMENT = 16  # of an array: enough for every dtype


class NotSharedError(RuntimeError):
    """The array at an address is gone, or this process may not look at it."""


Addresses = npt.NDArray[np.int64]
"""[arrays, 3]: the start of each array, as its owner sends it to other processes.

The segment's file descriptor in the owner's process, its inode, by which a reader knows that the descriptor still is
that segment, and the offset in bytes.
"""
_NOWHERE = (-1, -1, 0)  # the address of an array without values


class Extent(NamedTuple):
    """A segment, or a part of it that was set aside."""

    target: Bytes
    """To write into."""
    values: Bytes
    """The same bytes, to look at once they are written."""


@dataclass(frozen=True, slots=True)
class _Segment:
    fd: int
    inode: int
    address: int
    """Of the private mapping in this process."""
    size_bytes: int


class HostMemory:
    """The segments that this process owns or has opened. Any thread may use it."""

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._segment_by_id: dict[int, _Segment] = {}  # by id() of the array over the whole of it
        self._values_by_inode: weakref.WeakValueDictionary[int, Bytes] = weakref.WeakValueDictionary()
        self._filling: Extent | None = None
        """The segment that is filled at present."""
        self._used_bytes = 0
        """Of it."""

    def store(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The same arrays where other processes can open them; those that are there already are not copied."""
        moving = {name: array for name, array in arrays.items() if not self.holds(array)}
        starts = np.cumsum([0, *(_rounded_up(array.nbytes, _ALIGNMENT) for array in moving.values())]).tolist()
        if not moving:
            return dict(arrays)
        extent = self.allocate(starts[-1])
        moved: dict[str, Array] = {}
        for start, (name, array) in zip(starts, moving.items(), strict=False):
            piece = slice(start, start + array.nbytes)
            extent.target[piece] = np.ascontiguousarray(array).view(np.uint8)
            moved[name] = extent.values[piece].view(array.dtype)
        return dict(arrays) | moved

    def allocate(self, size_bytes: int) -> Extent:
        """Set some bytes aside; they are free again when no array looks at their segment any more."""
        with self._lock:
            if self._filling is None or self._used_bytes + size_bytes > self._filling.values.size:
                segment_bytes = max(self._segment_bytes, self._held_bytes() // _SEGMENT_DIVISOR)
                if size_bytes > segment_bytes:  # a segment of its own
                    whole = self._make_segment(size_bytes)
                    return Extent(whole.target[:size_bytes], whole.values[:size_bytes])
                self._filling, self._used_bytes = self._make_segment(segment_bytes), 0
            piece = slice(self._used_bytes, self._used_bytes + size_bytes)
            # Page by page: a page that somebody wrote to in his private mapping no longer shows what comes later.
            self._used_bytes += _rounded_up(size_bytes, mmap.PAGESIZE)
            return Extent(self._filling.target[piece], self._filling.values[piece])

    def holds(self, array: Array) -> bool:
        """Whether others can open this array: it lies in a segment, in one piece."""
        if not array.size:
            return True
        return id(array.base) in self._segment_by_id and array.flags.c_contiguous

    def addresses_of(self, arrays: Sequence[Array]) -> Addresses:
        """The addresses of arrays of this memory, for other processes."""
        addresses: list[int] = []
        for array in arrays:
            if array.size:
                segment = self._segment_by_id[id(array.base)]
                # A third of the time that it takes numpy to say where an array lies.
                address = addressof(c_char.from_buffer(array.data))
                addresses += (segment.fd, segment.inode, address - segment.address)
            else:
                addresses += _NOWHERE
        return np.array(addresses, np.int64).reshape(-1, 3)

    def open(self, pid: int, addresses: Addresses, kinds: Sequence[tuple[np.dtype[Any], int]]) -> list[Array]:
        """Arrays of another process: their addresses, and the type and number of values of each.

        Raises:
            NotSharedError: if one is gone, or not for this process.
        """
        values_by_inode = {_NOWHERE[1]: np.empty(0, np.uint8)}
        opened: list[Array] = []
        with self._lock:
            for (fd, inode, offset), (dtype, length) in zip(addresses.tolist(), kinds, strict=True):
                values = values_by_inode.get(inode)
                if values is None:
                    values = values_by_inode[inode] = self._segment_at(pid, fd, inode)
                try:
                    opened.append(np.ndarray((length,), dtype, values, offset))
                except (TypeError, ValueError) as error:
                    raise NotSharedError(
                        f"process {pid} names {length} x {dtype} at {offset} of a segment of {values.size} bytes"
                    ) from error
        return opened

    def _segment_at(self, pid: int, its_fd: int, inode: int) -> Bytes:
        if (values := self._values_by_inode.get(inode)) is not None:
            return values
        try:
            fd = os.open(f"/proc/{pid}/fd/{its_fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NotSharedError(f"cannot open file descriptor {its_fd} of process {pid}: {error.strerror}") from error
        if os.fstat(fd).st_ino != inode:
            os.close(fd)
            raise NotSharedError(f"file descriptor {its_fd} of process {pid} is no longer segment {inode}")
        return self._register(fd, inode)

    def _make_segment(self, size_bytes: int) -> Extent:
        fd = os.memfd_create("corral-samples", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _rounded_up(size_bytes, mmap.PAGESIZE))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        target = np.frombuffer(mmap.mmap(fd, 0, flags=mmap.MAP_SHARED), np.uint8)
        return Extent(target, self._register(fd, os.fstat(fd).st_ino))

    def _register(self, fd: int, inode: int) -> Bytes:
        """Map a segment for reading, and give it up when the last array that looks at it is gone."""
        mapping = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        values = np.frombuffer(mapping, np.uint8)
        segment = _Segment(fd, inode, values.__array_interface__["data"][0], values.size)
        self._segment_by_id[id(values)] = segment
        self._values_by_inode[segment.inode] = values
        weakref.finalize(values, self._give_up, id(values), fd)
        return values

    def _held_bytes(self) -> int:
        return sum(segment.size_bytes for segment in list(self._segment_by_id.values()))

    def _give_up(self, key: int, fd: int) -> None:
        del self._segment_by_id[key]
        os.close(fd)


def host_identity() -> str:
    """Equal in two processes that can look at each other's memory, as far as one can say without trying.

    The boot of the machine, and the namespace of process ids: containers may have one of their own.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def _rounded_up(size_bytes: int, unit: int) -> int:
    return -(-size_bytes // unit) * unit


def meet_neighbours(
    store: Store, memory: HostMemory, *, rank: int, host: str, barrier: Callable[[], None]
) -> Mapping[int, int]:
    """Process ids of the other ranks of this host, by rank; empty if they cannot share memory.

    Args:
        store: in which these ranks have not met before.
        host: equal for ranks that may be able to share memory.
        barrier: returns once every rank has called it.
    """
    count_key, refusal_key = f"number of ranks on {host}", f"refusal on {host}"
    shown = memory.store({"rank": np.array([rank], np.int64)})["rank"]
    ((fd, inode, offset),) = memory.addresses_of([shown]).tolist()
    number = store.add(count_key, 1)
    store.set(f"{number} on {host}", f"{rank} {os.getpid()} {fd} {inode} {offset}")
    barrier()  # all have written down what they show
    pid_by_rank: dict[int, int] = {}
    members = store.multi_get([f"{number} on {host}" for number in range(1, store.add(count_key, 0) + 1)])
    for other, pid, *place in (map(int, member.split()) for member in members):
        if other == rank:
            continue
        pid_by_rank[other] = pid
        try:
            ((seen,),) = memory.open(pid, np.array([place], np.int64), [(np.dtype(np.int64), 1)])
            refusal = "" if seen == other else f"process {pid} shows the memory of rank {seen}, and not of rank {other}"
        except NotSharedError as error:
            refusal = str(error)
        if refusal:
            logger.warning("rank %d shares no memory with others of its host: %s", rank, refusal)
            store.set(refusal_key, refusal)
    barrier()  # all have looked; only now may `shown` go
    del shown
    return {} if store.check([refusal_key]) else pid_by_rank
