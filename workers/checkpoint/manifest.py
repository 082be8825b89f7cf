"""A manifest makes a directory all or nothing: a checkpoint, or a version of the weights.

    write_durable, where the bytes are ──► {path: FileEntry} ──► write_manifest ──► SealedDirectory
    read_manifest (is it the one that was named?) ──► verify_manifest (are the files what it says?)

Sealing reads nothing: it trusts the digests of those who wrote. Only a reader reads. Verification reports every
piece that was hashed (`on_progress`), so that a deadline can be one without progress, whatever the size.

A version of the weights gets a second name that stays, as a commit or an export (`link_weights`).

    weights/v00000007-e1:  model.safetensors, config.json, ... ──second names──► checkpoints/.../weights, exports/...
                           model.safetensors.delta             ──► left behind, and a manifest of what was not

A delta saves bytes to a host that holds the version before, and that one is gone long before a commit or an export is.
Beside the whole files that it leads to it would only be stored, copied, and verified at every recovery.
"""

import logging
import os
import stat
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeVar

import msgspec

from corral.experiments.trial.directory import atomic_write, fsync_directory, link_files
from corral.workers.checkpoint.durable_file import (
    CACHED_BYTES,
    DIGEST_NAME,
    ContentDigest,
    FileEntry,
    digest_of,
    for_each_file,
    mismatch,
    no_progress,
)
from corral.workers.checkpoint.file_delta import DELTA_SUFFIX

logger = logging.getLogger(__name__)

T = TypeVar("T")

MANIFEST_NAME: Final = "manifest.json"
ADAPTER_FOLDER: Final = "adapter"
"""Of an adapter within a version of the weights: loaders of models read every safetensors file of a folder."""
_RETRY_PAUSES_S: Final = (1.0, 5.0, 20.0)  # a file server that failed over, or a handle that went stale


_FORMAT: Final = 2
"""Of manifests; those of 1 held SHA-256 in a field of that name."""


class CorruptCheckpointError(Exception):
    """A directory is not what its manifest says; names the file, what was expected, and what is there."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a directory."""

    files: dict[str, FileEntry]
    """By path relative to the directory, with '/' between parts."""
    extra: dict[str, Any]
    """JSON that belongs to the files, e.g. step, epoch, layout."""
    version: int = _FORMAT


