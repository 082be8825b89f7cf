"""Checkpoints on disk: files first, checksums next, the trial log last.

    ranks write shards --> write_manifest (sizes, SHA-256, fsync) --> LogWriter.commit --> collect_garbage
                |                        |                                   |
      a crash here leaves       ... or here: a directory            from here on it counts
      a directory that no       that no commit names
      commit names

    recovery: last commit of the lineage --verify--> good: continue it
                                            |
                                            +------> corrupt: reject it with its reason, try its parent

A manifest makes a directory (a checkpoint, or a version of the weights) all or nothing. A checkpoint holds all that a
commit stands for: weights, training state, and the whole ledger. Torch stays outside: whoever has tensors writes files
into `CheckpointWriter.path`.

A commit is all or nothing because it is one entry in the trial log, appended when all that it names is on disk; its
checksums find what is damaged later. Removing what no commit names only gives space back.

Checkpoints can be so large that hashing one takes many minutes. Whoever seals or verifies one is told of every piece
that was hashed (`on_progress`), so a deadline can be one without progress.
"""

import hashlib
import logging
import os
import re
import secrets as random_tokens
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from corral.experiments.trial.directory import TrialDirectory, atomic_write, fsync_directory
from corral.experiments.trial.log_state import Commit, LoggedCommit, LogState
from corral.workers.checkpoint.ledger import LEDGER_NAME, CorruptLedgerError, Ledger, read_whole

logger = logging.getLogger(__name__)

T = TypeVar("T")

MANIFEST_NAME: Final = "manifest.json"
MIN_KEPT_COMMITS: Final = 2  # one may turn out to be corrupt
_HASH_THREADS: Final = 4  # hashing releases the interpreter lock; more threads saturate the file system instead
_RETRY_PAUSES_S: Final = (1.0, 5.0, 20.0)  # a file server that failed over, or a handle that went stale
_PIECE_BYTES: Final = 4 * 2**20  # hashed in 3 ms; even a slow file system delivers one within a second
_DIRECTORY_NAME: Final = re.compile(r"step-(?P<step>\d{8,})-e(?P<epoch>\d+)-[0-9a-f]{8}", re.ASCII)
_REMOVING: Final = ".removing-"


class CorruptCheckpointError(Exception):
    """A directory is not what its manifest says; names the file, what was expected, and what is there."""


class NoValidCheckpointError(Exception):
    """There are commits, and none can be loaded. A trial never starts from scratch silently."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: int
    """Bytes."""
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a directory."""

    files: dict[str, FileEntry]
    """By path relative to the directory, with '/' between parts."""
    extra: dict[str, Any]
    """JSON that belongs to the files, e.g. step, epoch, layout."""
    version: int = 1


def no_progress() -> None:
    """For callers without a deadline."""


