"""The ledger: which samples a trial has consumed, so that none is trained twice, skipped, or dropped uncounted.

    train(step, uids) --+
                        +--> pending --delta_for--> ledger/{epoch}-{step}-*.json --named by--> commit entry -> committed
    drop(uid, reason) --+

A commit holds the samples consumed since the commit that it continues, as one delta file; the ledger of a trial is the
union of the deltas along the lineage of commits. What is pending when a trainer dies was never consumed.
"""

import hashlib
import secrets as random_tokens
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from corral.experiments.trial_directory import TrialDirectory, atomic_write
from corral.experiments.trial_log_state import Commit

_SHOWN_UIDS: Final = 5  # an error names a few samples; thousands would hide its first line


class LedgerViolationError(Exception):
    """A sample was consumed twice, or is unaccounted for: the trial must stop rather than train on."""


class CorruptLedgerError(Exception):
    """A delta file is missing or not what its commit says."""


class LedgerDelta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one commit consumed.

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

    trained: dict[str, int] = field(default_factory=dict)
    """Train step by sample uid."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Reason by sample uid."""
    _pending_trained: dict[str, int] = field(default_factory=dict)
    _pending_dropped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, trial_directory: TrialDirectory, commits: Iterable[Commit]) -> "Ledger":
        """The union of the deltas of `commits`, a lineage, oldest first.

        Raises:
            CorruptLedgerError: a delta file is missing or was changed.
            LedgerViolationError: two deltas hold the same sample.
        """
        ledger = cls()
        for commit in commits:
            ledger.add(read_delta(trial_directory, commit))
        return ledger

    @property
    def trained_count(self) -> int:
        return len(self.trained)

    @property
    def dropped_count(self) -> int:
        return len(self.dropped)

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
            self.trained.update(dict.fromkeys(group, step))
        self.dropped.update(delta.dropped)

    def train(self, step: int, uids: Sequence[str]) -> None:
        """Records that train step `step` consumed `uids`, until the next commit only in memory.

        Raises:
            LedgerViolationError: one of them is consumed already; nothing is recorded.
        """
        self._require_new(uids, f"train step {step}")
        new = dict.fromkeys(uids, step)
        self.trained.update(new)
        self._pending_trained.update(new)

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
        trained: dict[int, list[str]] = {}
        for uid, trained_at in self._pending_trained.items():
            trained.setdefault(trained_at, []).append(uid)
        return LedgerDelta(epoch=epoch, step=step, trained=trained, dropped=dict(self._pending_dropped))

    def mark_committed(self, delta: LedgerDelta) -> None:
        """Call when the commit with `delta` is in the trial log: what it holds is pending no more."""
        for group in delta.trained.values():
            for uid in group:
                del self._pending_trained[uid]
        for uid in delta.dropped:
            del self._pending_dropped[uid]

    def verify_exactly_once(self, expected: Collection[str]) -> None:
        """Raises LedgerViolationError unless the samples consumed are exactly `expected`.

        That none of them is consumed twice holds for every ledger: recording the second time raises.
        """
        consumed = self.trained.keys() | self.dropped.keys()
        wanted = set(expected)
        problems = []
        if wanted - consumed:
            problems.append(f"never consumed: {_some(wanted - consumed)}")
        if consumed - wanted:
            problems.append(f"consumed but never issued: {_some(consumed - wanted)}")
        if problems:
            raise LedgerViolationError(f"of {len(wanted)} samples, {len(consumed)} consumed; {'; '.join(problems)}")

    def _require_new(self, uids: Sequence[str], by: str) -> None:
        twice = [uid for uid, count in Counter(uids).items() if count > 1]
        if twice:
            raise LedgerViolationError(f"{by} consumes {_some(twice)} more than once")
        known = [uid for uid in uids if self.consumed(uid)]
        if known:
            first = known[0]
            before = f"step {self.trained[first]}" if first in self.trained else f"a drop as {self.dropped[first]}"
            raise LedgerViolationError(f"{by} consumes {_some(known)}, but {before} consumed {first!r} before")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conservation:
    """Where every issued sample is: issued = trained + dropped + spooled + in_flight."""

    issued: int
    trained: int
    dropped: Mapping[str, int]
    """Count by reason."""
    spooled: int
    in_flight: int


def check_conservation(
    ledger: Ledger, *, issued: Collection[str], spooled: Collection[str], in_flight: Collection[str]
) -> Conservation:
    """Accounts for each issued sample once, by the last stage that it has reached.

    A sample may be spooled and trained (a spool record lives until a commit covers it), or in flight and spooled
    (a retry), so stages are looked at from the end.

    Raises:
        LedgerViolationError: a sample is nowhere, or somewhere without having been issued.
    """
    waiting = set(spooled).difference(ledger.trained, ledger.dropped)
    running = set(in_flight).difference(ledger.trained, ledger.dropped, waiting)
    accounted = ledger.trained.keys() | ledger.dropped.keys() | waiting | running
    lost, unknown = set(issued) - accounted, accounted - set(issued)
    counts = (
        f"{len(set(issued))} issued, {ledger.trained_count} trained, {ledger.dropped_count} dropped, "
        f"{len(waiting)} spooled, {len(running)} in flight"
    )
    if lost:
        raise LedgerViolationError(f"samples are lost: {_some(lost)} ({counts})")
    if unknown:
        raise LedgerViolationError(f"samples were never issued: {_some(unknown)} ({counts})")
    return Conservation(
        issued=len(set(issued)),
        trained=ledger.trained_count,
        dropped=Counter(ledger.dropped.values()),
        spooled=len(waiting),
        in_flight=len(running),
    )


def write_delta(trial_directory: TrialDirectory, delta: LedgerDelta) -> tuple[str, str]:
    """Writes the delta durably.

    Returns:
        (path relative to the trial directory, SHA-256), for the commit entry.
    """
    data = msgspec.json.encode(delta)
    path = trial_directory.ledger_path / f"{delta.epoch}-{delta.step}-{random_tokens.token_hex(4)}.json"
    atomic_write(path, data)
    return trial_directory.relative(path), hashlib.sha256(data).hexdigest()


def read_delta(trial_directory: TrialDirectory, commit: Commit) -> LedgerDelta:
    """The delta of a commit.

    Raises:
        CorruptLedgerError: the file is missing or not what the commit says.
    """
    remedy = "restore it from a backup, or let the trial continue from the commit before"
    try:
        path = trial_directory.inside(commit.ledger_file)
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise CorruptLedgerError(f"ledger file {commit.ledger_file} cannot be read ({error}); {remedy}") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != commit.ledger_sha256:
        raise CorruptLedgerError(
            f"ledger file {path} has SHA-256 {digest}, but its commit says {commit.ledger_sha256}; {remedy}"
        )
    try:
        delta = msgspec.json.decode(data, type=LedgerDelta)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptLedgerError(f"ledger file {path} is no ledger delta ({error}); {remedy}") from error
    held = (delta.epoch, delta.step, delta.trained_count, len(delta.dropped))
    named = (commit.epoch, commit.step, commit.trained, commit.dropped)
    if held != named:
        raise CorruptLedgerError(
            f"ledger file {path} holds (epoch, step, trained, dropped) {held}, but its commit says {named}; {remedy}"
        )
    return delta


def _some(uids: Iterable[str]) -> str:
    names = sorted(uids)
    more = f" and {len(names) - _SHOWN_UIDS} more" if len(names) > _SHOWN_UIDS else ""
    return ", ".join(map(repr, names[:_SHOWN_UIDS])) + more
