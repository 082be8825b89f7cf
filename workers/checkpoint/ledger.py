"""The ledger: which samples a trial has consumed, so that none is trained twice, skipped, or dropped uncounted.

    train(step, uids) --+               +--delta_for--> ledger/{epoch}-{step}-*.json      what this commit adds
                        +--> pending ---+
    drop(uid, reason) --+               +--states-----> checkpoints/.../ledger.msgpack    what has become of every row

A commit names both. The whole ledger lies in the checkpoint, beside the weights that it belongs to and under the same
checksums: a reader that loads one has the other, and needs no older file. The deltas are for those who follow the
commits one by one, and for people who look back: they alone say which step trained a sample, and why one was dropped.
What is pending when a trainer dies was never consumed.

That no sample counts twice rests on this refusal alone: a step whose batch holds a known uid is never committed. That
receivers know what they hold, and the master's buffer what it has seen, only saves sending and training in vain.

    uid "2:problem-17"  =  pass 2  +  row "problem-17" --its number in the data set--> a byte of a part of pass 2

    pass 0   ██████ ██████ ██·█      a part for each thousand rows, made when the first of them is consumed: rows that
    pass 1   █·····        █···      are taken often, of a small source beside a large one or those that a sampler
    pass 2   ·█····                  prefers, make many passes, and these take no room for all the other rows

The file has these bytes compressed, to a bit or two where they follow no order and to less where they are alike. The
numbers are those of the data set, which never changes in a trial: they are the same in every process, and no file has
names.
"""

import secrets as random_tokens
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from corral.experiments.trial.directory import TrialDirectory, atomic_write
from corral.experiments.trial.log_state import Commit
from corral.workers.checkpoint.durable_file import FileEntry, digest_of, mismatch, write_durable
from corral.workers.data.prompts import split_uid

OPEN: Final = 0
TRAINED: Final = 1
DROPPED: Final = 2

LEDGER_NAME: Final = "ledger.msgpack"
_PART_ROWS: Final = 1024
_SHOWN_UIDS: Final = 5  # an error names a few samples; thousands would hide its first line


class LedgerViolationError(Exception):
    """A sample was consumed twice, or is unaccounted for: the trial must stop rather than train on."""


class CorruptLedgerError(Exception):
    """A ledger file is missing or not what its commit says."""


class LedgerDelta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The additions of one commit to the ledger.

    >>> LedgerDelta(epoch=1, step=2, trained={1: ["0:a"], 2: ["0:b"]}, dropped={"0:c": "stale"})
    """

    epoch: int
    step: int
    trained: dict[int, list[str]]
    """Sample uids by the train step that consumed them."""
    dropped: dict[str, str]
    """Reason by sample uid: stale, filtered, reward_error, malformed."""

    @property
    def trained_count(self) -> int:
        return sum(map(len, self.trained.values()))


class LedgerStates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The states of the rows of a data set."""

    num_rows: int
    passes: dict[int, dict[int, bytes]]
    """OPEN, TRAINED or DROPPED of each row, by pass and part."""


def numbers_of(row_ids: Iterable[str]) -> dict[str, int]:
    """The number of each row of a data set, by its name."""
    return {row: number for number, row in enumerate(row_ids)}


