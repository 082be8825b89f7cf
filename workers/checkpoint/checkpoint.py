"""Checkpoints on disk: files first, their digests next, the trial log last.

    ranks write, fsync and hash --> {path: FileEntry} --> write_manifest --> LogWriter.commit --> collect_garbage
                |                                               |                   |
      a crash here leaves a directory             ... or here: a directory   from here on
      that no commit names                                                    it counts

    recovery: last commit of the lineage --verify--> good: continue it
                                            |
                                            +------> corrupt: reject it with its reason, try its parent

What a checkpoint holds is all that a commit stands for:

    manifest.json ledger.msgpack
    prompts.msgpack       with a sampler: which prompts come next, and what those before have brought
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log_state import Commit, LogState
from corral.workers.checkpoint.durable_file import FileEntry, no_progress, write_durable
from corral.workers.checkpoint.ledger import (
    LEDGER_NAME,
    CorruptLedgerError,
    Ledger,
    LedgerStates,
    read_ledger,
    write_ledger,
)
from corral.workers.checkpoint.manifest import (
    CorruptCheckpointError,
    Manifest,
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


PROMPTS_NAME: Final = "prompts.msgpack"


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
    _ledger_of(directory, manifest)
    written = manifest.extra.get("epoch"), manifest.extra.get("step")
    if written != (commit.epoch, commit.step):
        raise CorruptCheckpointError(
            f"{directory}: expected (epoch, step) {commit.epoch, commit.step}, as the trial log says, got {written}"
        )


def committed_ledger(trial_directory: TrialDirectory, commit: Commit, number_by_row: Mapping[str, int]) -> Ledger:
    """What a commit and its ancestors have consumed, from the checkpoint; its other files are not looked at.

    Raises:
        CorruptCheckpointError: the checkpoint is gone or damaged.
    """
    directory = _directory_of(trial_directory, commit)
    entry = _ledger_of(directory, read_manifest(directory, commit.manifest_digest))
    try:
        return read_ledger(directory / LEDGER_NAME, number_by_row, digest=entry.digest)
    except CorruptLedgerError as error:
        raise CorruptCheckpointError(str(error)) from error


class CheckpointWriter:
    """A new checkpoint directory that nobody else writes into, not even another attempt at the same step.

    Whoever writes a file there says so here, with its digest: nothing is read again to be sealed.

    >>> writer = CheckpointWriter(trial, epoch=3, step=120)             # checkpoints/step-00000120-e3-9f1c2ab4/
    >>> files = save_shards(writer.folder(state_folder("actor")))       # any process may write
    >>> writer.add(state_folder("actor"), files)
    >>> writer.link(WEIGHTS, published)
    >>> writer.add_ledger(ledger.states())
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
        self.path.parent.mkdir(mode=0o700, exist_ok=True)  # where somebody removed it, a running trial goes on
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

    def add_ledger(self, states: LedgerStates) -> None:
        """Writes what `Ledger.states` says."""
        self._files[LEDGER_NAME] = write_ledger(self.path / LEDGER_NAME, states)

    def add_prompts(self, content: bytes) -> None:
        """Writes what the prompts that come next follow from, where they follow from what was trained."""
        self._files[PROMPTS_NAME] = write_durable(self.path / PROMPTS_NAME, [content])

    def write_manifest(self, extra: Mapping[str, Any]) -> str:
        """Seals the checkpoint; returns the digest that the commit entry names."""
        return write_manifest(self.path, self._files, {"epoch": self.epoch, "step": self.step, **extra}).digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPoint:
    """Where a new epoch continues."""

    slot: int = 0
    """Of the commit that is loaded; 0 where nothing was committed yet."""
    commit: Commit | None = None
    rejected: Mapping[int, str] = field(default_factory=dict)
    """Why newer commits were passed over, by step, newest first.

    Their samples are not consumed: they will be trained again, from the state before.
    """


def last_valid_commit(
    log_state: LogState, trial_directory: TrialDirectory, *, on_progress: Callable[[], None] = no_progress
) -> RecoveryPoint:
    """The newest commit of the lineage whose checkpoint is whole.

    Args:
        on_progress: called in any thread for every piece that was read; what it raises ends the search.

    Raises:
        NoValidCheckpointError: there are commits, and none of them can be loaded.
    """
    rejected: dict[int, str] = {}
    for logged in reversed(log_state.lineage):
        try:
            verify_checkpoint(trial_directory, logged.commit, on_progress=on_progress)
        except CorruptCheckpointError as error:
            rejected[logged.commit.step] = str(error)
            logger.error("commit of step %d (slot %08d) is rejected: %s", logged.commit.step, logged.slot, error)
            continue
        if rejected:
            logger.error("continuing from step %d instead", logged.commit.step)
        return RecoveryPoint(slot=logged.slot, commit=logged.commit, rejected=rejected)
    if rejected:
        step, reason = next(iter(rejected.items()))
        raise NoValidCheckpointError(
            f"none of the {len(log_state.lineage)} newest commits of {trial_directory.path} can be loaded "
            f"(step {step}: {reason}); restore it from a backup, or start a new trial; the log names each"
        )
    return RecoveryPoint()


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
    newest = [logged.commit for logged in log_state.lineage[-keep:]]
    kept = {commit.directory for commit in newest} | set(protect)

    def is_old(path: Path) -> bool:
        match = _DIRECTORY_NAME.fullmatch(path.name)
        if match is None or trial_directory.relative(path) in kept:
            return False
        # What this epoch has not committed yet is of a later step; an earlier epoch can never commit any more.
        return (int(match["epoch"]), int(match["step"])) < (epoch, newest[0].step)

    return remover.remove_old(trial_directory.checkpoints_path, is_old=is_old)


def _ledger_of(directory: Path, manifest: Manifest) -> FileEntry:
    entry = manifest.files.get(LEDGER_NAME)
    if entry is None:
        older = " (an older version of corral wrote it: go on with that one)" if "ledger.json" in manifest.files else ""
        raise CorruptCheckpointError(f"{directory}: expected {LEDGER_NAME} among its files, got none{older}")
    return entry


def _directory_of(trial_directory: TrialDirectory, commit: Commit) -> Path:
    try:
        return trial_directory.inside(commit.directory)
    except ValueError as error:
        raise CorruptCheckpointError(str(error)) from error
