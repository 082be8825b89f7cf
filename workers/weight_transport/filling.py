"""Fills an empty directory with the files of a version, each from the first that has it.

    for each file:  the same in a version that is held ─────► a second name for it
                    its encoding: a way from what is held ──► pieces ─┐
                    other hosts, one after the other ───────► pieces ─┼─ hashed on the way ──► the manifest's digest?
                    the shared file system ─────────────────► pieces ─┘                             no, damaged, gone:
                                                                                                    the next one
What is asked is where the bytes are (a place), and how few of them it takes (an encoding: `by_deltas`, `by_adapter`).
None need know which version follows which: what comes out is compared with what was published, so that nothing depends
on whom it came from but time. What the shared file system has is the version itself: if that differs, it is torn.

What a staging is asked for, what it says, and how long it may take.

version, directory, digest of its manifest ──WeightStaging──► StagedVersion: verified files
                                                         `──► CorruptCheckpointError: they are not what was published

every piece that was read ──check──► goes on      another's lock ──wait_for──► looks again
                              `──► StagingError: past its deadline, or given up
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from corral.workers.checkpoint.durable_file import (
    ContentDigest,
    FileEntry,
    for_each_file,
    mismatch,
    write_hashed,
)
from corral.workers.checkpoint.file_delta import DELTA_SUFFIX
from corral.workers.checkpoint.manifest import (
    ADAPTER_FOLDER,
    MANIFEST_NAME,
    CorruptCheckpointError,
    Manifest,
    read_manifest,
    read_pieces,
)

logger = logging.getLogger(__name__)


class StagingError(RuntimeError):
    """The files of a version could not be staged in time; says what it waited for, or what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What a worker has fetched of a version, and from where."""

    bytes_read: int = 0
    """Of the shared file system."""
    bytes_received: int = 0
    """From other hosts."""
    failed_sources: tuple[str, ...] = ()
    """Control URLs of the workers that did not give what they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedVersion(Arrived):
    """Files that are what was published, ready to be read; all else is 0 if another worker of the host staged them."""

    path: Path
    """Where the server reads them; they stay there until it has taken over another version."""
    seconds: float
    """How long that took, waits for other workers included."""


@dataclass(frozen=True, slots=True)
class StagingDeadline:
    """Of one staging: how long it may still take, and whether anybody still wants it.

    A thread cannot be cancelled, so its work asks again and again.
    """

    what: str
    """That is staged, for messages."""
    timeout_s: float
    deadline: float
    """On the clock of `time.monotonic`."""
    given_up: threading.Event

    @classmethod
    def of(cls, what: str, *, timeout_s: float, given_up: threading.Event) -> "StagingDeadline":
        return cls(what, timeout_s, time.monotonic() + timeout_s, given_up)

    def check(self) -> None:
        """StagingError once it is over."""
        self._check("the shared file system is too slow for it, or hangs")

    def wait_for(self, whom: str, *, seconds: float) -> None:
        """A pause between two looks at what somebody else does; StagingError, naming him, once patience is over."""
        self.given_up.wait(seconds)
        self._check(f"it waited for {whom or 'another worker of this host'}, which stages a version")

    def _check(self, reason: str) -> None:
        if self.given_up.is_set():
            raise StagingError(f"the staging of {self.what} was given up: the worker leaves")
        if time.monotonic() > self.deadline:
            raise StagingError(
                f"{self.what} was not staged within {self.timeout_s:g} s (weights.update_timeout_s): {reason}"
            )


Pieces = Generator[memoryview, None, None]
"""A file in order; each piece is valid until the next one is asked for."""