class Ledger:
    """All consumed samples, committed and pending.

    Args:
        number_by_row: of the data set.
        states: as the method of this name gives them; nothing is consumed without.

    Raises:
        ValueError: they are of another data set.
    """

    def __init__(self, number_by_row: Mapping[str, int], states: LedgerStates | None = None) -> None:
        self._number_by_row = number_by_row
        states = states or LedgerStates(len(number_by_row), {})
        if states.num_rows != len(number_by_row):
            raise ValueError(f"it is of {states.num_rows} rows, and the data set has {len(number_by_row)}")
        self._parts = {
            (dataset_epoch, part): bytearray(held)
            for dataset_epoch, parts in states.passes.items()
            for part, held in parts.items()
        }
        self._pending_trained: dict[str, int] = {}
        self._pending_dropped: dict[str, str] = {}
        self.trained_count = sum(held.count(TRAINED) for held in self._parts.values())
        self.dropped_count = sum(held.count(DROPPED) for held in self._parts.values())

    @property
    def consumed_count(self) -> int:
        return self.trained_count + self.dropped_count

    @property
    def has_pending(self) -> bool:
        """Whether something was recorded that no commit holds yet."""
        return bool(self._pending_trained or self._pending_dropped)

    def consumed(self, uid: str) -> bool:
        return self._state(uid) != OPEN

    def dropped(self, uid: str) -> bool:
        return self._state(uid) == DROPPED

    def beyond(self, other: "Ledger", *states: int) -> Iterator[str]:
        """Uids that are in one of these states here, and open in another ledger of the same rows."""
        rows = list(self._number_by_row)
        for (dataset_epoch, part), held in self._parts.items():
            known = other._parts.get((dataset_epoch, part), bytes(len(held)))
            start = part * _PART_ROWS
            for row, here, there in zip(rows[start : start + _PART_ROWS], held, known, strict=True):
                if here in states and there == OPEN:
                    yield f"{dataset_epoch}:{row}"

    def add(self, delta: LedgerDelta) -> None:
        """Adds what an earlier commit consumed; all of it or, if any sample is known, nothing."""
        trained = [uid for group in delta.trained.values() for uid in group]
        self._settle(trained, delta.dropped, f"the commit of epoch {delta.epoch}, step {delta.step}")

    def train(self, step: int, uids: Sequence[str]) -> None:
        """Records that train step `step` consumed `uids`, until the next commit only in memory.

        Raises:
            LedgerViolationError: one of them is consumed already, or of no row of the data set; nothing is recorded.
        """
        self._settle(uids, (), f"train step {step}")
        self._pending_trained.update(dict.fromkeys(uids, step))

    def drop(self, uid: str, reason: str) -> None:
        """Records that `uid` will not be trained on.

        Raises:
            LedgerViolationError: as `train`
            ValueError: without a reason.
        """
        if not reason:
            raise ValueError(f"sample {uid!r} cannot be dropped without a reason")
        self._settle((), [uid], f"the drop as {reason}")
        self._pending_dropped[uid] = reason

    def delta_for(self, *, epoch: int, step: int) -> LedgerDelta:
        """Everything pending, as the delta of the commit about to be made."""
        trained: dict[int, list[str]] = {}
        for uid, trained_in in self._pending_trained.items():
            trained.setdefault(trained_in, []).append(uid)
        return LedgerDelta(epoch=epoch, step=step, trained=trained, dropped=dict(self._pending_dropped))

    def states(self) -> LedgerStates:
        """A copy of everything, committed or pending, for the checkpoint that is about to be committed."""
        passes = defaultdict[int, dict[int, bytes]](dict)
        for (dataset_epoch, part), held in self._parts.items():
            passes[dataset_epoch][part] = bytes(held)
        return LedgerStates(len(self._number_by_row), dict(passes))

    def mark_committed(self, delta: LedgerDelta) -> None:
        """Call when the commit with `delta` is in the trial log: what it holds is pending no more."""
        for group in delta.trained.values():
            for uid in group:
                del self._pending_trained[uid]
        for uid in delta.dropped:
            del self._pending_dropped[uid]

    def _state(self, uid: str) -> int:
        dataset_epoch, row = split_uid(uid)
        if (number := self._number_by_row.get(row)) is None:
            return OPEN
        part, at = divmod(number, _PART_ROWS)
        held = self._parts.get((dataset_epoch, part))
        return OPEN if held is None else held[at]

    def _settle(self, trained: Sequence[str], dropped: Collection[str], by: str) -> None:
        """All of them, or none."""
        self._require_new([*trained, *dropped], by)
        for uids, state in ((trained, TRAINED), (dropped, DROPPED)):
            for uid in uids:
                dataset_epoch, row = split_uid(uid)
                part, at = divmod(self._number_by_row[row], _PART_ROWS)
                if (held := self._parts.get((dataset_epoch, part))) is None:
                    size = min(_PART_ROWS, len(self._number_by_row) - part * _PART_ROWS)
                    held = self._parts[dataset_epoch, part] = bytearray(size)
                held[at] = state
        self.trained_count += len(trained)
        self.dropped_count += len(dropped)

    def _require_new(self, uids: Sequence[str], by: str) -> None:
        twice = [uid for uid, count in Counter(uids).items() if count > 1]
        if twice:
            raise LedgerViolationError(f"{by} consumes {_some(twice)} more than once")
        known = [uid for uid in uids if self.consumed(uid)]
        if known:
            before = "trained on" if self._state(known[0]) == TRAINED else "dropped"
            when = "the files in the trial's folder ledger/ say when"
            raise LedgerViolationError(f"{by} consumes {_some(known)}, but {known[0]!r} was {before} before; {when}")
        unknown = [uid for uid in uids if split_uid(uid)[1] not in self._number_by_row]
        if unknown:
            raise LedgerViolationError(f"{by} consumes {_some(unknown)}, of no row of the trial's data set")


def write_delta(trial_directory: TrialDirectory, delta: LedgerDelta) -> tuple[str, str]:
    """Writes the delta durably.

    Returns:
        (path relative to the trial directory, digest), for the commit entry.
    """
    data = msgspec.json.encode(delta)
    path = trial_directory.ledger_path / f"{delta.epoch}-{delta.step}-{random_tokens.token_hex(4)}.json"
    atomic_write(path, data)
    return trial_directory.relative(path), digest_of(data)


def read_delta(trial_directory: TrialDirectory, commit: Commit) -> LedgerDelta:
    """The additions of a commit.

    Raises:
        CorruptLedgerError: the file is missing or not what the commit says.
    """
    try:
        path = trial_directory.inside(commit.ledger_file)
    except ValueError as error:
        raise CorruptLedgerError(f"ledger file {commit.ledger_file} cannot be read ({error})") from error
    data = _read(path, digest=commit.ledger_digest)
    try:
        return msgspec.json.decode(data, type=LedgerDelta)
    except ValueError as error:  # those of msgspec are ValueErrors
        raise CorruptLedgerError(f"ledger file {path} cannot be used: {error}") from error


def write_ledger(path: Path, states: LedgerStates) -> FileEntry:
    """Writes `Ledger.states` durably."""
    return write_durable(path, [zlib.compress(msgspec.msgpack.encode(states), level=1)])


def read_ledger(path: Path, number_by_row: Mapping[str, int], *, digest: str) -> Ledger:
    """All that a commit and its ancestors hold.

    Raises:
        CorruptLedgerError: the file is missing or another one, or of another data set.
    """
    data = _read(path, digest=digest)
    try:
        return Ledger(number_by_row, msgspec.msgpack.decode(zlib.decompress(data), type=LedgerStates))
    except (ValueError, zlib.error) as error:
        raise CorruptLedgerError(f"ledger file {path} cannot be used: {error}") from error


def _read(path: Path, *, digest: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptLedgerError(f"ledger file {path} cannot be read ({error})") from error
    actual = digest_of(data)
    if actual != digest:
        raise CorruptLedgerError(f"ledger file {path}: {mismatch(digest, actual)}")
    return data


def _some(uids: Iterable[str]) -> str:
    names = sorted(uids)
    more = f" and {len(names) - _SHOWN_UIDS} more" if len(names) > _SHOWN_UIDS else ""
    return ", ".join(map(repr, names[:_SHOWN_UIDS])) + more
