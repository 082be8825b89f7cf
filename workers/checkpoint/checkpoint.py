"""Checkpoints on disk: files first, their digests next, the trial log last.

    ranks write, fsync and hash --> {path: FileEntry} --> write_manifest --> LogWriter.commit --> collect_garbage
                |                                               |                   |
      a crash here leaves a directory             ... or here: a directory   from here on
      that no commit names                                                    it counts

    recovery: last commit of the lineage --verify--> good: continue it
                                            |
                                            +------> corrupt: reject it with its reason, try its parent

What a checkpoint holds is all that a commit stands for:

    manifest.json ledger.json
    weights/              of the role that is published: second names of the files that generation servers read
    weights_of/critic/    of every other role that is trained, in the same format
    state/actor/ state/critic/    what training resumes from, of every role that is trained

Torch stays outside: whoever has tensors writes files into `CheckpointWriter.path` and says what it has written.

A commit is all or nothing because it is one entry in the trial log, appended when all that it names is on disk; its
checksums find what is damaged later. Removing what no commit names only gives space back.
"""

import logging
import re
import secrets as random_tokens
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log_state import Commit, LoggedCommit, LogState
from corral.workers.checkpoint.durable_file import FileEntry, no_progress, write_durable
from corral.workers.checkpoint.ledger import (
    LEDGER_NAME,
    CorruptLedgerError,
    Ledger,
    LedgerDelta,
    read_ledger,
)
from corral.workers.checkpoint.manifest import (
    CorruptCheckpointError,
    SealedDirectory,
    link_weights,
    read_manifest,
    verify_manifest,
    write_manifest,
)
from corral.workers.checkpoint.removal import Remover

logger = logging.getLogger(__name__)

_DIRECTORY_NAME: Final = re.compile(r"step-(?P<step>\d{8,})-e(?P<epoch>\d+)-[0-9a-f]{8}", re.ASCII)


WEIGHTS: Final = "weights"
"""Folder of the published role's weights."""


def state_folder(role: str) -> str:
    """Folder of what a role's training resumes from."""
    return f"state/{role}"


def weights_folder(role: str) -> str:
    """Folder of the weights of a role that is trained and not published."""
    return f"weights_of/{role}"


class NoValidCheckpointError(Exception):
    """There are commits, and none can be loaded. A trial never starts from scratch silently."""


def verify_checkpoint(
    trial_directory: TrialDirectory, commit: Commit, *, on_progress: Callable[[], None] = no_progress
) -> None:
    """Reads all that a commit stands for.

    Raises:
        CorruptCheckpointError: something is missing or damaged.
    """
    directory = _directory_of(trial_directory, commit)
    manifest = verify_manifest(directory, commit.manifest_digest, on_progress=on_progress)
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
    entry = read_manifest(directory, commit.manifest_digest).files.get(LEDGER_NAME)
    if entry is None:
        raise CorruptCheckpointError(f"{directory}: expected {LEDGER_NAME} among its files, got none")
    try:
        return Ledger.of(read_ledger(directory / LEDGER_NAME, digest=entry.digest))
    except CorruptLedgerError as error:
        raise CorruptCheckpointError(str(error)) from error