class _AnyManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The common fields of manifests of all formats."""

    version: int


@dataclass(frozen=True, slots=True)
class SealedDirectory:
    """A directory that is whole, and on disk."""

    path: Path
    files: Mapping[str, FileEntry]
    """All of them, the manifest too."""

    @property
    def digest(self) -> str:
        """Of the manifest, which stands for the whole content."""
        return self.files[MANIFEST_NAME].digest


def write_manifest(directory: Path, files: Mapping[str, FileEntry], extra: Mapping[str, Any]) -> SealedDirectory:
    """Seals a directory whose files are on disk, and forces the names of all of them there, too.

    Args:
        files: by path relative to `directory`, as `write_durable` returned each to its writer.

    Raises:
        ValueError: if `extra` is not JSON.
    """
    try:
        data = msgspec.json.encode(Manifest(files=dict(sorted(files.items())), extra=dict(extra)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the extra data of the manifest of {directory} is not JSON ({error})") from error
    for folder in sorted({folder for name in files for folder in PurePosixPath(name).parents}):
        fsync_directory(directory / folder)
    atomic_write(directory / MANIFEST_NAME, data)
    # The directory's own name must be on disk, too, before a commit names it.
    fsync_directory(directory.parent)
    manifest = FileEntry(size=len(data), digest=digest_of(data))
    return SealedDirectory(directory, {**files, MANIFEST_NAME: manifest})


def read_manifest(directory: Path, digest: str | None) -> Manifest:
    """The manifest alone, without looking at the files.

    Raises:
        CorruptCheckpointError: it is missing, damaged, of an older format, or not the one with this digest.
    """
    path = directory / MANIFEST_NAME
    try:
        data = _patiently(path.read_bytes)
    except OSError as error:
        raise CorruptCheckpointError(
            f"{path} cannot be read ({error.strerror}): the directory was never finished, or lost it"
        ) from error
    actual = digest_of(data)
    if digest is not None and actual != digest:
        raise CorruptCheckpointError(f"{path}: {mismatch(digest, actual)}")
    try:
        if (version := msgspec.json.decode(data, type=_AnyManifest).version) != _FORMAT:
            raise CorruptCheckpointError(
                f"{path}: expected a manifest of format {_FORMAT}, whose digests are {DIGEST_NAME}, got format "
                f"{version}: another version of corral wrote it; to start from its files as they are, remove it"
            )
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{path}: expected a manifest, got something else ({error})") from error


def verify_manifest(directory: Path, digest: str | None, *, on_progress: Callable[[], None] = no_progress) -> Manifest:
    """Reads every file of `directory` and compares it with the manifest.

    Args:
        digest: of the manifest itself; None trusts the manifest that is there.
        on_progress: called in any thread for every piece that was read; what it raises ends the work.

    Raises:
        CorruptCheckpointError: at the first file that differs, is missing, or is not listed.
    """
    manifest = read_manifest(directory, digest)
    try:
        present = {path.relative_to(directory).as_posix() for path in _files_below(directory)} - {MANIFEST_NAME}
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(f"{directory}: expected the files of its manifest, got {error}") from error
    for name in sorted(present - manifest.files.keys()):
        # A loader that takes every file of a folder would take this one.
        raise CorruptCheckpointError(f"{directory / name}: expected no such file, got one; move it elsewhere")
    for name in sorted(manifest.files.keys() - present):
        raise CorruptCheckpointError(f"{directory / name}: expected {manifest.files[name].size} bytes, got no file")

    def check(name: str) -> None:
        path, expected, digest = directory / name, manifest.files[name], ContentDigest()
        for piece in read_pieces(path, expected):
            digest.update(piece)
            on_progress()
        if (actual := digest.hexdigest()) != expected.digest:
            raise CorruptCheckpointError(f"{path}: {mismatch(expected.digest, actual)}")

    def check_patiently(name: str) -> None:
        try:
            _patiently(lambda: check(name))
        except OSError as error:
            size = manifest.files[name].size
            raise CorruptCheckpointError(f"{directory / name}: expected {size} bytes, got {error}") from error

    for_each_file(check_patiently, manifest.files)
    return manifest


def read_pieces(path: Path, expected: FileEntry) -> Generator[memoryview, None, None]:
    """A file of a sealed directory in order, each piece valid until the next one is asked for; the reader hashes.

    Raises:
        CorruptCheckpointError: it has another length, or is no file.
        OSError: it cannot be read.
    """
    try:
        file = open(path, "rb", buffering=0)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path}: expected {expected.size} bytes, got no file") from error
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size != expected.size:
            raise CorruptCheckpointError(f"{path}: expected {expected.size} bytes, got {status.st_size}")
        buffer = memoryview(bytearray(min(CACHED_BYTES, expected.size + 1)))
        while size := file.readinto(buffer):
            yield buffer[:size]


def _files_below(directory: Path) -> Iterator[Path]:
    """All but hidden ones."""
    for entry in os.scandir(directory):
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(path)
        elif entry.is_file(follow_symlinks=False):
            yield path
        else:
            raise ValueError(f"{path} is neither a file nor a folder; a checkpoint holds nothing else, so remove it")


def _patiently(read: Callable[[], T]) -> T:
    """What `read` gives; an error of the file system is tried again, since a fall-back cannot be taken back."""
    for pause_s in _RETRY_PAUSES_S:
        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError as error:
            logger.warning("%s; trying again in %.0f s", error, pause_s)
            time.sleep(pause_s)
    return read()


def link_weights(version: SealedDirectory, target: Path) -> SealedDirectory:
    """Makes the directory `target` with second names of all that a loader of the version wants; nothing is hashed.

    Guarantee: what is there is whole and under a manifest: the version's own, unless that names deltas.

    Raises:
        CorruptCheckpointError: the version's manifest is not there any more.
    """
    if not any(name.endswith(DELTA_SUFFIX) for name in version.files):
        link_files(version.path, target)
        return SealedDirectory(target, version.files)
    extra = read_manifest(version.path, version.digest).extra
    link_files(version.path, target, wants=_is_kept)
    return write_manifest(target, {name: entry for name, entry in version.files.items() if _is_kept(name)}, extra)


def _is_kept(name: str) -> bool:
    return name != MANIFEST_NAME and not name.endswith(DELTA_SUFFIX)
