"""The ledger: which samples a trial has consumed, so that none is trained twice, skipped, or dropped uncounted.

    train(step, uids) --+               +--delta_for--> ledger/{epoch}-{step}-*.json   what this commit adds
                        +--> pending ---+
    drop(uid, reason) --+               +--whole------> checkpoints/.../ledger.json    all that was ever consumed

A commit names both. The whole ledger lies in the checkpoint, beside the weights that it belongs to and under the same
checksums: whoever loads one has the other, and no older file is needed. The deltas are for those who follow the commits
one by one, and for whoever looks back. What is pending when a trainer dies was never consumed.

That no sample counts twice rests on this refusal alone: a step whose batch holds a known uid is never committed. That
receivers know what they hold, and the master's buffer what it has seen, only saves sending and training in vain.

A number for each of many samples takes four bytes (`UidTable`).

    uid "2:problem-17"  =  pass "2:"  +  row "problem-17" --number of the row--> place in the pass's array

The rows of a data set come again in every pass, so their names are kept once. A dict of uids takes two hundred bytes
per sample, for good, in every process that follows the ledger.
"""

import secrets as random_tokens
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from corral.experiments.trial.directory import TrialDirectory, atomic_write
from corral.experiments.trial.log_state import Commit
from corral.workers.checkpoint.content_digest import digest_of, mismatch

_ABSENT: Final = -1


class UidTable(Mapping[str, int]):
    """A mapping from uids to numbers that are not negative.

    >>> table = UidTable()
    >>> table["0:problem-17"] = 3
    >>> dict(table)
    {'0:problem-17': 3}
    """

    def __init__(self) -> None:
        self._number_by_row: dict[str, int] = {}
        self._rows: list[str] = []
        self._values_by_pass: dict[str, array[int]] = {}
        self._size = 0

    def __getitem__(self, uid: str) -> int:
        prefix, row = _split(uid)
        values, number = self._values_by_pass.get(prefix), self._number_by_row.get(row)
        if values is None or number is None or number >= len(values) or values[number] == _ABSENT:
            raise KeyError(uid)
        return values[number]

    def __setitem__(self, uid: str, value: int) -> None:
        if value < 0:
            raise ValueError(f"the value of {uid!r} must not be negative, got {value}")
        prefix, row = _split(uid)
        number = self._number_by_row.setdefault(row, len(self._rows))
        if number == len(self._rows):
            self._rows.append(row)
        values = self._values_by_pass.setdefault(prefix, array("i"))
        if number >= len(values):
            values.extend([_ABSENT] * (number + 1 - len(values)))
        self._size += values[number] == _ABSENT
        values[number] = value

    def __iter__(self) -> Iterator[str]:
        for prefix, values in self._values_by_pass.items():
            for row, value in zip(self._rows, values, strict=False):  # a pass may not have come to the last rows yet
                if value != _ABSENT:
                    yield prefix + row

    def __len__(self) -> int:
        return self._size


def _split(uid: str) -> tuple[str, str]:
    head, separator, row = uid.partition(":")
    return (head + separator, row) if separator else ("", uid)


LEDGER_NAME: Final = "ledger.json"
_SHOWN_UIDS: Final = 5  # an error names a few samples; thousands would hide its first line


class LedgerViolationError(Exception):
    """A sample was consumed twice, or is unaccounted for: the trial must stop rather than train on."""


class CorruptLedgerError(Exception):
    """A ledger file is missing or not what its commit says."""


class LedgerDelta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one commit adds to the ledger; as `ledger.json` of a checkpoint, what the commit and its ancestors hold.

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


