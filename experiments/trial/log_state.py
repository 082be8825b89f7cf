"""The meaning of a trial log: a pure fold from its entries to the writer that may commit, and the commit to build on.

      claim, commit, fallback
               +----+
               v    |
(empty) ---> OPEN --+-- done ---> DONE       nobody may claim again
   |           |  ^
   +-- stop ---+  | claim, to resume
               v  |
             STOPPED   a stop that hands over to the next attempt may be followed by one that does not

The head is the commit that the next one continues: each commit becomes it, and a fallback moves it back past commits
that cannot be loaded. The head and its ancestors are the lineage; what a commit outside of it covered is not settled.

A state has room for the newest commits only, so that it costs the same at any age of the trial. Nobody goes back
further: older checkpoints are removed.
"""

import secrets as random_tokens
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec

from corral.experiments.exit_codes import UserError
from corral.scheduling.errors import HintedError, message_and_hint
from corral.scheduling.policy_version import PolicyVersion

MOST_COMMITS: Final = 64
"""That a state has room for, and so of which checkpoints can be kept."""


class TrialLogError(HintedError, UserError):
    """Base of:

    SupersededError      a higher epoch was claimed
    StoppedError         somebody stopped the trial
      DoneError          the trial is complete
    UncertainAppendError the file server answers neither yes nor no
    CorruptLogError      a slot that no writer of this log can have written
    """


class SupersededError(TrialLogError):
    """A newer trainer epoch has taken over; this one must exit without writing anything."""


class StoppedError(TrialLogError):
    """The trial was stopped."""


class DoneError(StoppedError):
    """The trial is complete."""


class UncertainAppendError(TrialLogError):
    """The entry may or may not be in the log; only a new claim can tell."""


class CorruptLogError(TrialLogError):
    """A slot holds something that the rules of the log forbid."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag=str.lower):
    nonce: str = msgspec.field(default_factory=lambda: random_tokens.token_hex(16))
    """Random; tells a writer whose reply was lost that the entry in the slot is its own."""


class Claim(_Entry, frozen=True, kw_only=True):
    """Trainer epoch `epoch` begins, and every lower one ends."""

    epoch: int
    owner: str


class Commit(_Entry, frozen=True, kw_only=True):
    """Binds weights, optimizer, data position (all in `directory`) and the consumed samples (`ledger_file`)."""

    epoch: int
    step: int
    """The policy version that this commit holds; its parent's again if it only adds dropped samples to the ledger."""
    parent: int
    """Slot of the commit that this one continues; 0 if it continues the initial weights."""
    directory: str
    """Relative to the trial directory."""
    manifest_digest: str
    """BLAKE3, which stands for all files of `directory`."""
    ledger_file: str
    """Relative to the trial directory."""
    ledger_digest: str
    trained: int
    """How many samples this commit adds as trained."""
    dropped: int
    """How many samples this commit adds as dropped."""


DROPPED_AS_FILTERED: Final = "filtered"
"""Begins the reasons of the ledger for prompts from which nothing is learned, though nothing was wrong with them."""


class FallBack(_Entry, frozen=True, kw_only=True):
    """The commits after slot `to` cannot be loaded: they count no more, for nobody."""

    epoch: int
    to: int
    """Slot of an ancestor of the head."""
    reason: str
    """For people."""


class Stop(_Entry, frozen=True, kw_only=True):
    """No writer may commit until a claim resumes the trial."""

    epoch: int | None
    """The epoch that stopped itself; None if someone outside stopped it."""
    by: str
    reason: str
    then: Literal["", "requeue"] = ""
    """`requeue`: the next attempt goes on by itself; "": only a resume by a human does."""


class Done(_Entry, frozen=True, kw_only=True):
    """The trial is complete."""

    epoch: int


Entry = Claim | Commit | FallBack | Stop | Done


