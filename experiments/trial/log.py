"""The trial log: one numbered, append-only sequence of claims and commits decides who may change a trial.

    log/00000001  claim  epoch 1
    log/00000002  commit epoch 1, step 10
    log/00000003  claim  epoch 2           from here on epoch 1 finds its next slot taken, reads it, and exits
    log/00000004  commit epoch 2, step 20, parent 2
    log/00000005  claim  epoch 3
    log/00000006  fallback epoch 3, to 2   the commit in slot 4 is damaged: what it covered is settled no longer
    log/00000007  commit epoch 3, step 20, parent 2
    log/00000008  done   epoch 3

A slot is written by link(2), which a file server decides: it succeeds once, for one writer, and slots are never
rewritten. A writer appends at the slot after the last entry that it has read, so it cannot pass a claim or a stop
unseen. Clocks, directory listings and Redis have no say.

    log/snapshot  the state after about every hundredth slot: a process that starts reads the slots after it

This alone fences a master that was replaced, and makes a commit all or nothing: an entry is there, whole, or it is not.
Looking at the log before (`LogWriter.check`) is an optimisation, for a master that would otherwise learn it late; so is
the snapshot, for logs of many slots: one that is old, damaged or gone costs time and nothing else.
"""

import errno
import hashlib
import logging
import os
import re
import secrets as random_tokens
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from corral.experiments.trial.directory import (
    TrialDirectory,
    atomic_write,
    fsync_directory,
    remove_file,
    write_new_file,
)
from corral.experiments.trial.log_state import (
    Claim,
    Commit,
    CorruptLogError,
    Done,
    DoneError,
    Entry,
    FallBack,
    LoggedCommit,
    LogState,
    Stop,
    StoppedError,
    TrialLogError,
    UncertainAppendError,
    stopped_error,
)

_SLOTS_BETWEEN_SNAPSHOTS: Final = 100  # opened in 2 ms, on a network file system in 100
_DECODER: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(Claim | Commit | FallBack | Stop | Done)
_MAX_REASON_CHARACTERS: Final = 500  # at most 2000 bytes of an entry
_STOP_PATIENCE_S: Final = 5.0  # a supervisor that ends a trial has little time
_HIDDEN_SLOT_PAUSE_S: Final = 0.05


# Where the trial log lies: a file per slot, each of which can be written once, by one writer.
#
#     write .00000007.*.tmp --fsync--> link(2) to 00000007 --> fsync of the directory
#                                         |
#                                         +--> the name is taken: what it holds goes back to the caller
#
# That a slot has one writer rests on link(2) alone, which the file server decides.

logger = logging.getLogger(__name__)

MAX_ENTRY_BYTES: Final = 4096
_MAX_TRIES: Final = 5  # ESTALE and lost replies of a file server heal on reopening, or not at all
VISIBLE_TIMEOUT_S: Final = 75.0  # NFS clients may cache "no such file" for up to 60 s


