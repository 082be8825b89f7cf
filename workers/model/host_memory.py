"""Arrays that the processes of one host share: written once, mapped by whoever needs them, never copied between them.

    owner    HostMemory.store(arrays) ──► arrays in a segment ──place_of──► Place(fd, inode, offset) ──message──┐
    reader   HostMemory.open(pid, place, size_bytes) ◄── /proc/PID/fd/FD ◄──────────────────────────────────────┘

A segment is a memfd. It has no name in any file system and lives as long as one process has it open or mapped, so that
nothing is left behind by processes that were killed. Only processes of the same user can open it. Its size is sealed: a
reader cannot be hurt by an owner that shrinks it.

Everybody, the owner too, looks at a segment through a private mapping: what is written into an array that lies there
stays with the process that wrote it.
"""

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

SEGMENT_BYTES = 16 * 2**20
"""Of the smallest segments: one old sample pins little memory."""
_SHARE = 8  # a segment holds at least 1/8 of everything held, so that file descriptors do not run out
_ALIGNMENT = 16  # of an array: enough for every dtype


class NotSharedError(RuntimeError):
    """What a place names is not there, or this process may not look at it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array begins, as its owner says it to others."""

    fd: int
    """The segment's file descriptor in the owner's process."""
    inode: int
    """By which a reader knows that the descriptor still is that segment."""
    offset: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of a segment that was set aside."""

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


@dataclass(slots=True)
class _Filling:
    """The segment that is filled at present."""

    target: Bytes
    values: Bytes
    used_bytes: int = 0


class HostMemory:
    """The segments that this process owns or has opened. Any thread may use it."""

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._segment_by_id: dict[int, _Segment] = {}  # by id() of the array over the whole of it
        self._values_by_inode: weakref.WeakValueDictionary[int, Bytes] = weakref.WeakValueDictionary()
        self._filling: _Filling | None = None

    def store(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The same arrays where other processes can open them; those that are there already are not copied."""
        moving = {name: array for name, array in arrays.items() if array.size and self.place_of(array) is None}
        starts = np.cumsum([0, *(_aligned(array.nbytes) for array in moving.values())]).tolist()
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
            if self._filling is None or self._filling.used_bytes + size_bytes > self._filling.values.size:
                segment_bytes = max(self._segment_bytes, self._held_bytes() // _SHARE)
                if size_bytes > segment_bytes:  # a segment of its own
                    whole = self._make_segment(size_bytes)
                    return Extent(whole.target[:size_bytes], whole.values[:size_bytes])
                self._filling = self._make_segment(segment_bytes)
            piece = slice(self._filling.used_bytes, self._filling.used_bytes + size_bytes)
            # Page by page: a page that somebody wrote to in his private mapping no longer shows what comes later.
            self._filling.used_bytes += _in_pages(size_bytes)
            return Extent(self._filling.target[piece], self._filling.values[piece])

    def place_of(self, array: Array) -> Place | None:
        """What to tell others of an array; None if it lies elsewhere."""
        segment = self._segment_by_id.get(id(array.base))
        if segment is None:
            return None
        return Place(segment.fd, segment.inode, array.__array_interface__["data"][0] - segment.address)

    def open(self, pid: int, place: Place, size_bytes: int) -> Bytes:
        """The bytes at a place of another process.

        Raises:
            NotSharedError: if they are gone, or not for this process.
        """
        with self._lock:
            values = self._values_by_inode.get(place.inode)
            if values is None:
                values = self._map(pid, place)
        if place.offset + size_bytes > values.size:
            raise NotSharedError(
                f"process {pid} names {size_bytes} bytes at {place.offset} of a segment of {values.size}"
            )
        return values[place.offset : place.offset + size_bytes]

    def _map(self, pid: int, place: Place) -> Bytes:
        try:
            fd = os.open(f"/proc/{pid}/fd/{place.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NotSharedError(
                f"cannot open file descriptor {place.fd} of process {pid}: {error.strerror}"
            ) from error
        if os.fstat(fd).st_ino != place.inode:
            os.close(fd)
            raise NotSharedError(f"file descriptor {place.fd} of process {pid} is no longer segment {place.inode}")
        return self._register(fd)

    def _make_segment(self, size_bytes: int) -> _Filling:
        fd = os.memfd_create("corral-samples", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _in_pages(size_bytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        target = np.frombuffer(mmap.mmap(fd, 0, flags=mmap.MAP_SHARED), np.uint8)
        return _Filling(target, self._register(fd))

    def _register(self, fd: int) -> Bytes:
        """Map a segment for reading, and give it up when the last array that looks at it is gone."""
        mapping = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        values = np.frombuffer(mapping, np.uint8)
        segment = _Segment(fd, os.fstat(fd).st_ino, values.__array_interface__["data"][0], values.size)
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


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _in_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
