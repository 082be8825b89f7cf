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

Torch stays outside: the caller that has tensors writes files into `CheckpointWriter.path` and reports them.

A commit is all or nothing because it is one entry in the trial log, appended when all that it names is on disk; its
checksums find what is damaged later. Removing what no commit names only gives space back.
"""

import asyncio
import logging
import re
import secrets as random_tokens
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import Commit, LoggedCommit, LogState
from corral.workers.checkpoint.durable_file import FileEntry, no_progress, write_durable
from corral.workers.checkpoint.ledger import (
    DROPPED,
    LEDGER_NAME,
    TRAINED,
    CorruptLedgerError,
    Ledger,
    LedgerDelta,
    LedgerStates,
    numbers_of,
    read_delta,
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

    Every writer of a file there reports it here, with its digest: sealing reads no file again.

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


# CommittedLedger: which samples the commits of a trial cover, followed from outside of the trainer.
#
#                 +--> commits after the known one: their deltas --+
#     trial log --+                                                +--> Ledger of the head --> manager, rollout workers
#                 +--> first look, fallback, damaged delta: -------+
#                      the whole ledger of the head's checkpoint
#
# What counts is the head of the log and its ancestors. A trainer that falls back past damaged commits says so in the
# log before it trains; what only those had covered is then covered no longer.

_RETRY_PAUSE_S: Final = 5.0  # what cannot be read now is likely to stay so until the next commit


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerNews:
    """How the committed ledger changed between two looks."""

    trained: tuple[str, ...] = ()
    """Uids that are newly covered as trained."""
    dropped: tuple[str, ...] = ()
    """Uids that are newly covered as dropped."""
    has_gone_back: bool = False
    """Whether something that was covered is covered no longer."""

    @property
    def covered(self) -> tuple[str, ...]:
        return self.trained + self.dropped


class _Found(NamedTuple):
    """The result of a look at the files."""

    after: int
    """The slot that was known at that time."""
    slot: int
    deltas: Sequence[LedgerDelta]
    """What the commits cover that came after."""
    ledger: Ledger | None
    """All that the head covers, where it does not come after."""


class CommittedLedger:
    """The ledger of the log's head.

    While it cannot be read, the state before stays: a reader that learns too late what is settled
    generates again what the trainer then turns away, and no more than that.

    Example:
        committed = CommittedLedger(trial, row_ids)     # in the order of the data set
        news = await committed.look()       # at any interval: no commit is missed
        forget(news.covered)
        committed.ledger.consumed("0:problem-17")
    """

    def __init__(self, trial: TrialDirectory, row_ids: Iterable[str]) -> None:
        self._number_by_row = numbers_of(row_ids)
        self.ledger = Ledger(self._number_by_row)
        self._trial = trial
        self._log = TrialLog(trial.log_path)
        self._slot = 0
        self._unreadable_slot = 0
        self._retry_at = 0.0
        self._reading = threading.Lock()

    async def look(self) -> LedgerNews:
        """Takes in what the log says since the last call. Files are read in a thread: a file system that hangs holds up
        no event loop.

        Raises:
            CorruptLogError: the log is damaged.
        """
        return self._take_in(await asyncio.to_thread(self._read))

    def _take_in(self, found: _Found | None) -> LedgerNews:
        if found is None or found.after != self._slot:  # another look was faster
            return LedgerNews()
        self._slot = found.slot
        if found.ledger is None:
            for delta in found.deltas:
                self.ledger.add(delta)
            return LedgerNews(
                trained=tuple(uid for delta in found.deltas for group in delta.trained.values() for uid in group),
                dropped=tuple(uid for delta in found.deltas for uid in delta.dropped),
            )
        before, self.ledger = self.ledger, found.ledger
        return LedgerNews(
            trained=tuple(self.ledger.beyond(before, TRAINED)),
            dropped=tuple(self.ledger.beyond(before, DROPPED)),
            has_gone_back=any(before.beyond(self.ledger, TRAINED, DROPPED)),
        )

    def _read(self) -> _Found | None:
        """None if there is nothing new, or it cannot be read."""
        with self._reading:
            after, state = self._slot, self._log.read()
            if state.head == after or (state.head == self._unreadable_slot and time.monotonic() < self._retry_at):
                return None
            try:
                deltas = self._deltas_after(after, state.lineage)
                ledger = None if deltas is not None else self._whole(state.lineage)
            except CorruptLedgerError as error:
                if state.head != self._unreadable_slot:
                    logger.error("what the commits up to slot %08d cover is not known yet: %s", state.head, error)
                self._unreadable_slot, self._retry_at = state.head, time.monotonic() + _RETRY_PAUSE_S
                return None
            return _Found(after, state.head, deltas or (), ledger)

    def _deltas_after(self, slot: int, lineage: Sequence[LoggedCommit]) -> list[LedgerDelta] | None:
        """What the commits after this one cover; None if there is no such one, or one is damaged."""
        slots = [logged.slot for logged in lineage]
        if slot not in slots:
            return None
        try:
            return [read_delta(self._trial, logged.commit) for logged in lineage[slots.index(slot) + 1 :]]
        except CorruptLedgerError as error:
            logger.warning("%s; a whole ledger is read instead", error)
            return None

    def _whole(self, lineage: Sequence[LoggedCommit]) -> Ledger:
        """The ledger of the newest commit that has a good one, with the deltas after it."""
        deltas: list[LedgerDelta] = []
        for logged in reversed(lineage):
            try:
                ledger = committed_ledger(self._trial, logged.commit, self._number_by_row)
                break
            except CorruptCheckpointError as error:
                logger.warning("%s; that of the commit before, and the delta after it, are read instead", error)
                deltas.append(read_delta(self._trial, logged.commit))
        else:
            raise CorruptLedgerError(f"none of the last {len(lineage)} commits has a ledger that can be read")
        for delta in reversed(deltas):
            ledger.add(delta)
        return ledger