@dataclass(frozen=True, slots=True)
class LoggedCommit:
    """A commit and its slot, by which later commits name it as their parent."""

    slot: int
    commit: Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """The state that the entries so far add up to."""

    next_slot: int = 1
    epoch: int = 0
    """The highest claimed epoch; 0 before the first claim."""
    owner: str = ""
    claim_slot: int = 0
    commit_slot: int = 0
    """Of the newest commit, which a fallback may have left behind; 0 before the first."""
    stop_slot: int = 0
    """Of the newest stop, which a claim may have resumed; 0 before the first."""
    lineage: tuple[LoggedCommit, ...] = ()
    """The chain of commits up to the head, oldest first: the last of it."""
    versions: tuple[PolicyVersion, ...] = ()
    """That of the last commit of each epoch in the whole lineage, oldest first."""
    stop: Stop | None = None
    """The stop in force; None once a claim has resumed the trial."""
    done: Done | None = None

    @property
    def last(self) -> LoggedCommit | None:
        """The commit at the head."""
        return self.lineage[-1] if self.lineage else None

    @property
    def head(self) -> int:
        """Slot of the commit that the next one continues; 0 for the initial weights."""
        return self.lineage[-1].slot if self.lineage else 0

    @property
    def last_commit(self) -> Commit | None:
        last = self.last
        return last.commit if last else None

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    @property
    def is_done(self) -> bool:
        return self.done is not None

    @property
    def is_handed_over(self) -> bool:
        """Whether the stop in force only bridges the time until the next attempt."""
        return self.stop is not None and self.stop.then == "requeue"

    def after(self, entry: Entry) -> "LogState":
        """The state with `entry` in the next slot.

        Raises:
            CorruptLogError: if the rules of the log forbid that entry there.
        """
        slot = self.next_slot
        if refusal := self.refusal(entry):
            raise CorruptLogError(f"slot {slot:08d} of the trial log holds {entry}, but {message_and_hint(refusal)[0]}")
        match entry:
            case Claim():
                state = replace(self, epoch=entry.epoch, owner=entry.owner, claim_slot=slot, stop=None)
            case Commit():
                state = replace(self._continuing(*self.lineage, LoggedCommit(slot, entry)), commit_slot=slot)
            case FallBack():
                state = self._continuing(*(logged for logged in self.lineage if logged.slot <= entry.to))
            case Stop():
                state = replace(self, stop=entry, stop_slot=slot)
            case Done():
                state = replace(self, done=entry)
        return replace(state, next_slot=slot + 1)

    def _continuing(self, *lineage: LoggedCommit) -> "LogState":
        head = lineage[-1].commit
        earlier = (version for version in self.versions if version.epoch < head.epoch)
        versions = (*earlier, PolicyVersion(head.epoch, head.step))
        return replace(self, lineage=lineage[-MOST_COMMITS:], versions=versions)

    def refusal(self, entry: Entry) -> TrialLogError | ValueError | None:
        """Why the rules of the log forbid `entry` in the next slot, with the way out; None if they allow it."""
        if not isinstance(entry, Claim) and entry.epoch not in (None, self.epoch):
            return SupersededError(
                f"epoch {entry.epoch} was superseded by epoch {self.epoch} of {self.owner} in slot "
                f"{self.claim_slot:08d}",
                "exit, that one continues from the last commit",
            )
        if self.done:
            return DoneError(f"epoch {self.done.epoch} finished this trial", "exit, or start a new one")
        if isinstance(entry, Claim):
            return None if entry.epoch == self.epoch + 1 else ValueError(f"the next epoch is {self.epoch + 1}")
        if self.stop:
            # Who stops a trial between two attempts means that the next one must not go on.
            is_final_word = self.is_handed_over and isinstance(entry, Stop) and not entry.then
            return None if is_final_word else stopped_error(self.stop)
        rule = ""
        if isinstance(entry, Commit):
            rule = self._why_not_commit(entry)
        if isinstance(entry, FallBack):
            rule = self._why_not_fall_back(entry)
        return ValueError(rule) if rule else None

    def _why_not_commit(self, entry: Commit) -> str:
        if entry.parent != self.head:
            return f"it continues slot {entry.parent}, and the commit to continue is slot {self.head}"
        parent = self.last_commit
        if parent is not None and entry.step < parent.step:
            return f"its step {entry.step} must not come before step {parent.step}, which it continues"
        return ""

    def _why_not_fall_back(self, entry: FallBack) -> str:
        if entry.to not in [logged.slot for logged in self.lineage[:-1]]:
            return f"slot {entry.to} is no ancestor of slot {self.head}, which it leaves"
        if self.commit_slot > self.claim_slot:
            return f"epoch {self.epoch} has committed already; only a new epoch may fall back"
        return ""


def stopped_error(stop: Stop) -> StoppedError:
    """Says who has stopped a trial, and how it goes on."""
    reason = f" ({stop.reason})" if stop.reason else ""
    return StoppedError(
        f"{stop.by} stopped this trial{reason}", "exit, `rl-submit --resume` continues from the last commit"
    )