class NoSourceError(Exception):
    """A file does not come from where it was expected; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """How a file comes."""

    origin: str
    """For messages."""
    pieces: Pieces
    """Raises NoSourceError or OSError."""
    bytes_read: int = 0
    """Of the shared file system."""
    bytes_received: int = 0
    """From another host."""
    failed: Callable[[], object] = lambda: None
    """Called when it was not what it should be."""


FindSource = Callable[[str, FileEntry], FileSource | None]
"""How a file of this name and content comes from one place, or by one encoding; None where there is no way. Raises
NoSourceError or OSError where it is damaged."""


@dataclass(frozen=True, slots=True)
class Held:
    """The versions in the host directory, newest first, with what their files were compared with before."""

    versions: Sequence[tuple[Path, Mapping[str, FileEntry]]]

    @classmethod
    def of(cls, held: Sequence[Path]) -> "Held":
        """Those whose manifest is what their name says."""
        versions: list[tuple[Path, Mapping[str, FileEntry]]] = []
        for path in held:
            try:
                versions.append((path, read_manifest(path, path.name).files))
            except CorruptCheckpointError as error:
                logger.warning("nothing is made from a version that this host holds: %s", error)
        return cls(versions)

    def file(self, name: str, entry: FileEntry) -> Path | None:
        """The file of this name that has this content."""
        return next((path / name for path, files in self.versions if files.get(name) == entry), None)

    def contents(self, name: str) -> frozenset[FileEntry]:
        """Of all files of this name."""
        return frozenset(files[name] for _, files in self.versions if name in files)


@dataclass(slots=True, kw_only=True)
class Filling:
    """A version, and where it goes."""

    weights: Path
    """On the shared file system."""
    manifest: Manifest
    into: Path
    held: Held
    on_progress: Callable[[], None]
    """Called in any thread for every piece; what it raises ends the work."""
    bytes_read: int = 0
    """Of the shared file system, by an encoding for all its ways together."""

    def fill(self, encode: "Encode", others: Sequence[FindSource] = ()) -> Arrived:
        """Write the files that servers read, and the manifest.

        Guarantee: when it returns, every file has the digest that the manifest names, whatever it came from.

        Args:
            others: ways from other hosts, in the order in which they are asked.

        Raises:
            CorruptCheckpointError: what is on the shared file system, where that was asked, is not what was published.
            OSError: a file of it could not be read, or there is no room.
        """
        for name in self.manifest.files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise CorruptCheckpointError(
                    f"{self.weights}/{MANIFEST_NAME}: expected names inside of it, got {name!r}"
                )
        served = {name: entry for name, entry in self.manifest.files.items() if _is_served(name)}
        finders = [encode(self), *others]
        brought = for_each_file(lambda name: self._bring(name, served[name], finders), served)
        data = (self.weights / MANIFEST_NAME).read_bytes()
        (self.into / MANIFEST_NAME).write_bytes(data)
        num_made = sum(number <= 0 for number, _ in brought.values())
        logger.info(
            "%s/%s: %d of %d files from the version before, %d read whole",
            self.weights.parent.name,
            self.weights.name,
            num_made,
            len(brought),
            len(brought) - num_made,
        )
        if others and (num_read := sum(number == len(finders) for number, _ in brought.values())):
            logger.warning(
                "%d of %d files of %s are read from the shared file system, since no other host gave them",
                num_read,
                len(brought),
                self.weights,
            )
        ways = [way for _, way in brought.values() if way is not None]
        return Arrived(
            bytes_read=sum(way.bytes_read for way in ways) + self.bytes_read + len(data),
            bytes_received=sum(way.bytes_received for way in ways),
        )

    def _bring(self, name: str, expected: FileEntry, finders: Sequence[FindSource]) -> tuple[int, FileSource | None]:
        """The number of the first who had it, after all of them the shared file system, and the way; -1 and None for a
        second name for what is held."""
        target = self.into / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (same := self.held.file(name, expected)) is not None:
            try:
                os.link(same, target)
                return -1, None
            except OSError as error:
                logger.warning("%s is read whole, from the next that has it: %s", self.weights / name, error)
        for number, find in enumerate(finders):
            way = None
            try:
                if (way := find(name, expected)) is not None:
                    self._write(name, way, expected)
                    return number, way
            except (NoSourceError, OSError) as error:
                logger.warning("%s is read whole, from the next that has it: %s", self.weights / name, error)
                target.unlink(missing_ok=True)
                if way is not None:
                    way.failed()
        path = self.weights / name
        way = FileSource(origin=str(path), pieces=read_pieces(path, expected), bytes_read=expected.size)
        try:
            self._write(name, way, expected)
        except NoSourceError as error:
            raise CorruptCheckpointError(str(error)) from error
        return len(finders), way

    def _write(self, name: str, way: FileSource, expected: FileEntry) -> None:
        digest = ContentDigest()
        with open(self.into / name, "xb", buffering=0) as file, closing(way.pieces) as pieces:
            for piece in pieces:
                write_hashed(file, piece, digest)
                self.on_progress()
        if (actual := digest.hexdigest()) != expected.digest:
            raise NoSourceError(f"{way.origin}: {mismatch(expected.digest, actual)}")


Encode = Callable[[Filling], FindSource]
"""How the files of a version come from what is held."""


def whole(version: Filling) -> FindSource:
    """In no other way than as they are."""
    return lambda name, expected: None


def _is_served(name: str) -> bool:
    """Whether servers read it: deltas and adapters are for hosts."""
    return not name.endswith(DELTA_SUFFIX) and not name.startswith(f"{ADAPTER_FOLDER}/")
