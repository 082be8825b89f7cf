"""HostWeights: the weights that the servers of one host read, in host memory, once per version.

    /dev/shm/corral-weights-TRIAL/            0700; every worker of the host holds a shared lock of it while it lives
        staging.lock                    its holder writes; the others wait, and find what was written
        .building-TOKEN/ ──rename──► DIGEST/     a version, by the digest of its manifest; locked while it is used

What is under a digest was compared with it before it got that name, so that nothing of a worker that was killed is
ever read. What a server reads stays until it has taken over another version: if it cannot, it reads that one again.
So two versions are held at a time, and more only while servers of the host read different ones. The last worker that
leaves removes the directory; what workers left behind that were all killed goes with the guard of the last one, by its
record, or when the next trial starts here.
"""

import fcntl
import logging
import os
import re
import secrets as random_tokens
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from corral.experiments.config.rollout import SPARE_STAGING_MB
from corral.experiments.trial import leftovers
from corral.experiments.trial.flocks import (
    REMOVING,
    hold_directory,
    is_at,
    is_private,
    opened,
    remove_if_unused,
    try_lock,
)
from corral.experiments.trial.memory_groups import memory_groups
from corral.workers.weight_transport.filling import Arrived, StagingDeadline

logger = logging.getLogger(__name__)

_PREFIX: Final = "corral-weights-"
_TRIAL: Final = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_BUILDING: Final = ".building-"
_LOCK: Final = "staging.lock"
_POLL_INTERVAL_S: Final = 0.02  # a version takes far longer to write
_JOIN_TRIES: Final = 100
_SPARE_BYTES: Final = SPARE_STAGING_MB * 2**20
_MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs"})


class NoRoomError(RuntimeError):
    """The version does not fit into the host directory; names what it needs and what there is."""


WriteVersion = Callable[[Path, Sequence[Path]], Arrived]
"""Writes all files of a version, compared with their manifest, into the empty directory that comes first; then come the
versions that are held already, by the digests of their manifests, newest first."""


def room_in(directory: Path) -> int:
    """Bytes that may still be written into a directory before somebody is killed for it.

    A file system of memory gives what nobody else has, and SLURM's limits for the job's memory hold, too.
    """
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    if not _is_memory(directory):
        return free
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(memory["MemAvailable"].split()[0]) * 1024
    rooms = (group.room for group in memory_groups())
    return max(0, min(free, available, *(room for room in rooms if room is not None)))


def _is_memory(directory: Path) -> bool:
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0] in _MEMORY_FILE_SYSTEMS
    return False