def write_manifest(directory: Path, extra: Mapping[str, Any], *, on_progress: Callable[[], None] = no_progress) -> str:
    """Forces all files of `directory` to disk and seals them with a manifest.

    Files whose names start with '.' are not part of the content.

    Args:
        on_progress: called in any thread for every piece that was hashed; what it raises ends the work.

    Returns:
        SHA-256 of the manifest, which stands for the whole content.

    Raises:
        ValueError: if there is anything but files and folders, or `extra` is not JSON.
    """
    paths = list(_content(directory))
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        entries = list(pool.map(lambda path: _seal_file(path, on_progress), paths))
    files = {path.relative_to(directory).as_posix(): entry for path, entry in zip(paths, entries, strict=True)}
    for folder, _, _ in os.walk(directory):
        fsync_directory(Path(folder))
    try:
        data = msgspec.json.encode(Manifest(files=dict(sorted(files.items())), extra=dict(extra)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the extra data of the manifest of {directory} is not JSON ({error})") from error
    atomic_write(directory / MANIFEST_NAME, data)
    # The directory's own name must be on disk, too, before a commit names it.
    fsync_directory(directory.parent)
    return hashlib.sha256(data).hexdigest()


def read_manifest(directory: Path, sha256: str | None) -> Manifest:
    """The manifest alone, without looking at the files.

    Raises:
        CorruptCheckpointError: it is missing, damaged, or not the one with this SHA-256.
    """
    path = directory / MANIFEST_NAME
    try:
        data = _patiently(path.read_bytes)
    except OSError as error:
        raise CorruptCheckpointError(
            f"{path} cannot be read ({error}); the directory was never finished, or lost it"
        ) from error
    actual = hashlib.sha256(data).hexdigest()
    if sha256 is not None and actual != sha256:
        raise CorruptCheckpointError(f"{path}: expected SHA-256 {sha256}, got {actual}")
    try:
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{path}: expected a manifest, got something else ({error})") from error


def verify_manifest(directory: Path, sha256: str | None, *, on_progress: Callable[[], None] = no_progress) -> Manifest:
    """Reads every file of `directory` and compares it with the manifest.

    Args:
        sha256: of the manifest itself; None trusts the manifest that is there.
        on_progress: called in any thread for every piece that was read; what it raises ends the work.

    Raises:
        CorruptCheckpointError: at the first file that differs, is missing, or is not listed.
    """
    manifest = read_manifest(directory, sha256)
    try:
        present = {path.relative_to(directory).as_posix() for path in _content(directory)}
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(f"{directory}: expected the files of its manifest, got {error}") from error
    for name in sorted(present - manifest.files.keys()):
        # A loader that takes every file of a folder would take this one.
        raise CorruptCheckpointError(f"{directory / name}: expected no such file, got one; move it elsewhere")
    for name in sorted(manifest.files.keys() - present):
        raise CorruptCheckpointError(f"{directory / name}: expected {manifest.files[name].size} bytes, got no file")
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        problems = pool.map(
            lambda name: _problem_of(directory / name, manifest.files[name], on_progress), manifest.files
        )
        for problem in problems:
            if problem:
                raise CorruptCheckpointError(problem)
    return manifest


def verify_checkpoint(
    trial_directory: TrialDirectory, commit: Commit, *, on_progress: Callable[[], None] = no_progress
) -> None:
    """Reads all that a commit stands for.

    Raises:
        CorruptCheckpointError: something is missing or damaged.
    """
    directory = _directory_of(trial_directory, commit)
    manifest = verify_manifest(directory, commit.manifest_sha256, on_progress=on_progress)
    if LEDGER_NAME not in manifest.files:
        raise CorruptCheckpointError(f"{directory}: expected {LEDGER_NAME} among its files, got none")
    written = manifest.extra.get("epoch"), manifest.extra.get("step")
    if written != (commit.epoch, commit.step):
        raise CorruptCheckpointError(
            f"{directory}: expected (epoch, step) {commit.epoch, commit.step}, as the trial log says, got {written}"
        )


def committed_ledger(trial_directory: TrialDirectory, commit: Commit) -> Ledger:
    """What a commit and its ancestors have consumed, from the checkpoint; its other files are not looked at.

    Raises:
        CorruptCheckpointError: the checkpoint is gone or damaged.
    """
    directory = _directory_of(trial_directory, commit)
    entry = read_manifest(directory, commit.manifest_sha256).files.get(LEDGER_NAME)
    if entry is None:
        raise CorruptCheckpointError(f"{directory}: expected {LEDGER_NAME} among its files, got none")
    try:
        return read_whole(directory, sha256=entry.sha256)
    except CorruptLedgerError as error:
        raise CorruptCheckpointError(str(error)) from error


class CheckpointWriter:
    """A new checkpoint directory that nobody else writes into, not even another attempt at the same step.

    >>> writer = CheckpointWriter(trial, epoch=3, step=120)       # checkpoints/step-00000120-e3-9f1c2ab4/
    >>> save_shard(writer.path / "rank-0.safetensors")            # any process may write
    >>> digest = writer.write_manifest({"dp": 4})                 # once all have; then LogWriter.commit
    """

    def __init__(self, trial_directory: TrialDirectory, *, epoch: int, step: int) -> None:
        name = f"step-{step:08d}-e{epoch}-{random_tokens.token_hex(4)}"
        self.epoch: Final = epoch
        self.step: Final = step
        self.path: Final = trial_directory.checkpoints_path / name
        self.relative_path: Final = trial_directory.relative(self.path)
        """What the commit entry names."""
        self.path.mkdir(mode=0o700)

    def write_manifest(self, extra: Mapping[str, Any], *, on_progress: Callable[[], None] = no_progress) -> str:
        """Seals the checkpoint; returns the SHA-256 that the commit entry names."""
        return write_manifest(self.path, {"epoch": self.epoch, "step": self.step, **extra}, on_progress=on_progress)


@dataclass(frozen=True, slots=True)
class RejectedCommit:
    """A commit that cannot be loaded, and why."""

    logged: LoggedCommit
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPoint:
    """Where a new epoch continues."""

    honoured: tuple[LoggedCommit, ...]
    """The lineage, oldest first; its last commit is loaded. Empty: nothing was committed yet.

    The samples of rejected commits are not consumed: they will be trained again, from the state before.
    """
    rejected: tuple[RejectedCommit, ...]
    """Newer commits that were passed over, newest first."""

    @property
    def slot(self) -> int:
        """Of the commit that is loaded; 0 if there is none."""
        return self.honoured[-1].slot if self.honoured else 0

    @property
    def commit(self) -> Commit | None:
        return self.honoured[-1].commit if self.honoured else None


def last_valid_commit(
    log_state: LogState, trial_directory: TrialDirectory, *, on_progress: Callable[[], None] = no_progress
) -> RecoveryPoint:
    """The newest commit of the lineage whose checkpoint is whole.

    Args:
        on_progress: called in any thread for every piece that was read; what it raises ends the search.

    Raises:
        NoValidCheckpointError: there are commits, and none of them can be loaded.
    """
    lineage = log_state.lineage()
    rejected: list[RejectedCommit] = []
    num_honoured = len(lineage)
    while num_honoured:
        logged = lineage[num_honoured - 1]
        try:
            verify_checkpoint(trial_directory, logged.commit, on_progress=on_progress)
            break
        except CorruptCheckpointError as error:
            rejected.append(RejectedCommit(logged, str(error)))
        num_honoured -= 1
    for bad in rejected:
        logger.error(
            "commit of step %d (slot %08d) is rejected: %s", bad.logged.commit.step, bad.logged.slot, bad.reason
        )
    if lineage and not num_honoured:
        reasons = "".join(f"\n  step {bad.logged.commit.step}: {bad.reason}" for bad in rejected)
        raise NoValidCheckpointError(
            f"none of the {len(lineage)} commits of {trial_directory.path} can be loaded; restore one of these from a "
            f"backup, or start a new trial:{reasons}"
        )
    if rejected:
        logger.error("continuing from step %d instead", lineage[num_honoured - 1].commit.step)
    return RecoveryPoint(honoured=lineage[:num_honoured], rejected=tuple(rejected))


def collect_garbage(
    trial_directory: TrialDirectory, log_state: LogState, *, epoch: int, keep: int, protect: Collection[str] = ()
) -> list[str]:
    """Removes checkpoints that nobody can need again: old commits, and what earlier epochs never committed.

    Args:
        epoch: of the caller, which must have committed: only then can no recovery go back further than `keep` commits.
        keep: how many of the newest commits stay, at least 2.
        protect: directories, relative to the trial directory, that stay as well (an evaluation reads them).

    Returns:
        The removed directories, relative to the trial directory.

    Raises:
        ValueError: if `keep` is too small, or `epoch` has not committed or is superseded.
    """
    if keep < MIN_KEPT_COMMITS:
        raise ValueError(f"keep must be at least {MIN_KEPT_COMMITS} commits, got {keep}")
    last = log_state.last_commit
    if last is None or last.epoch != epoch or log_state.epoch != epoch:
        raise ValueError(
            f"epoch {epoch} may not remove checkpoints before its own first commit, nor once it is superseded "
            f"(last commit: epoch {last.epoch if last else None}, current epoch: {log_state.epoch})"
        )
    kept = {logged.commit.directory for logged in log_state.lineage()[-keep:]} | set(protect)
    committed = {logged.commit.directory for logged in log_state.commits}
    removed: list[str] = []
    for path in sorted(trial_directory.checkpoints_path.iterdir()):
        relative = trial_directory.relative(path)
        if path.name.startswith(_REMOVING):
            shutil.rmtree(path)
            continue
        match = _DIRECTORY_NAME.fullmatch(path.name)
        # An uncommitted directory of this epoch may be in use; an earlier epoch can never commit its own any more.
        if match is None or relative in kept or (relative not in committed and int(match["epoch"]) >= epoch):
            continue
        _remove_directory(path)
        removed.append(relative)
    return removed


def _directory_of(trial_directory: TrialDirectory, commit: Commit) -> Path:
    try:
        return trial_directory.inside(commit.directory)
    except ValueError as error:
        raise CorruptCheckpointError(str(error)) from error


def _content(directory: Path) -> Iterator[Path]:
    """All files below `directory`, in a fixed order, without its manifest and hidden ones."""
    manifest = directory / MANIFEST_NAME
    yield from (path for path in _files_below(directory) if path != manifest)


def _files_below(directory: Path) -> Iterator[Path]:
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(path)
        elif entry.is_file(follow_symlinks=False):
            yield path
        else:
            raise ValueError(f"{path} is neither a file nor a folder; a checkpoint holds nothing else, so remove it")


def _seal_file(path: Path, on_progress: Callable[[], None]) -> FileEntry:
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())
        digest = _digest(file, on_progress)
        return FileEntry(size=file.tell(), sha256=digest)


def _problem_of(path: Path, expected: FileEntry, on_progress: Callable[[], None]) -> str:
    def problem() -> str:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size != expected.size:
                return f"{path}: expected {expected.size} bytes, got {status.st_size}"
            actual = _digest(file, on_progress)
        return "" if actual == expected.sha256 else f"{path}: expected SHA-256 {expected.sha256}, got {actual}"

    try:
        return _patiently(problem)
    except OSError as error:
        return f"{path}: expected {expected.size} bytes, got {error}"


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


def _digest(file: RawIOBase, on_progress: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    piece = memoryview(bytearray(_PIECE_BYTES))
    while size := file.readinto(piece):
        digest.update(piece[:size])
        on_progress()
    return digest.hexdigest()


def _remove_directory(path: Path) -> None:
    """Renames first, so that a crash in between leaves no half-empty directory under a committed name."""
    doomed = path.with_name(f"{_REMOVING}{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)
