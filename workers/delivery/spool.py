"""The spool: finished trajectories of one rollout worker wait on disk until a commit covers them.

    append(uid, payload) --> segment-00000007.spool --fsync--> return
    discard(uids) ---------> tombstones in the newest segment --fsync--> segments without live records are deleted

    record:  (absent) --append--> live --discard--> dead --segment deleted--> (absent)

A segment is a sequence of frames; each carries the CRC-32 of all that it holds. Only the last frame of the newest
segment can be torn by a crash: opening the spool cuts it off, and its prompt is simply generated again. Losing a
tombstone is harmless too: the trainer's ledger knows the sample, and answers the second delivery with a verdict. So
the spool carries no guarantee by itself; it saves generating again what was finished.
"""

import fcntl
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from corral.experiments.trial.directory import fsync_directory, write_all
from corral.workers.streams.closing import Closing

logger = logging.getLogger(__name__)

_DEFAULT_SEGMENT_BYTES: Final = 4 << 20
_MAGIC: Final = b"CSP1"
_HEADER: Final = struct.Struct("<4sBHIQI")  # magic, kind, uid bytes, parts, bytes after the header, CRC-32 of the rest
_PART_SIZE: Final = struct.Struct("<Q")
_RECORD: Final = 1
_TOMBSTONE: Final = 2
_LOCK_TIMEOUT_S: Final = 10.0


class SpoolError(Exception):
    """The spool cannot be used as asked: a record changed on disk, or another process has the spool open."""


@dataclass(slots=True)
class _Segment:
    """One file of the spool."""

    path: Path
    size: int = 0
    live: set[str] = field(default_factory=set)
    """Uids of the records here that are not discarded."""
    buried: set[int] = field(default_factory=set)
    """Numbers of the segments whose records the tombstones here kill; if this file went first, they would rise."""
    stays: bool = False
    """Whether the file could not be removed when nothing in it was needed any more."""


@dataclass(frozen=True, slots=True)
class _Location:
    segment: int
    offset: int
    size: int


