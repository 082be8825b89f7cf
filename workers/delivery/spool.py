"""The spool: finished trajectories of one rollout worker wait until a commit covers them, on disk each in its own file.

    (absent) --append: written, fsync--> live --discard: unlinked--> (absent)

The spool carries no guarantee by itself; it saves generating again what was finished. A record that is torn by a crash,
or changed by a broken disk, is removed when the spool is opened, and its prompt is generated again. So is the prompt of
a record that the file system does not give at that time, which stays where it is. One that could not be removed, or
whose removal a crash undid, comes back: the trainer's ledger knows the sample and answers the second delivery with a
verdict.
"""

import fcntl
import itertools
import logging
import os
import time
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from corral.experiments.trial.directory import write_all
from corral.workers.streams.closing import Closing
from corral.workers.streams.codec import Buffer

logger = logging.getLogger(__name__)

_LOCK_TIMEOUT_S: Final = 10.0


class SpoolError(Exception):
    """The spool cannot be used as asked: a record changed on disk, or another process has the spool open."""


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What is in a file."""

    crc: int
    """CRC-32 of all that follows."""
    uid: str
    parts: list[bytes]


_decode = msgspec.msgpack.Decoder(_Record).decode


class Spool(Closing):
    """Durable set of (uid, payload), for one process at a time. Methods may be called from several threads.

    >>> with Spool(trial.spool_path(0)) as spool:
    ...     spool.append("0:problem-17", [header, tokens])      # on disk when it returns
    ...     spool.payload("0:problem-17")                       # [header, tokens], read back
    ...     spool.discard(["0:problem-17"])                     # a commit covers it
    """

    def __init__(self, directory: Path) -> None:
        """Opens the spool, creating it if needed, and recovers what an earlier process left.

        Raises:
            SpoolError: another process has it open.
        """
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_descriptor = _lock(directory)
        self._paths: dict[str, Path] = {}
        found = {int(path.name.partition("-")[2]): path for path in directory.glob("record-*")}
        self._numbers = itertools.count(1 + max(found, default=0))
        for _, path in sorted(found.items()):
            try:
                record = _read(path)
            except OSError as error:  # of this moment, perhaps
                logger.warning("%s cannot be read, and is left there; its prompt is answered anew: %s", path, error)
                continue
            if record is None:
                logger.warning(
                    "%s holds no whole record (a crash, or a broken disk); its prompt is answered anew", path
                )
                _remove(path)
                continue
            if (older := self._paths.pop(record.uid, None)) is not None:
                _remove(older)
            self._paths[record.uid] = path

    def append(self, uid: str, payload: Sequence[Buffer]) -> None:
        """Stores a finished trajectory; it is on disk when this returns.

        Raises:
            ValueError: if `uid` is in the spool already.
            OSError: if the disk is full or broken; then nothing was stored.
        """
        if self._lock_descriptor < 0:
            raise SpoolError(f"the spool {self._directory} is closed")
        if uid in self._paths:
            raise ValueError(f"sample {uid!r} is in the spool {self._directory} already; discard it first")
        path = self._directory / f"record-{next(self._numbers):010d}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            write_all(descriptor, msgspec.msgpack.encode((_crc(uid, payload), uid, payload)))
            os.fsync(descriptor)
        except OSError:
            _remove(path)
            raise
        finally:
            os.close(descriptor)
        self._paths[uid] = path

    def discard(self, uids: Collection[str]) -> None:
        """Forgets trajectories that a commit covers or that a verdict refused; unknown uids are ignored."""
        for uid in uids:
            if (path := self._paths.pop(uid, None)) is not None:
                _remove(path)

    def payload(self, uid: str) -> list[bytes]:
        """Reads one trajectory back.

        Raises:
            KeyError: if it is not in the spool.
            SpoolError: if it is not what was written.
            OSError: if it cannot be read now.
        """
        path = self._paths[uid]
        record = _read(path)
        if record is None or record.uid != uid:
            raise SpoolError(
                f"record {uid!r} in {path} was changed on disk; discard it, so that its prompt is generated again, "
                "and check the disk"
            )
        return record.parts

    def uids(self) -> list[str]:
        """Live uids, oldest first."""
        return list(self._paths)

    def close(self) -> None:
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1


def _crc(uid: str, payload: Sequence[Buffer]) -> int:
    crc = zlib.crc32(uid.encode())
    for part in payload:
        crc = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "little"), crc))
    return crc


def _read(path: Path) -> _Record | None:
    """The record in a file, if there is one that is as it was written; OSError if it cannot be read."""
    try:
        record = _decode(path.read_bytes())
    except (msgspec.MsgspecError, UnicodeDecodeError, FileNotFoundError):
        return None
    return record if record.crc == _crc(record.uid, record.parts) else None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # an immutable one
        logger.warning("%s cannot be removed, and takes room until it can be: %s", path, error)


def _lock(directory: Path) -> int:
    """Holds the spool for this process: two writers would remove each other's records."""
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