class CheckpointWriter:
    """A new checkpoint directory that nobody else writes into, not even another attempt at the same step.

    Whoever writes a file there says so here, with its digest: nothing is read again to be sealed.

    >>> writer = CheckpointWriter(trial, epoch=3, step=120)             # checkpoints/step-00000120-e3-9f1c2ab4/
    >>> files = save_shards(writer.folder(state_folder("actor")))       # any process may write
    >>> writer.add(state_folder("actor"), files)
    >>> writer.link(WEIGHTS, published)
    >>> writer.add_ledger(ledger.whole(epoch=3, step=120))
    >>> digest = writer.write_manifest({"dp": 4})                       # then LogWriter.commit
    """

    def __init__(self, trial_directory: TrialDirectory, *, epoch: int, step: int) -> None:
        name = f"step-{step:08d}-e{epoch}-{random_tokens.token_hex(4)}"
        self.epoch: Final = epoch
        self.step: Final = step
        self.path: Final = trial_directory.checkpoints_path / name
        self.relative_path: Final = trial_directory.relative(self.path)
        """What the commit entry names."""
        self._files: dict[str, FileEntry] = {}
        self.path.mkdir(mode=0o700)

    def folder(self, name: str) -> Path:
        """Makes a folder of the checkpoint for others to write into."""
        path = self.path / name
        path.mkdir(mode=0o700, parents=True)
        return path

    def add(self, folder: str, files: Mapping[str, FileEntry]) -> None:
        """These files of a folder are on disk."""
        self._files |= {f"{folder}/{name}": entry for name, entry in files.items()}

    def link(self, folder: str, version: SealedDirectory) -> None:
        """Gives the files of published weights a second name here: they are neither written nor hashed again."""
        self.add(folder, link_weights(version, self.path / folder).files)

    def give_up(self) -> None:
        """Removes what was written: there may be no room for it, and nobody writes here any more."""
        shutil.rmtree(self.path, ignore_errors=True)  # what stays, a later epoch removes

    def add_ledger(self, ledger: LedgerDelta) -> None:
        """Writes the whole ledger."""
        self._files[LEDGER_NAME] = write_durable(self.path / LEDGER_NAME, [msgspec.json.encode(ledger)])

    def write_manifest(self, extra: Mapping[str, Any]) -> str:
        """Seals the checkpoint; returns the digest that the commit entry names."""
        return write_manifest(self.path, self._files, {"epoch": self.epoch, "step": self.step, **extra}).digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPoint:
    """Where a new epoch continues."""

    honoured: tuple[LoggedCommit, ...]
    """The lineage, oldest first; its last commit is loaded. Empty: nothing was committed yet.

    The samples of rejected commits are not consumed: they will be trained again, from the state before.
    """
    rejected: Mapping[int, str]
    """Why newer commits were passed over, by step, newest first."""

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
    rejected: dict[int, str] = {}
    for logged in reversed(lineage):
        try:
            verify_checkpoint(trial_directory, logged.commit, on_progress=on_progress)
            break
        except CorruptCheckpointError as error:
            rejected[logged.commit.step] = str(error)
            logger.error("commit of step %d (slot %08d) is rejected: %s", logged.commit.step, logged.slot, error)
    honoured = lineage[: len(lineage) - len(rejected)]
    if lineage and not honoured:
        reasons = "".join(f"\n  step {step}: {reason}" for step, reason in rejected.items())
        raise NoValidCheckpointError(
            f"none of the {len(lineage)} commits of {trial_directory.path} can be loaded; restore one of these from a "
            f"backup, or start a new trial:{reasons}"
        )
    if rejected:
        logger.error("continuing from step %d instead", honoured[-1].commit.step)
    return RecoveryPoint(honoured=honoured, rejected=rejected)


def collect_garbage(
    trial_directory: TrialDirectory,
    log_state: LogState,
    *,
    epoch: int,
    keep: int,
    remover: Remover,
    protect: Collection[str] = (),
) -> list[str]:
    """Removes checkpoints that nobody can need again: old commits, and what earlier epochs never committed.

    Args:
        epoch: of the caller, which must have committed: only then can no recovery go back further than `keep` commits.
        keep: how many of the newest commits stay; one may turn out to be corrupt.
        protect: directories, relative to the trial directory, that stay as well (an evaluation reads them).

    Returns:
        The names of the removed directories.

    Raises:
        ValueError: if `epoch` has not committed or is superseded.
    """
    last = log_state.last_commit
    if last is None or last.epoch != epoch or log_state.epoch != epoch:
        raise ValueError(
            f"epoch {epoch} may not remove checkpoints before its own first commit, nor once it is superseded "
            f"(last commit: epoch {last.epoch if last else None}, current epoch: {log_state.epoch})"
        )
    kept = {logged.commit.directory for logged in log_state.lineage()[-keep:]} | set(protect)
    committed = {logged.commit.directory for logged in log_state.commits}

    def is_old(path: Path) -> bool:
        relative, match = trial_directory.relative(path), _DIRECTORY_NAME.fullmatch(path.name)
        # An uncommitted directory of this epoch may be in use; an earlier epoch can never commit its own any more.
        is_over = relative in committed or (match is not None and int(match["epoch"]) < epoch)
        return match is not None and relative not in kept and is_over

    return remover.remove_old(trial_directory.checkpoints_path, is_old=is_old)


def _directory_of(trial_directory: TrialDirectory, commit: Commit) -> Path:
    try:
        return trial_directory.inside(commit.directory)
    except ValueError as error:
        raise CorruptCheckpointError(str(error)) from error
