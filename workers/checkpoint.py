"""Checkpoints on disk: files first, checksums next, the trial log last.

    ranks write shards --> write_manifest (sizes, SHA-256, fsync) --> LogWriter.commit --> collect_garbage
                |                        |                                   |
      a crash here leaves       ... or here: a directory            from here on it counts
      a directory that no       that no commit names
      commit names

    recovery: last commit of the lineage --verify--> good: continue it
                                            |
                                            +------> corrupt: reject it with its reason, try its parent

A manifest makes a directory (a checkpoint, or a version of the weights) all or nothing. Torch stays outside: whoever
has tensors writes files into `CheckpointWriter.path`.
"""

import hashlib
import logging
import os
import re
import secrets as random_tokens
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from corral.experiments.ledger import CorruptLedgerError, read_delta
from corral.experiments.trial_directory import TrialDirectory, atomic_write, fsync_directory
from corral.experiments.trial_log_state import Commit, LoggedCommit, LogState

logger = logging.getLogger(__name__)

MANIFEST_NAME: Final = "manifest.json"
MIN_KEPT_COMMITS: Final = 2  # one may turn out to be corrupt
_HASH_THREADS: Final = 4  # hashing releases the interpreter lock; more threads saturate the file system instead
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


def write_manifest(directory: Path, extra: Mapping[str, Any]) -> str:
    """Forces all files of `directory` to disk and seals them with a manifest.

    Files whose names start with '.' are not part of the content.

    Returns:
        SHA-256 of the manifest, which stands for the whole content.

    Raises:
        ValueError: if there is anything but files and folders, or `extra` is not JSON.
    """
    paths = list(_content(directory))
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        entries = list(pool.map(_seal_file, paths))
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
        data = path.read_bytes()
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read ({error}); the directory was never finished") from error
    actual = hashlib.sha256(data).hexdigest()
    if sha256 is not None and actual != sha256:
        raise CorruptCheckpointError(f"{path}: expected SHA-256 {sha256}, got {actual}")
    try:
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{path}: expected a manifest, got something else ({error})") from error


def verify_manifest(directory: Path, sha256: str | None) -> Manifest:
    """Reads every file of `directory` and compares it with the manifest.

    Args:
        sha256: of the manifest itself; None trusts the manifest that is there.

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
        for problem in pool.map(lambda name: _problem_of(directory / name, manifest.files[name]), manifest.files):
            if problem:
                raise CorruptCheckpointError(problem)
    return manifest


def verify_checkpoint(directory: Path, manifest_sha256: str) -> Manifest:
    """Like `verify_manifest`, for a checkpoint, whose manifest the trial log vouches for."""
    return verify_manifest(directory, manifest_sha256)


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

    def write_manifest(self, extra: Mapping[str, Any]) -> str:
        """Seals the checkpoint; returns the SHA-256 that the commit entry names."""
        return write_manifest(self.path, {"epoch": self.epoch, "step": self.step, **extra})

    def discard(self) -> None:
        """Removes a checkpoint that will not be committed, e.g. because the disk is full."""
        _remove_directory(self.path)


@dataclass(frozen=True, slots=True)
class RejectedCommit:
    """A commit that cannot be loaded, and why."""

    logged: LoggedCommit
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPoint:
    """Where a new epoch continues."""

    honoured: tuple[LoggedCommit, ...]
    """The commits whose ledger deltas count, oldest first; the last one is loaded. Empty: nothing was committed yet.

    The samples of rejected commits are not consumed: they will be trained again, from the state before.
    """
    rejected: tuple[RejectedCommit, ...]
    """Newer commits that were passed over, newest first."""

    @property
    def slot(self) -> int | None:
        """For `LogWriter.fall_back_to`, if anything was rejected."""
        return self.honoured[-1].slot if self.honoured else None

    @property
    def commit(self) -> Commit | None:
        return self.honoured[-1].commit if self.honoured else None

    @property
    def commits(self) -> tuple[Commit, ...]:
        """The honoured commits, for `Ledger.load`."""
        return tuple(logged.commit for logged in self.honoured)


def last_valid_commit(log_state: LogState, trial_directory: TrialDirectory) -> RecoveryPoint:
    """The newest commit whose checkpoint is whole and whose ancestors' ledgers are.

    Raises:
        NoValidCheckpointError: there are commits, and none of them can be loaded.
    """
    lineage = log_state.lineage()
    num_readable, ledger_problem = _readable_ledgers(lineage, trial_directory)
    rejected = [RejectedCommit(logged, ledger_problem) for logged in reversed(lineage[num_readable:])]
    num_honoured = num_readable
    while num_honoured:
        logged = lineage[num_honoured - 1]
        try:
            verify_checkpoint(trial_directory.inside(logged.commit.directory), logged.commit.manifest_sha256)
            break
        except (CorruptCheckpointError, ValueError) as error:
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
    trial_directory: TrialDirectory,
    log_state: LogState,
    *,
    epoch: int,
    keep: int,
    protect: Collection[str] = (),
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


def _readable_ledgers(lineage: tuple[LoggedCommit, ...], trial_directory: TrialDirectory) -> tuple[int, str]:
    """How many commits from the oldest on have their ledger delta, and what is wrong with the next one."""
    for index, logged in enumerate(lineage):
        try:
            read_delta(trial_directory, logged.commit)
        except CorruptLedgerError as error:
            return index, f"it continues step {logged.commit.step}: {error}" if index + 1 < len(lineage) else str(error)
    return len(lineage), ""


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


def _seal_file(path: Path) -> FileEntry:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(size=file.tell(), sha256=digest)


def _problem_of(path: Path, expected: FileEntry) -> str:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size != expected.size:
                return f"{path}: expected {expected.size} bytes, got {status.st_size}"
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path}: expected {expected.size} bytes, got {error}"
    return "" if actual == expected.sha256 else f"{path}: expected SHA-256 {expected.sha256}, got {actual}"


def _remove_directory(path: Path) -> None:
    """Renames first, so that a crash in between leaves no half-empty directory under a committed name."""
    doomed = path.with_name(f"{_REMOVING}{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)