class DirectoryStorage:
    """Slots as files `00000001`, ... of one directory on a shared file system with hard links.

    Each method is atomic as seen by all writers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, slot: int) -> bytes | None:
        """The entry, or None if there is none yet (which a cache may still say shortly after it was written)."""
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                with open(self._slot_path(slot), "rb") as file:
                    return file.read(MAX_ENTRY_BYTES + 1)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno != errno.ESTALE or not tries_left:
                    raise
        return None

    def put_if_absent(self, slot: int, data: bytes) -> bytes | None:
        """Stores `data` durably and returns None, or returns what the slot holds already."""
        temporary = self._path / f".{slot:08d}.{random_tokens.token_hex(8)}.tmp"
        try:
            occupant = self._link(slot, data, temporary)
        finally:
            remove_file(temporary)
        try:
            fsync_directory(self._path)
        except OSError as error:
            raise UncertainAppendError(
                f"slot {slot:08d} of the trial log {self._path} is written, but perhaps not on disk ({error}); exit, "
                f"and claim a new epoch once the file system works again"
            ) from error
        return occupant

    def _link(self, slot: int, data: bytes, temporary: Path) -> bytes | None:
        last_error: OSError | None = None
        for _ in range(_MAX_TRIES):
            # Torn entries cannot exist: the bytes are on disk before the slot's name is.
            temporary.unlink(missing_ok=True)
            write_new_file(temporary, data)
            try:
                os.link(temporary, self._slot_path(slot))
                return None
            except FileExistsError:
                return self._read_existing(slot)
            except OSError as error:
                self._require_hard_links(error)
                last_error = error
            if (occupant := self.read(slot)) is not None:
                return occupant
        raise UncertainAppendError(
            f"slot {slot:08d} of the trial log {self._path}: the file system answered {last_error} {_MAX_TRIES} times; "
            f"the entry may be there or not, so exit and claim a new epoch"
        ) from last_error

    def read_snapshot(self) -> bytes:
        """What `write_snapshot` has stored last, or, for all that may be wrong with it, nothing."""
        try:
            return (self._path / "snapshot").read_bytes()
        except OSError:
            return b""

    def write_snapshot(self, data: bytes) -> None:
        """Stores `data`, if there is room."""
        try:
            atomic_write(self._path / "snapshot", data)
        except OSError as error:
            logger.warning("no snapshot of the trial log %s could be written: %s", self._path, error)

    def highest_slot(self) -> int:
        """The highest slot that a listing shows, or 0; it may be out of date, and decides nothing."""
        return max((int(name) for name in os.listdir(self._path) if name.isdecimal()), default=0)

    def remove_leftovers(self, below_slot: int) -> None:
        """Removes what writers that died left behind for slots that are taken."""
        for temporary in self._path.glob(".*.tmp"):
            slot = temporary.name.split(".")[1]
            # The slot is taken, so a writer that still holds this file can only learn that it lost.
            if slot.isdecimal() and int(slot) < below_slot:
                remove_file(temporary)

    def _slot_path(self, slot: int) -> Path:
        return self._path / f"{slot:08d}"

    def _read_existing(self, slot: int) -> bytes:
        deadline = time.monotonic() + VISIBLE_TIMEOUT_S
        pause_s = 0.01
        while (data := self.read(slot)) is None:
            if time.monotonic() > deadline:
                raise UncertainAppendError(
                    f"slot {self._slot_path(slot)} is taken, but the file system has not shown what it holds "
                    f"for {VISIBLE_TIMEOUT_S:.0f} s; check the mount of the trial directory on this node"
                )
            time.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)
        return data

    def _require_hard_links(self, error: OSError) -> None:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise TrialLogError(
                f"the file system of {self._path} refuses hard links ({error}), which the trial log needs; "
                f"put the file root on a shared POSIX file system (NFS, Lustre, GPFS, BeeGFS)"
            ) from error


class TrialLog:
    """Reads the log incrementally, and appends to it. One object per thread."""

    def __init__(self, path: Path, *, storage: DirectoryStorage | None = None) -> None:
        self._path = path
        self._storage = storage or DirectoryStorage(path)
        self._state = LogState()
        self._has_begun = False

    @property
    def state(self) -> LogState:
        """The state as last read; costs nothing."""
        return self._state

    def read(self) -> LogState:
        """Reads what is new and returns the state."""
        self.poll()
        return self._state

    def poll(self) -> list[tuple[int, Entry]]:
        """The entries that appeared since the last read, by opening the next slots; never lists the directory.

        The first time it leaves out those up to a snapshot, at which no stop was in force.
        """
        if not self._has_begun:
            self._state, self._has_begun = self._read_snapshot(), True
        entries, state = list[tuple[int, Entry]](), self._state
        while (data := self._storage.read(state.next_slot)) is not None:
            entries.append((state.next_slot, self._decode(state.next_slot, data)))
            state = state.after(entries[-1][1])
        self._state = state  # not before: what is read until the file system fails comes again
        return entries

    def write_snapshot(self) -> None:
        """Spares others the slots that this object has read; call it right after an own commit."""
        text = msgspec.json.encode(self._state)
        self._storage.write_snapshot(_digest(text) + b"\n" + text)

    def _read_snapshot(self) -> LogState:
        """What a snapshot says, if its last commit is in its slot; else the state before the first slot.

        Guarantee: slots are never rewritten, so the state after each slot is the same for ever, whichever process wrote
        it down. A log that has lost its end is read from the beginning, and what is missing is found.
        """
        digest, _, text = self._storage.read_snapshot().partition(b"\n")
        if digest != _digest(text):
            return LogState()
        try:
            state = msgspec.json.decode(text, type=LogState)
        except msgspec.MsgspecError:  # of another version of corral
            return LogState()
        is_there = state.last and self._storage.read(state.next_slot - 1) == self._encode(state.last.commit)
        return state if is_there else LogState()

    def read_whole(self, *, patience_s: float | None = None) -> LogState:
        """Reads what is new, and refuses a log that goes on after a slot that is missing.

        A link into the hole would succeed, and what comes after it would never be read again.

        Raises:
            CorruptLogError: naming the slot that is missing.
        """
        highest = self._storage.highest_slot()
        deadline = time.monotonic() + (VISIBLE_TIMEOUT_S if patience_s is None else patience_s)
        while self.read().next_slot <= highest:
            if time.monotonic() > deadline:
                raise CorruptLogError(
                    f"slot {self._state.next_slot:08d} of the trial log {self._path} is missing, but slot "
                    f"{highest:08d} is there; put it back from a backup, or start a new trial from the last good "
                    f"checkpoint"
                )
            time.sleep(_HIDDEN_SLOT_PAUSE_S)
        return self._state

    def claim(self, owner: str, *, resume: bool = False) -> "LogWriter":
        """Begins a new trainer epoch, which ends all earlier ones.

        Args:
            owner: who claims, for people: job id, host, pid.
            resume: claim although the trial was stopped.

        Raises:
            DoneError: the trial is complete.
            StoppedError: the trial was stopped, and `resume` is false.
            CorruptLogError: the log is damaged.
        """

        def entry(state: LogState) -> Claim:
            if state.stop and not resume:
                raise stopped_error(state.stop)
            return Claim(epoch=state.epoch + 1, owner=owner)

        self.read_whole()
        slot = self.append(entry)
        self._storage.remove_leftovers(slot)
        return LogWriter(self)

    def request_stop(self, by: str, *, reason: str = "", then: Literal["", "requeue"] = "") -> int:
        """Stops the trial from outside: no epoch commits any more, whether its process hears of it or not.

        Returns:
            The slot of the stop that is in force.

        Raises:
            DoneError: the trial is complete, there is nothing to stop.
        """
        self.read_whole(patience_s=_STOP_PATIENCE_S)
        try:
            return self.append(lambda state: Stop(epoch=None, by=by, reason=reason, then=then))
        except DoneError:
            raise
        except StoppedError:
            return self._state.next_slot - 1

    def append(self, make_entry: Callable[[LogState], Entry]) -> int:
        """Appends at the slot after the last entry read; the entry that won that slot is read first, then the caller
        decides again.

        Args:
            make_entry: gives the entry for a state, or raises.

        Raises:
            SupersededError, StoppedError, DoneError, ValueError: the rules of the log forbid it, nothing was written.
        """
        while True:
            slot = self._state.next_slot
            entry = make_entry(self._state)
            if refusal := self._state.refusal(entry):
                raise refusal
            occupant_data = self._storage.put_if_absent(slot, self._encode(entry))
            occupant = entry if occupant_data is None else self._decode(slot, occupant_data)
            self._state = self._state.after(occupant)
            # Equal nonces: the link succeeded, and only its reply was lost.
            if occupant.nonce == entry.nonce:
                return slot

    def _encode(self, entry: Entry) -> bytes:
        data = msgspec.json.encode(entry)
        if len(data) > MAX_ENTRY_BYTES:
            raise ValueError(
                f"trial log entry has {len(data)} bytes, more than {MAX_ENTRY_BYTES}; shorten owner or reason"
            )
        return data

    def _decode(self, slot: int, data: bytes) -> Entry:
        try:
            if len(data) > MAX_ENTRY_BYTES:
                raise ValueError(f"more than {MAX_ENTRY_BYTES} bytes")
            entry: Entry = _DECODER.decode(data)
        except (ValueError, msgspec.MsgspecError) as error:
            raise CorruptLogError(
                f"{self._path}/{slot:08d} is not a trial log entry ({error}); restore the file from a backup, "
                f"or start a new trial from the last good checkpoint"
            ) from error
        return entry


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


class LogWriter:
    """The only way to commit: one claimed epoch. Every method raises rather than write for a superseded epoch."""

    def __init__(self, log: TrialLog) -> None:
        self._log = log
        self._uncertain = False
        self.epoch: Final = log.state.epoch

    @property
    def state(self) -> LogState:
        return self._log.state

    def check(self) -> None:
        """Reads what is new; call it after every long wait.

        Raises:
            SupersededError, StoppedError, DoneError: this epoch is over.
        """
        self._require_certain()
        if refusal := self._log.read().refusal(Done(epoch=self.epoch)):
            raise refusal

    def fall_back_to(self, slot: int, *, reason: str) -> None:
        """Continues an earlier commit, because all later ones are corrupt; from here on they count for nobody.

        Everyone who follows the log learns it before this epoch commits, or it might never: prompts that only a
        rejected commit had settled must be issued again to make the next batch.

        Raises:
            ValueError: if `slot` is no ancestor of the last commit, or this epoch has committed already.
            SupersededError, StoppedError, DoneError: this epoch is over, nothing was written.
        """
        self._append(FallBack(epoch=self.epoch, to=slot, reason=reason[:_MAX_REASON_CHARACTERS]))

    def commit(
        self,
        *,
        step: int,
        directory: str,
        manifest_digest: str,
        ledger_file: str,
        ledger_digest: str,
        trained: int,
        dropped: int,
    ) -> LoggedCommit:
        """Makes a checkpoint count. All its files must be on disk, with checksums, before.

        Raises:
            ValueError: if the commit that it continues is of a later step.
            SupersededError, StoppedError, DoneError: this epoch is over, nothing was written.
        """
        commit = Commit(
            epoch=self.epoch,
            step=step,
            parent=self.state.head,
            directory=directory,
            manifest_digest=manifest_digest,
            ledger_file=ledger_file,
            ledger_digest=ledger_digest,
            trained=trained,
            dropped=dropped,
        )
        logged = LoggedCommit(self._append(commit), commit)
        if logged.slot % _SLOTS_BETWEEN_SNAPSHOTS == 0:
            self._log.write_snapshot()
        return logged

    def stop(self, *, by: str, reason: str = "", then: Literal["", "requeue"] = "") -> None:
        """Ends this epoch such that only a resume, or with `then` the next attempt, continues the trial."""
        self._append(Stop(epoch=self.epoch, by=by, reason=reason, then=then))

    def done(self) -> None:
        """Ends the trial for good."""
        self._append(Done(epoch=self.epoch))

    def _append(self, entry: Entry) -> int:
        self._require_certain()
        try:
            return self._log.append(lambda state: entry)
        except UncertainAppendError:
            self._uncertain = True
            raise

    def _require_certain(self) -> None:
        if self._uncertain:
            raise UncertainAppendError(
                f"an earlier append of epoch {self.epoch} may be in the log or not; exit and claim a new epoch"
            )


# Witnesses of a trial log: files that only an epoch can have written that the log has seen claimed.
#
#     checkpoints/step-00000012-e3-*   weights/v00000012-e3   ledger/3-12-*    and no claim of epoch 3: entries are lost
#
# A log that lost its last entries reads like one that never had them. Going on from it would give the number of a lost
# epoch to another one, and a log that is gone altogether would start the trial from scratch, silently.

_EPOCH_OF_DIRECTORY: Final = re.compile(r"(?:step-|v)\d{8,}-e(?P<epoch>\d+)(?:-[0-9a-f]{8})?", re.ASCII)
_EPOCH_OF_DELTA: Final = re.compile(r"(?P<epoch>\d+)-\d+-[0-9a-f]{8}\.json", re.ASCII)


def read_whole_log(trial: TrialDirectory, log: TrialLog, *, patience_s: float | None = None) -> LogState:
    """What is in `log`, once it is clear that nothing of it is missing.

    Args:
        patience_s: how long a slot that a later one shows to be there may stay hidden by a cache; None: as long as any
            file system may take.

    Raises:
        CorruptLogError: an entry is damaged, or missing, as far as the trial's other files can tell.
    """
    # Files first: an epoch that begins in the meantime is claimed before it writes any.
    seen = max(_epochs_of_files(trial), default=(0, trial.path))
    state = log.read_whole(patience_s=patience_s)
    epoch, witness = seen
    if epoch > state.epoch:
        raise CorruptLogError(
            f"{witness} was written by epoch {epoch}, but the trial log {trial.log_path} ends with slot "
            f"{state.next_slot - 1:08d}, in epoch {state.epoch}: later entries are lost; restore them from a backup, "
            f"or start a new trial from the last good checkpoint"
        )
    return state


def _epochs_of_files(trial: TrialDirectory) -> Iterator[tuple[int, Path]]:
    for folder, pattern in (
        (trial.checkpoints_path, _EPOCH_OF_DIRECTORY),
        (trial.weights_path, _EPOCH_OF_DIRECTORY),
        (trial.ledger_path, _EPOCH_OF_DELTA),
    ):
        for name in os.listdir(folder) if folder.is_dir() else ():
            if match := pattern.fullmatch(name):
                yield int(match["epoch"]), folder / name
