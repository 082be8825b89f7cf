"""What is to go with a process of ours, however that ends: written down on its host before it is made.

    /dev/shm/corral-UID/TOKEN      a record: its owner holds a lock of it while it lives
        line 1        whose trial, which session of processes, since when
        further ones  paths: a folder in memory, a temporary folder, a name in /dev/shm, a file of secrets

The process that gets the lock of a record knows that the owner is gone, and removes the record's leftovers
(launcher/trial/processes.py).
Guarantee: nothing that a living process uses is removed: folders are locked by those who use them, and a file of
secrets is known by its time, so that those made anew under its name stay.
"""

import contextlib
import fcntl
import json
import os
import secrets as random_tokens
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from corral.experiments.trial.directory import remove_file
from corral.experiments.trial.flocks import is_private, open_directory, remove_if_unused, try_lock

_MAPPED_WHILE_USED: Final = ("sem.mp-", "sglang_loads_", "sgl_shm_")
"""Prefixes of names in /dev/shm that a process maps as long as it uses them: semaphores of multiprocessing, slots of
SGLang."""
LEFTOVERS_VARIABLE: Final = "CORRAL_LEFTOVERS"
"""Names the record of a worker to all that runs in it."""
MEMORY: Final = Path("/dev/shm")


class RecordHead(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a record."""

    trial: str
    """Its UUID."""
    session: int
    """Process id of the leader of the session that all of it runs in; 0 if there is none to end."""
    start_ticks: int
    """Of that leader."""
    begun: float
    """Seconds since 1970."""


@dataclass(slots=True, kw_only=True)
class Record:
    """A record that this process holds the lock of."""

    path: Path
    descriptor: int
    head: "RecordHead"

    def note(self, path: Path) -> None:
        """Has this go when the owner does."""
        note(path, self.path)

    def paths(self) -> list[tuple[Path, int | None]]:
        """What is noted, and the time of a file of secrets."""
        lines = os.pread(self.descriptor, 1 << 20, 0).split(b"\n")[1:-1]  # what follows the last end was cut off
        noted = map(json.loads, lines)
        return [(Path(line["path"]), line.get("mtime_ns")) for line in noted]

    def remove(self) -> None:
        """All that is noted, names that nobody uses, and the record; what cannot be removed only takes space."""
        for path, mtime_ns in self.paths():
            _remove(path, mtime_ns)
        remove_unused_names(since=self.head.begun)
        self.drop()

    def drop(self) -> None:
        """The record alone: what is noted stays."""
        remove_file(self.path)
        os.close(self.descriptor)


def records_folder() -> Path:
    """This user's records on this host.

    Raises:
        OSError: if it cannot be made, or somebody else has it.
    """
    folder = MEMORY / f"corral-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = open_directory(folder)
    try:
        if not is_private(descriptor):
            raise PermissionError(f"{folder} is not private to this user; it is left alone")
    finally:
        os.close(descriptor)
    return folder


def begin(trial_uuid: str, *, session: int = 0, start_ticks: int = 0) -> Record:
    """A new record, locked until its descriptor is closed everywhere.

    Raises:
        OSError: if this host has no place for it.
    """
    path = records_folder() / random_tokens.token_hex(8)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    head = RecordHead(trial=trial_uuid, session=session, start_ticks=start_ticks, begun=time.time())
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, msgspec.json.encode(head) + b"\n")
    except OSError:
        path.unlink()
        os.close(descriptor)
        raise
    return Record(path=path, descriptor=descriptor, head=head)


def take(path: Path) -> Record | None:
    """The record of an owner that is gone; None if it lives, or the file is no record (yet)."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # without locks nobody knows who lives
        if try_lock(descriptor, fcntl.LOCK_EX) and (head := _head(descriptor)) is not None:
            return Record(path=path, descriptor=descriptor, head=head)
    os.close(descriptor)
    return None


def note(path: Path, record: Path | None = None) -> None:
    """Has a folder of memory or temporary files, or a name in memory, go when this worker does.

    Args:
        record: of the owner; None is that of the worker that this process runs in, if it runs in one.
    """
    record = record or Path(os.environ.get(LEFTOVERS_VARIABLE) or os.devnull)
    with record.open("a") as file:
        file.write(json.dumps({"path": str(path)}) + "\n")


@contextlib.contextmanager
def temporary_folder(prefix: str, *, inside: Path | None = None) -> Iterator[Path]:
    """A temporary folder that goes behind the block; if this process is killed, the next sweep removes it."""
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=inside, ignore_cleanup_errors=True))
        )
        with contextlib.suppress(OSError):  # without a record it stays if this process is killed
            record = begin("")
            stack.callback(record.drop)
            record.note(folder)
        yield folder


def note_secrets(record: Record, path: Path) -> None:
    """Has the folder of a file of secrets go when the owner does, unless it has been made anew."""
    with record.path.open("a") as file:
        file.write(json.dumps({"path": str(path), "mtime_ns": path.stat().st_mtime_ns}) + "\n")


def names_in_memory(pids: Iterable[int], *, memory: Path = MEMORY) -> set[Path]:
    """Files of this user right in /dev/shm that these processes have mapped: semaphores, and what is shared by name.

    By their inodes: the maker of a semaphore has mapped it under another name, which is gone.
    """
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            inodes |= {int(line.split(None, 5)[4]) for line in lines if f" {memory}/" in line}
    return {path for entry in os.scandir(memory) if entry.inode() in inodes and _is_ours(path := memory / entry.name)}


def remove_unused_names(*, since: float, memory: Path = MEMORY) -> None:
    """Names in /dev/shm of processes that have died, also of those that died before anybody looked at what they map.

    Guarantee: only names of kinds that are mapped as long as they are used, made since a moment, and mapped by nobody.
    """
    found = {
        path
        for name in os.listdir(memory)
        if name.startswith(_MAPPED_WHILE_USED) and _is_ours(path := memory / name, since=since)
    }
    if found:
        used = names_in_memory((int(name) for name in os.listdir("/proc") if name.isdecimal()), memory=memory)
        for path in found - used:
            _remove(path, None)


def _is_ours(path: Path, *, since: float = 0.0) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and status.st_mtime >= since


def _head(descriptor: int) -> RecordHead | None:
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(os.pread(descriptor, 4096, 0).partition(b"\n")[0], type=RecordHead)
    return None


def _remove(path: Path, mtime_ns: int | None) -> None:
    try:
        if mtime_ns is not None:
            if path.stat().st_mtime_ns == mtime_ns:
                shutil.rmtree(path.parent, ignore_errors=True)
        elif path.is_dir():
            remove_if_unused(path)
        else:
            path.unlink()
    except OSError:
        return  # it is gone, or takes space that nobody can give back