class HostWeights:
    """One worker's part in the directory of its host; used by one thread at a time, but for nothing else.

    Raises:
        OSError: the directory cannot be made, is somebody else's, or cannot be locked.
    """

    def __init__(self, root: Path, trial_uuid: str, *, owner: str, room: Callable[[Path], int] = room_in) -> None:
        """
        Args:
            root: a directory in the host's memory.
            owner: this worker, for those who wait for it.
            room: bytes that may still be written into a directory.
        """
        self.path = root / f"{_PREFIX}{trial_uuid}"
        self._owner = f"{owner} (process {os.getpid()})"
        self._room = room
        self._remove_dead_trials(root)
        leftovers.note(self.path)
        self._membership = _join(self.path)
        self._held: tuple[Path, int] | None = None
        """Obtained last."""
        self._read: tuple[Path, int] | None = None
        """Taken over last."""

    def obtain(
        self, digest: str, *, size_bytes: int, write: WriteVersion, patience: StagingDeadline
    ) -> tuple[Path, Arrived]:
        """The directory of a version, held until another one is taken over, and where it has come from now.

        Guarantee: of all workers of the host that ask at the same time, one writes, and the others get what it wrote.

        Args:
            digest: of its manifest.
            size_bytes: of all its files.

        Raises:
            NoRoomError: it does not fit.
            StagingError: patience was over, with the name of the worker that was waited for.
        """
        target = self.path / digest
        if not is_at(self._membership, self.path):  # logind removes what a user has in /dev/shm when he logs out
            os.close(self._membership)
            self._membership = _join(self.path)
        with self._staging(patience):
            self._remove_remains()
            if self._read and self._held and target not in (self._read[0], self._held[0]):
                self._hold_only(self._read)
                self._remove_unused()  # what was not taken over: else there would be three
            arrived = Arrived()
            if not target.is_dir():
                self._make_room(size_bytes)
                arrived = self._build(target, write)
            self._hold(target)
            self._remove_unused()
        return target, arrived

    def taken_over(self) -> None:
        """The server reads what was obtained last, and nothing older."""
        held = self._held
        self._hold_only(held)
        self._read = held
        with suppress(OSError), opened(self.path / _LOCK) as lock:
            if try_lock(lock, fcntl.LOCK_EX):  # else its holder removes them
                self._remove_unused()

    def held(self, digest: str) -> Path | None:
        """The directory of a version, if it is the one that this worker holds; any thread may ask."""
        held = self._held
        return held[0] if held is not None and held[0].name == digest else None

    def close(self) -> None:
        """Let go; the last worker of the host that leaves removes everything."""
        self._hold_only()
        os.close(self._membership)
        remove_if_unused(self.path)

    @contextmanager
    def _staging(self, patience: StagingDeadline) -> Iterator[None]:
        with opened(self.path / _LOCK) as lock:
            while not try_lock(lock, fcntl.LOCK_EX):
                patience.wait_for(os.pread(lock, 200, 0).decode(errors="replace"), seconds=_POLL_INTERVAL_S)
            os.ftruncate(lock, 0)
            os.pwrite(lock, self._owner.encode(), 0)
            yield

    def _build(self, target: Path, write: WriteVersion) -> Arrived:
        building = self.path / f"{_BUILDING}{random_tokens.token_hex(8)}"
        building.mkdir(mode=0o700)
        try:
            arrived = write(building, self._versions())
            building.rename(target)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        return arrived

    def _make_room(self, size_bytes: int) -> None:
        """Gives up what could only save work: first versions that nobody holds, then the one that this worker holds."""
        for give_up in (self._remove_unused, self._hold_only, self._remove_unused):
            if self._room(self.path) >= size_bytes + _SPARE_BYTES:
                return
            give_up()
        if self._room(self.path) >= size_bytes + _SPARE_BYTES:
            return
        raise NoRoomError(
            f"{self.path} has room for {self._room(self.path):,} bytes, and the version needs {size_bytes:,} and "
            f"{_SPARE_BYTES:,} to spare; give the job more memory, or name another place in weights.host_directory"
        )

    def _versions(self) -> list[Path]:
        """Newest first."""
        found = [path for path in self.path.iterdir() if _DIGEST.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)

    def _hold(self, target: Path) -> None:
        descriptor = hold_directory(target)
        assert descriptor is not None  # versions are removed by the holder of the staging lock, which is this process
        self._hold_only(self._read, (target, descriptor))

    def _hold_only(self, *kept: tuple[Path, int] | None) -> None:
        """Lets go of all but these, of which the last one counts as obtained last."""
        for held in {held for held in (self._held, self._read) if held is not None and held not in kept}:
            os.close(held[1])
        self._held = kept[-1] if kept else None
        self._read = self._read if self._read in kept else None

    def _remove_unused(self) -> None:
        for version in self._versions():
            remove_if_unused(version)

    def _remove_remains(self) -> None:
        """Of workers that died while they wrote or removed."""
        for path in self.path.iterdir():
            if path.name.startswith((_BUILDING, REMOVING)):
                shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def _remove_dead_trials(root: Path) -> None:
        for path in root.iterdir():
            is_remainder = path.name.startswith(REMOVING) and path.is_dir()
            if (is_remainder or _TRIAL.fullmatch(path.name)) and remove_if_unused(path):
                logger.info("removed the weights of a trial that has ended: %s", path)


def _join(path: Path) -> int:
    """The directory, made if need be, and held by this process."""
    for _ in range(_JOIN_TRIES):  # each fails only because another process removes it at this very moment
        path.mkdir(mode=0o700, exist_ok=True)
        descriptor = hold_directory(path)
        if descriptor is not None:
            if is_private(descriptor):
                return descriptor
            os.close(descriptor)
            raise PermissionError(f"{path} is not private to this user; its owner may change what servers read")
    raise BlockingIOError(f"{path} was removed {_JOIN_TRIES} times while this worker joined it")
