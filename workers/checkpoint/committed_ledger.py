"""CommittedLedger: which samples the commits of a trial cover, followed from outside of the trainer.

                  +--> commits after the known one: their deltas --+
    trial log ----+                                                +--> Ledger of the head --> manager, rollout workers
                  +--> first look, fallback, damaged delta: -------+
                       the whole ledger of the head's checkpoint

What counts is the head of the log and its ancestors. A trainer that falls back past damaged commits says so in the log
before it trains; what only those had covered is then covered no longer.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import LoggedCommit
from corral.workers.checkpoint.checkpoint import committed_ledger
from corral.workers.checkpoint.ledger import (
    DROPPED,
    TRAINED,
    CorruptLedgerError,
    Ledger,
    LedgerDelta,
    numbers_of,
    read_delta,
)
from corral.workers.checkpoint.manifest import CorruptCheckpointError

logger = logging.getLogger(__name__)

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
    """What a look at the files has found."""

    after: int
    """The slot that was known at that time."""
    slot: int
    deltas: Sequence[LedgerDelta]
    """What the commits cover that came after."""
    ledger: Ledger | None
    """All that the head covers, where it does not come after."""


class CommittedLedger:
    """The ledger of the log's head.

    Where it cannot be read, what was known before stays until it can: whoever learns too late what is settled
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
            return self._read_alone()

    def _read_alone(self) -> _Found | None:
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
