"""CommittedLedger: which samples the commits of a trial cover, followed from outside of the trainer.

                  +--> a few commits more: their deltas ------+
    trial log ----+                                           +--> Ledger of the head --> manager, rollout workers
                  +--> first look, fallback, damaged delta:   |
                       the whole ledger of the head's commit -+

What counts is the head of the log and its ancestors. A trainer that falls back past damaged commits says so in the log
before it trains; what only those had covered is then covered no longer.
"""

import logging
import time
from dataclasses import dataclass
from typing import Final

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import Commit, LoggedCommit
from corral.workers.checkpoint.checkpoint import committed_ledger
from corral.workers.checkpoint.ledger import CorruptLedgerError, Ledger, read_delta
from corral.workers.checkpoint.manifest import CorruptCheckpointError

logger = logging.getLogger(__name__)

_MOST_DELTAS: Final = 16  # one file holds what many more hold one by one
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


class CommittedLedger:
    """The ledger of the log's head.

    Where it cannot be read, what was known before stays until it can: whoever learns too late what is settled
    generates again what the trainer then turns away, and no more than that.

    Example:
        committed = CommittedLedger(trial)
        news = committed.poll()             # at any interval: no commit is missed
        forget(news.covered)
        committed.ledger.consumed("0:problem-17")
    """

    def __init__(self, trial: TrialDirectory) -> None:
        self.ledger = Ledger()
        self._trial = trial
        self._log = TrialLog(trial.log_path)
        self._slot = 0
        self._unreadable_slot = 0
        self._retry_at = 0.0

    def poll(self) -> LedgerNews:
        """Takes in what the log says since the last call.

        Raises:
            CorruptLogError: the log is damaged.
        """
        head = self._log.read().last
        if head is None or head.slot == self._slot:
            return LedgerNews()
        if head.slot == self._unreadable_slot and time.monotonic() < self._retry_at:
            return LedgerNews()
        return self._add_deltas(head) or self._start_over(head)

    def _add_deltas(self, head: LoggedCommit) -> LedgerNews | None:
        """Adds what the commits up to `head` cover; None if they do not continue what is known, or one is damaged."""
        commits = self._commits_up_to(head)
        if not 0 < len(commits) <= _MOST_DELTAS:
            return None
        try:
            deltas = [read_delta(self._trial, commit) for commit in commits]
        except CorruptLedgerError as error:
            logger.warning("%s; the whole ledger of step %d is read instead", error, head.commit.step)
            return None
        for delta in deltas:
            self.ledger.add(delta)
        self._slot = head.slot
        return LedgerNews(
            trained=tuple(uid for delta in deltas for group in delta.trained.values() for uid in group),
            dropped=tuple(uid for delta in deltas for uid in delta.dropped),
        )

    def _commits_up_to(self, head: LoggedCommit) -> list[Commit]:
        """The ancestors of `head` after the commit that is known, and itself, oldest first; [] if that is none."""
        lineage = self._log.state.lineage(head.slot)
        slots = [0, *(logged.slot for logged in lineage)]
        known = slots.index(self._slot) if self._slot in slots else len(lineage)
        return [logged.commit for logged in lineage[known:]]

    def _start_over(self, head: LoggedCommit) -> LedgerNews:
        try:
            ledger = self._read_whole(head)
        except CorruptLedgerError as error:
            if head.slot != self._unreadable_slot:
                logger.error("what the commit of step %d covers is not known yet: %s", head.commit.step, error)
            self._unreadable_slot, self._retry_at = head.slot, time.monotonic() + _RETRY_PAUSE_S
            return LedgerNews()
        before, self.ledger, self._slot = self.ledger, ledger, head.slot
        return LedgerNews(
            trained=tuple(uid for uid in ledger.trained if not before.consumed(uid)),
            dropped=tuple(uid for uid in ledger.dropped if not before.consumed(uid)),
            has_gone_back=any(not ledger.consumed(uid) for uid in (*before.trained, *before.dropped)),
        )

    def _read_whole(self, head: LoggedCommit) -> Ledger:
        try:
            return committed_ledger(self._trial, head.commit)
        except CorruptCheckpointError as error:
            logger.warning("%s; the deltas up to step %d are read instead", error, head.commit.step)
        lineage = self._log.state.lineage(head.slot)
        return Ledger.of(*(read_delta(self._trial, logged.commit) for logged in lineage))
