"""A version's files, copied and hashed in one go: what they come from is read once.

file, or another host ──read──► piece ──write──► the copy
                                  └───► digest ──► the manifest's? ──► CorruptCheckpointError if not
"""

import os
import stat
from collections.abc import Callable
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Protocol

from corral.workers.checkpoint.content_digest import ContentDigest, mismatch
from corral.workers.checkpoint.durable_file import CACHED_BYTES, FileEntry, write_hashed
from corral.workers.checkpoint.file_threads import for_each_file
from corral.workers.checkpoint.manifest import MANIFEST_NAME, CorruptCheckpointError, Manifest


class Reader(Protocol):
    """What the bytes of one file come from, in order."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the beginning of a buffer; how many bytes that were, 0 or None at the end."""


def copy_verified(weights: Path, manifest: Manifest, into: Path, *, on_progress: Callable[[], None]) -> int:
    """Copies the files of a manifest, and the manifest itself, into an empty directory.

    Guarantee: when it returns, every file has the digest that `manifest` names, by the bytes that were copied.

    Args:
        on_progress: called in any thread for every piece; what it raises ends the work.

    Returns:
        The bytes that were read.

    Raises:
        CorruptCheckpointError: at the first file that differs; names it.
        OSError: a file could not be read, or `into` has no room.
    """

    def copy(name: str) -> None:
        expected = manifest.files[name]
        with _opened(weights / name, expected) as reading:
            copy_file(reading, into / name, expected, origin=str(weights / name), on_progress=on_progress)

    check_names(weights, manifest)
    for_each_file(copy, manifest.files)
    data = (weights / MANIFEST_NAME).read_bytes()
    (into / MANIFEST_NAME).write_bytes(data)
    return sum(entry.size for entry in manifest.files.values()) + len(data)


def check_names(weights: Path, manifest: Manifest) -> None:
    """CorruptCheckpointError if a manifest names a file outside of its directory."""
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CorruptCheckpointError(f"{weights / MANIFEST_NAME}: expected names inside of it, got {name!r}")


def copy_file(
    reading: Reader, target: Path, expected: FileEntry, *, origin: str, on_progress: Callable[[], None]
) -> None:
    """Copies one file, whatever it comes from, with the folders above it.

    Guarantee: when it returns, the bytes that were written have the digest that is expected.

    Args:
        target: no such file may be there.
        origin: of the bytes, for messages.

    Raises:
        CorruptCheckpointError: they are other ones.
        OSError: `target` could not be written; and whatever `reading` raises.
    """
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = ContentDigest()
    buffer = memoryview(bytearray(min(CACHED_BYTES, expected.size + 1)))
    with open(target, "xb", buffering=0) as writing:
        while size := reading.readinto(buffer):
            write_hashed(writing, buffer[:size], digest)
            on_progress()
    if (actual := digest.hexdigest()) != expected.digest:
        raise CorruptCheckpointError(f"{origin}: {mismatch(expected.digest, actual)}")


def _opened(source: Path, expected: FileEntry) -> FileIO:
    try:
        reading = open(source, "rb", buffering=0)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{source}: expected {expected.size} bytes, got no file") from error
    status = os.fstat(reading.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_size != expected.size:
        reading.close()
        raise CorruptCheckpointError(f"{source}: expected {expected.size} bytes, got {status.st_size}")
    return reading
