"""Fills a version into the host directory from the version that is there, and from the little that is read besides.

    for each file:  the same in a version that is held ──► a second name for it
                    a way from what is held to it ───────► its pieces, hashed on the way ──► the manifest's digest?
                                                              no, damaged, or another base │
                    all others ◄───────────────────────────────────────────────────────────┘ read whole

Which way that is, `deltas.py` and `adapters.py` say. Neither need know which version follows which: what comes out is
compared with what was published.
"""

import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from corral.workers.checkpoint.content_digest import ContentDigest, mismatch
from corral.workers.checkpoint.durable_file import FileEntry, write_hashed
from corral.workers.checkpoint.file_threads import for_each_file
from corral.workers.checkpoint.manifest import CorruptCheckpointError, Manifest, read_manifest
from corral.workers.weight_transport.patience import Patience
from corral.workers.weight_transport.verified_copy import copy_verified

logger = logging.getLogger(__name__)


class NoWayError(Exception):
    """A file cannot be made from what is held, although it looked so; says why."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a file comes from what is held."""

    pieces: Generator[memoryview, None, None]
    """The whole file in order; each is valid until the next. Raises NoWayError or OSError."""
    bytes_read: int
    """Of the shared file system."""


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


@dataclass(frozen=True, slots=True)
class Filled:
    """How the files of a version came."""

    bytes_read: int
    """Of the shared file system."""
    read_whole: Set[str]
    """Names of the files that were not made from what is held."""


class FindWay(Protocol):
    """How one file of a version comes from what is held."""

    def __call__(self, name: str, expected: FileEntry) -> Way | None:
        """None where there is no way from what is held. Raises NoWayError or OSError where it is damaged."""


def fill_from_held(
    weights: Path, manifest: Manifest, into: Path, held: Held, patience: Patience, find_way: FindWay
) -> Filled:
    """Write the files of a manifest into an empty directory, as many of them as can be from what is held.

    Guarantee: when it returns, every file has the digest that `manifest` names, whatever it was made from.

    Args:
        weights: the version on the shared file system.
        manifest: of the files that servers read.
    """
    maker = _Maker(weights, manifest.files, into, held, find_way, patience.check)
    read_by_name = for_each_file(maker.make, manifest.files)
    missing = {name: manifest.files[name] for name, num_bytes in read_by_name.items() if num_bytes is None}
    logger.info(
        "%s/%s: %d of %d files from the version before, %d read whole",
        weights.parent.name,
        weights.name,
        len(manifest.files) - len(missing),
        len(manifest.files),
        len(missing),
    )
    whole = copy_verified(weights, msgspec.structs.replace(manifest, files=missing), into, on_progress=patience.check)
    made = sum(num_bytes for num_bytes in read_by_name.values() if num_bytes is not None)
    return Filled(bytes_read=whole + made, read_whole=missing.keys())


@dataclass(frozen=True, slots=True)
class _Maker:
    """Of the files of one version."""

    weights: Path
    files: Mapping[str, FileEntry]
    into: Path
    held: Held
    find_way: FindWay
    on_progress: Callable[[], None]

    def make(self, name: str) -> int | None:
        """A file out of what is held; the bytes that were read for it, or None if it has to be read whole."""
        if Path(name).name != name:
            return None
        try:
            if (same := self.held.file(name, self.files[name])) is not None:
                os.link(same, self.into / name)
                return 0
            way = self.find_way(name, self.files[name])
            if way is None:
                return None
            self._write(name, way)
            return way.bytes_read
        except (NoWayError, OSError) as error:
            logger.warning(
                "%s is read whole, since it could not be made from what is held: %s", self.weights / name, error
            )
            (self.into / name).unlink(missing_ok=True)
            return None

    def _write(self, name: str, way: Way) -> None:
        digest = ContentDigest()
        with open(self.into / name, "xb", buffering=0) as file, closing(way.pieces) as pieces:
            for piece in pieces:
                write_hashed(file, piece, digest)
                self.on_progress()
        if (actual := digest.hexdigest()) != self.files[name].digest:
            raise NoWayError(mismatch(self.files[name].digest, actual))
