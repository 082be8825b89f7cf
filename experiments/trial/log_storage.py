"""Where the trial log lies: a file per slot, each of which can be written once, by one writer.

    write .00000007.*.tmp --fsync--> link(2) to 00000007 --> fsync of the directory
                                        |
                                        +--> the name is taken: what it holds goes back to the caller

That a slot has one writer rests on link(2) alone, which the file server decides.
"""

import errno
import logging
import os
import secrets as random_tokens
import time
from pathlib import Path
from typing import Final

from corral.experiments.trial.directory import atomic_write, fsync_directory, write_new_file
from corral.experiments.trial.log_state import TrialLogError, UncertainAppendError
from corral.experiments.trial.removal import remove_file

logger = logging.getLogger(__name__)

MAX_ENTRY_BYTES: Final = 4096
_MAX_TRIES: Final = 5  # ESTALE and lost replies of a file server heal on reopening, or not at all
VISIBLE_TIMEOUT_S: Final = 75.0  # NFS clients may cache "no such file" for up to 60 s


class DirectoryStorage:
    """Slots as files `00000001`, ... of one directory on a shared file system with hard links.

    Each method is atomic as seen by all writers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, slot: int) -> bytes | None:
        """The entry, or None if there is none yet (which a cache may still say shortly after it was written)."""
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                with open(self._slot_path(slot), "rb") as file:
                    return file.read(MAX_ENTRY_BYTES + 1)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno != errno.ESTALE or not tries_left:
                    raise
        return None

    def put_if_absent(self, slot: int, data: bytes) -> bytes | None:
        """Stores `data` durably and returns None, or returns what the slot holds already."""
        temporary = self._path / f".{slot:08d}.{random_tokens.token_hex(8)}.tmp"
        try:
            occupant = self._link(slot, data, temporary)
        finally:
            remove_file(temporary)
        try:
            fsync_directory(self._path)
        except OSError as error:
            raise UncertainAppendError(
                f"slot {slot:08d} of the trial log {self._path} is written, but perhaps not on disk ({error}); exit, "
                f"and claim a new epoch once the file system works again"
            ) from error
        return occupant

    def _link(self, slot: int, data: bytes, temporary: Path) -> bytes | None:
        last_error: OSError | None = None
        for _ in range(_MAX_TRIES):
            # Torn entries cannot exist: the bytes are on disk before the slot's name is.
            temporary.unlink(missing_ok=True)
            write_new_file(temporary, data)
            try:
                os.link(temporary, self._slot_path(slot))
                return None
            except FileExistsError:
                return self._read_existing(slot)
            except OSError as error:
                self._require_hard_links(error)
                last_error = error
            if (occupant := self.read(slot)) is not None:
                return occupant
        raise UncertainAppendError(
            f"slot {slot:08d} of the trial log {self._path}: the file system answered {last_error} {_MAX_TRIES} times; "
            f"the entry may be there or not, so exit and claim a new epoch"
        ) from last_error

    def read_snapshot(self) -> bytes:
        """What `write_snapshot` has stored last, or, for all that may be wrong with it, nothing."""
        try:
            return (self._path / "snapshot").read_bytes()
        except OSError:
            return b""

    def write_snapshot(self, data: bytes) -> None:
        """Stores `data`, if there is room."""
        try:
            atomic_write(self._path / "snapshot", data)
        except OSError as error:
            logger.warning("no snapshot of the trial log %s could be written: %s", self._path, error)

    def highest_slot(self) -> int:
        """The highest slot that a listing shows, or 0; it may be out of date, and decides nothing."""
        return max((int(name) for name in os.listdir(self._path) if name.isdecimal()), default=0)

    def remove_leftovers(self, below_slot: int) -> None:
        """Removes what writers that died left behind for slots that are taken."""
        for temporary in self._path.glob(".*.tmp"):
            slot = temporary.name.split(".")[1]
            # The slot is taken, so a writer that still holds this file can only learn that it lost.
            if slot.isdecimal() and int(slot) < below_slot:
                remove_file(temporary)

    def _slot_path(self, slot: int) -> Path:
        return self._path / f"{slot:08d}"

    def _read_existing(self, slot: int) -> bytes:
        deadline = time.monotonic() + VISIBLE_TIMEOUT_S
        pause_s = 0.01
        while (data := self.read(slot)) is None:
            if time.monotonic() > deadline:
                raise UncertainAppendError(
                    f"slot {self._slot_path(slot)} is taken, but the file system has not shown what it holds "
                    f"for {VISIBLE_TIMEOUT_S:.0f} s; check the mount of the trial directory on this node"
                )
            time.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)
        return data

    def _require_hard_links(self, error: OSError) -> None:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise TrialLogError(
                f"the file system of {self._path} refuses hard links ({error}), which the trial log needs; "
                f"put the file root on a shared POSIX file system (NFS, Lustre, GPFS, BeeGFS)"
            ) from error
