"""Files of a checkpoint as they are written: piece by piece, hashed on the way, forced to disk.

    pieces ──► write(2) ──► fsync ──► the file        names ──► fsync of the directory
        └────► digest ───► FileEntry ──► the maker of the manifest

The digest is that of the bytes that were meant, not of those that a disk gives back, so that a manifest finds out what
went wrong in between; and no byte is ever read to be sealed.

Files that are there already are worked on several at a time where that pays (`for_each_file`).
"""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import msgspec
from blake3 import blake3

PIECE_BYTES: Final = 4 * 2**20  # hashed in 1 ms: often enough to look at a deadline
CACHED_BYTES: Final = 256 * 2**10  # what is read, hashed and written does not leave a core's own cache in between


# By what a file is known: the digest of its bytes, in manifests, deltas, commits and the versions of weights.
#
#     pieces, on their way to somewhere ──update──► ContentDigest ──hexdigest──► 64 hexadecimal digits
#                                                             named before ──────► the same? ──► mismatch, if not
#
# It has to find two kinds of wrong bytes. Torn, lost and flipped ones, from disks, file systems and processes that were
# killed: any long checksum finds those. And other ones, made on purpose: a version of the weights comes from whatever
# answers at the address of another host, and the administrator's key proves the client there, not the server. Its
# digest alone came by a way of its own, so nobody may be able to make other bytes for it: a cryptographic hash. It is
# BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs), whose 256 bits are taken to be as hard to meet as those of
# SHA-256, since a processor's vector units hash several pieces of it at once, and weights are large.
#
#     digest = ContentDigest()
#     digest.update(b"ab")
#     digest.update(b"c")
#     digest.hexdigest()  # == digest_of(b"abc") == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
#
# Digests that others define stay what they are: of datasets (`sha256sum` shows them), Redis's users, SGLang's tensors.

DIGEST_NAME: Final = "BLAKE3"


ContentDigest: TypeAlias = blake3
"""Of bytes that come in pieces; a large piece is hashed without the interpreter's lock."""


def digest_of(data: bytes) -> str:
    """Of bytes that are here at once."""
    return blake3(data).hexdigest()


def mismatch(expected: str, actual: str) -> str:
    """The text for a message about two digests that differ."""
    return f"expected {DIGEST_NAME} {expected}, got {actual}"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file's entry in a manifest."""

    size: int
    """Bytes."""
    digest: str
    """Of its bytes; see `ContentDigest`."""


def no_progress() -> None:
    """For callers without a deadline."""


def write_hashed(file: FileIO, piece: memoryview, digest: ContentDigest) -> None:
    """Append bytes to a file, and to the digest of it."""
    for start in range(0, piece.nbytes, CACHED_BYTES):
        part = remaining = piece[start : start + CACHED_BYTES]
        digest.update(part)
        while remaining:  # one write(2) may take less on a nearly full disk
            remaining = remaining[file.write(remaining) :]


def write_durable(
    path: Path, pieces: Iterable[bytes | memoryview], *, on_progress: Callable[[], None] = no_progress
) -> FileEntry:
    """Writes a new file, readable by its owner only, and forces it to disk; its name only `fsync_directory` does.

    Args:
        pieces: the content, as views of bytes; each is done with before the next one is asked for.
        on_progress: called for every few megabytes; what it raises ends the work.

    Raises:
        FileExistsError: nothing is ever overwritten.
    """
    digest, size = ContentDigest(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, view.nbytes, PIECE_BYTES):
                write_hashed(file, view[start : start + PIECE_BYTES], digest)
                on_progress()
            size += view.nbytes
        os.fsync(descriptor)
    return FileEntry(size=size, digest=digest.hexdigest())


T = TypeVar("T")

_THREADS: Final = 4  # hashing and copying release the interpreter lock; more threads saturate the file system instead
_LARGE_BYTES: Final = 2**20  # takes longer to read and hash than a thread to begin


def for_each_file(work: Callable[[str], T], files: Mapping[str, FileEntry]) -> dict[str, T]:
    """What `work` gives for each name, in the order of `files`; raises what the first of them raises.

    A thread takes longer to begin, on a host that computes, than a small file to read; and of several threads none is
    needed where one file is all that is large.
    """
    num_large = sum(entry.size > _LARGE_BYTES for entry in files.values())
    if num_large < 2:
        return {name: work(name) for name in files}
    with ThreadPoolExecutor(min(_THREADS, num_large)) as pool:
        return dict(zip(files, pool.map(work, files), strict=True))