@dataclass(slots=True)
class Ledger:
    """All consumed samples, committed and pending."""

    trained: UidTable = field(default_factory=UidTable)
    """Train step by sample uid."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Reason by sample uid."""
    _pending_trained: dict[str, int] = field(default_factory=dict)
    _pending_dropped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, *deltas: LedgerDelta) -> "Ledger":
        """The union of deltas.

        Raises:
            LedgerViolationError: two of them hold the same sample.
        """
        ledger = cls()
        for delta in deltas:
            ledger.add(delta)
        return ledger

    @property
    def trained_count(self) -> int:
        return len(self.trained)

    @property
    def consumed_count(self) -> int:
        return len(self.trained) + len(self.dropped)

    @property
    def has_pending(self) -> bool:
        """Whether something was recorded that no commit holds yet."""
        return bool(self._pending_trained or self._pending_dropped)

    def consumed(self, uid: str) -> bool:
        return uid in self.trained or uid in self.dropped

    def add(self, delta: LedgerDelta) -> None:
        """Adds what an earlier commit consumed; all of it or, if any sample is known, nothing."""
        uids = [uid for group in delta.trained.values() for uid in group] + list(delta.dropped)
        self._require_new(uids, f"the commit of epoch {delta.epoch}, step {delta.step}")
        for step, group in delta.trained.items():
            for uid in group:
                self.trained[uid] = step
        self.dropped.update(delta.dropped)

    def train(self, step: int, uids: Sequence[str]) -> None:
        """Records that train step `step` consumed `uids`, until the next commit only in memory.

        Raises:
            LedgerViolationError: one of them is consumed already; nothing is recorded.
        """
        self._require_new(uids, f"train step {step}")
        for uid in uids:
            self.trained[uid] = self._pending_trained[uid] = step

    def drop(self, uid: str, reason: str) -> None:
        """Records that `uid` will not be trained on.

        Raises:
            LedgerViolationError: it is consumed already.
            ValueError: without a reason.
        """
        if not reason:
            raise ValueError(f"sample {uid!r} cannot be dropped without a reason")
        self._require_new([uid], f"the drop as {reason}")
        self.dropped[uid] = reason
        self._pending_dropped[uid] = reason

    def delta_for(self, *, epoch: int, step: int) -> LedgerDelta:
        """Everything pending, as the delta of the commit about to be made."""
        trained = _uids_by_step(self._pending_trained)
        return LedgerDelta(epoch=epoch, step=step, trained=trained, dropped=dict(self._pending_dropped))

    def whole(self, *, epoch: int, step: int) -> LedgerDelta:
        """Everything, committed or pending, for the checkpoint that is about to be committed."""
        return LedgerDelta(epoch=epoch, step=step, trained=_uids_by_step(self.trained), dropped=self.dropped)

    def mark_committed(self, delta: LedgerDelta) -> None:
        """Call when the commit with `delta` is in the trial log: what it holds is pending no more."""
        for group in delta.trained.values():
            for uid in group:
                del self._pending_trained[uid]
        for uid in delta.dropped:
            del self._pending_dropped[uid]

    def _require_new(self, uids: Sequence[str], by: str) -> None:
        twice = [uid for uid, count in Counter(uids).items() if count > 1]
        if twice:
            raise LedgerViolationError(f"{by} consumes {_some(twice)} more than once")
        known = [uid for uid in uids if self.consumed(uid)]
        if known:
            first = known[0]
            before = f"step {self.trained[first]}" if first in self.trained else f"a drop as {self.dropped[first]}"
            raise LedgerViolationError(f"{by} consumes {_some(known)}, but {before} consumed {first!r} before")


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
    """What a commit added.

    Raises:
        CorruptLedgerError: the file is missing or not what the commit says.
    """
    try:
        path = trial_directory.inside(commit.ledger_file)
    except ValueError as error:
        raise CorruptLedgerError(f"ledger file {commit.ledger_file} cannot be read ({error})") from error
    delta = read_ledger(path, digest=commit.ledger_digest)
    held = (delta.epoch, delta.step, delta.trained_count, len(delta.dropped))
    named = (commit.epoch, commit.step, commit.trained, commit.dropped)
    if held != named:
        raise CorruptLedgerError(
            f"ledger file {path} holds (epoch, step, trained, dropped) {held}, but its commit says {named}"
        )
    return delta


def read_ledger(path: Path, *, digest: str) -> LedgerDelta:
    """What one commit adds, or all that it and its ancestors hold.

    Raises:
        CorruptLedgerError: the file is missing or another one.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptLedgerError(f"ledger file {path} cannot be read ({error})") from error
    actual = digest_of(data)
    if actual != digest:
        raise CorruptLedgerError(f"ledger file {path}: {mismatch(digest, actual)}")
    try:
        return msgspec.json.decode(data, type=LedgerDelta)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptLedgerError(f"ledger file {path} is no ledger ({error})") from error


def _uids_by_step(step_by_uid: Mapping[str, int]) -> dict[int, list[str]]:
    uids: dict[int, list[str]] = {}
    for uid, step in step_by_uid.items():
        uids.setdefault(step, []).append(uid)
    return uids


def _some(uids: Iterable[str]) -> str:
    names = sorted(uids)
    more = f" and {len(names) - _SHOWN_UIDS} more" if len(names) > _SHOWN_UIDS else ""
    return ", ".join(map(repr, names[:_SHOWN_UIDS])) + more