class Spool(Closing):
    """Durable set of (uid, payload), for one process at a time. Methods may be called from several threads.

    >>> with Spool(trial.spool_path(0)) as spool:
    ...     spool.append("0:problem-17", [header, tokens])      # on disk when it returns
    ...     spool.payload("0:problem-17")                       # [header, tokens], read back
    ...     spool.discard(["0:problem-17"])                     # a commit covers it
    """

    def __init__(self, directory: Path, *, segment_bytes: int = _DEFAULT_SEGMENT_BYTES) -> None:
        """Opens the spool, creating it if needed, and recovers what an earlier process left.

        Args:
            segment_bytes: a segment that has reached this size is closed; the next record opens another.

        Raises:
            SpoolError: another process has it open.
        """
        if segment_bytes < 1:
            raise ValueError(f"segment_bytes must be positive, got {segment_bytes}")
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._mutex = threading.Lock()
        self._locations: dict[str, _Location] = {}
        self._segments: dict[int, _Segment] = {}
        self._next_number = 1
        self._active: int | None = None
        self._descriptor = -1
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_descriptor = _lock(directory)
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def append(self, uid: str, payload: Sequence[bytes]) -> None:
        """Stores a finished trajectory; it is on disk when this returns.

        Raises:
            ValueError: if `uid` is in the spool already.
            OSError: if the disk is full or broken; then nothing was stored.
        """
        frame = _encode_record(uid, payload)
        with self._mutex:
            if uid in self._locations:
                raise ValueError(f"sample {uid!r} is in the spool {self._directory} already; discard it first")
            number, offset = self._write(frame)
            self._locations[uid] = _Location(number, offset, len(frame))
            self._segments[number].live.add(uid)

    def discard(self, uids: Collection[str]) -> None:
        """Forgets trajectories that a commit covers or that a verdict refused; unknown uids are ignored."""
        with self._mutex:
            known = [uid for uid in dict.fromkeys(uids) if uid in self._locations]
            if not known:
                return
            number, _ = self._write(b"".join(map(_encode_tombstone, known)))
            for uid in known:
                self._bury(uid, in_segment=number)
            self._delete_dead_segments()

    def payload(self, uid: str) -> list[bytes]:
        """Reads one trajectory back.

        Raises:
            KeyError: if it is not in the spool.
            SpoolError: if it is not what was written.
        """
        with self._mutex:
            location = self._locations[uid]
            path = self._segments[location.segment].path
            with open(path, "rb") as file:
                file.seek(location.offset)
                data = file.read(location.size)
        frame = _decode(data, 0)
        if frame is None or frame.uid != uid:
            raise SpoolError(
                f"record {uid!r} at byte {location.offset} of {path} was changed on disk; discard it, so that its "
                f"prompt is generated again, and check the disk"
            )
        return frame.parts

    def uids(self) -> list[str]:
        """Live uids, oldest first."""
        with self._mutex:
            return list(self._locations)

    def close(self) -> None:
        with self._mutex:
            self._close_active()
            if self._lock_descriptor >= 0:
                os.close(self._lock_descriptor)
                self._lock_descriptor = -1

    def _recover(self) -> None:
        paths = {int(path.stem.split("-")[1]): path for path in self._directory.glob("segment-*.spool")}
        for number, path in sorted(paths.items()):
            self._segments[number] = segment = _Segment(path)
            data = path.read_bytes()
            for offset, frame in _frames(data):
                segment.size = offset + frame.size
                self._bury(frame.uid, in_segment=number)
                if frame.kind == _RECORD:
                    self._locations[frame.uid] = _Location(number, offset, frame.size)
                    segment.live.add(frame.uid)
            if segment.size < len(data):
                self._cut_tail(segment, len(data))
        self._next_number = max(paths, default=0) + 1
        if paths and self._segments[max(paths)].size < self._segment_bytes:
            try:
                self._open(max(paths), os.O_WRONLY)
            except OSError as error:  # an immutable one
                logger.warning("%s takes no more records, the next one opens another: %s", paths[max(paths)], error)
        self._delete_dead_segments()

    def _cut_tail(self, segment: _Segment, file_size: int) -> None:
        logger.warning(
            "spool segment %s ends in %d bytes that are no whole record (a crash, or a broken disk); they "
            "are cut off, and what was in them will be generated again",
            segment.path,
            file_size - segment.size,
        )
        os.truncate(segment.path, segment.size)
        descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _write(self, data: bytes) -> tuple[int, int]:
        """Appends durably to the active segment; returns its number and the offset."""
        if self._lock_descriptor < 0:
            raise SpoolError(f"the spool {self._directory} is closed")
        if self._active is not None and self._segments[self._active].size >= self._segment_bytes:
            self._close_active()
        if self._active is None:
            self._segments[self._next_number] = _Segment(self._directory / f"segment-{self._next_number:08d}.spool")
            self._open(self._next_number, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            self._next_number += 1
            try:
                fsync_directory(self._directory)
            except OSError:
                self._close_active()
                raise
        number = self._active
        assert number is not None
        segment = self._segments[number]
        try:
            write_all(self._descriptor, data)
            os.fsync(self._descriptor)
        except OSError:
            self._undo_write(segment)
            raise
        offset = segment.size
        segment.size += len(data)
        return number, offset

    def _undo_write(self, segment: _Segment) -> None:
        """Nothing may follow a half-written frame, because recovery stops there."""
        try:
            os.ftruncate(self._descriptor, segment.size)
            os.lseek(self._descriptor, segment.size, os.SEEK_SET)
        except OSError as error:
            logger.warning(
                "spool segment %s cannot be cut back (%s); the next record opens another", segment.path, error
            )
            self._close_active()

    def _open(self, number: int, flags: int) -> None:
        self._descriptor = os.open(self._segments[number].path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.lseek(self._descriptor, self._segments[number].size, os.SEEK_SET)
        self._active = number

    def _close_active(self) -> None:
        if self._active is not None:
            os.close(self._descriptor)
            self._active = None

    def _bury(self, uid: str, *, in_segment: int) -> None:
        location = self._locations.pop(uid, None)
        if location is not None:
            self._segments[location.segment].live.discard(uid)
            self._segments[in_segment].buried.add(location.segment)

    def _delete_dead_segments(self) -> None:
        for number in sorted(self._segments):
            segment = self._segments[number]
            needed = any(other in self._segments for other in segment.buried if other != number)
            if number == self._active or segment.live or needed:
                continue
            try:
                segment.path.unlink(missing_ok=True)
            except OSError as error:  # it only takes room; and no later one may go before it
                if not segment.stays:
                    logger.warning("%s cannot be removed and takes room until it can be: %s", segment.path, error)
                segment.stays = True
                return
            # Before the next deletion: tombstones must outlive, on disk, the records that they kill.
            fsync_directory(self._directory)
            del self._segments[number]


@dataclass(frozen=True, slots=True)
class _Frame:
    kind: int
    uid: str
    parts: list[bytes]
    size: int
    """Bytes of the whole frame."""


def _encode_record(uid: str, payload: Sequence[bytes]) -> bytes:
    sizes = b"".join(_PART_SIZE.pack(len(part)) for part in payload)
    return _encode(_RECORD, uid, len(payload), b"".join((sizes, *payload)))


def _encode_tombstone(uid: str) -> bytes:
    return _encode(_TOMBSTONE, uid, 0, b"")


def _encode(kind: int, uid: str, num_parts: int, rest: bytes) -> bytes:
    name = uid.encode()
    if not 0 < len(name) <= 0xFFFF:
        raise ValueError(f"a sample uid must have 1 to 65535 bytes, {uid[:40]!r} has {len(name)}")
    body = name + rest
    head = _HEADER.pack(_MAGIC, kind, len(name), num_parts, len(body), 0)
    crc = zlib.crc32(body, zlib.crc32(head))
    return _HEADER.pack(_MAGIC, kind, len(name), num_parts, len(body), crc) + body


def _frames(data: bytes) -> Iterator[tuple[int, _Frame]]:
    """(offset, frame) up to the end or to the first bytes that are no whole frame."""
    offset = 0
    while (frame := _decode(data, offset)) is not None:
        yield offset, frame
        offset += frame.size


def _decode(data: bytes, offset: int) -> _Frame | None:
    if len(data) - offset < _HEADER.size:
        return None
    magic, kind, uid_size, num_parts, body_size, crc = _HEADER.unpack_from(data, offset)
    body = data[offset + _HEADER.size : offset + _HEADER.size + body_size]
    head = _HEADER.pack(magic, kind, uid_size, num_parts, body_size, 0)
    if (
        magic != _MAGIC
        or kind not in (_RECORD, _TOMBSTONE)
        or len(body) != body_size
        or zlib.crc32(body, zlib.crc32(head)) != crc
    ):
        return None
    position = uid_size + num_parts * _PART_SIZE.size
    sizes = [_PART_SIZE.unpack_from(body, uid_size + index * _PART_SIZE.size)[0] for index in range(num_parts)]
    parts: list[bytes] = []
    for size in sizes:
        parts.append(body[position : position + size])
        position += size
    return _Frame(kind, body[:uid_size].decode(), parts, _HEADER.size + body_size)


def _lock(directory: Path) -> int:
    """Holds the spool for this process: two writers would cut off each other's tails."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            os.close(descriptor)
            raise SpoolError(
                f"the spool {directory} is held by another process since more than {_LOCK_TIMEOUT_S:.0f} s; "
                f"end the earlier rollout worker of this index first"
            ) from None
        except OSError as error:
            logger.warning("the file system of %s has no locks (%s); the launcher must not start two", directory, error)
            return descriptor
