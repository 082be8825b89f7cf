"""SenderBook: where every record stands that no commit covers.

    WAITING --room in a window--> SENT --ack--> HELD ---covered()---> forgotten
       ^                           |             |  any --final verdict--> JUDGED ---covered()---> forgotten
       +---------------------------+-------------+
         the receiver starts a new session, or is gone for good

A record that was sent over a connection that then broke stays with its receiver, because it may be held there: it is
sent there again, and acknowledged without being taken in twice. Verdicts of UNTIL_A_COMMIT count as an acknowledgement:
they hold for one session.

Records go to receivers by turns of their admission numbers, which all senders draw from one sequence: so every
receiver gets its share of all that the trial makes, however few of them one sender has. Another one takes a turn only
while its receiver is away or behind.
"""

import enum
import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from corral.workers.delivery.messages import UNTIL_A_COMMIT, Ack, Verdict

WINDOW = 4  # records on their way to one receiver: the next is sent while the last is taken in


class RecordState(enum.Enum):
    """Where a record stands; the walk is drawn above."""

    WAITING = "waiting"
    SENT = "sent"
    HELD = "held"
    JUDGED = "judged"


@dataclass(slots=True)
class _Entry:
    order: int
    state: RecordState = RecordState.WAITING
    receiver: int | None = None


@dataclass(slots=True)
class _Receiver:
    is_ready: bool = False
    """Whether it has said its session on the present connection."""
    session: str | None = None
    num_sent: int = 0
    """Records that it has not acknowledged."""


Sends = list[tuple[int, str]]
"""(index of the receiver, name of the record to send to it)."""


class SenderBook:
    """Pure: events in, what to send out."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._receivers: dict[int, _Receiver] = {}
        self._waiting: list[tuple[int, str]] = []
        """Heap by admission number; entries that moved on are skipped."""

    def add(self, uid: str, *, order: int) -> Sends:
        """A new record; adding it again changes nothing."""
        if uid not in self._entries:
            self._entries[uid] = _Entry(order)
            self._leave(uid, RecordState.WAITING)
        return self._send()

    def covered(self, uids: Iterable[str]) -> Sends:
        """A commit covers these: forget them."""
        for uid in uids:
            if uid in self._entries:
                self._leave(uid, RecordState.JUDGED)
                del self._entries[uid]
        return self._send()

    def add_receiver(self, index: int) -> None:
        self._receivers[index] = _Receiver()

    def remove_receiver(self, index: int) -> Sends:
        """It is gone for good, with all that it held."""
        self._reclaim(index)
        del self._receivers[index]
        return self._send()

    def disconnected(self, index: int) -> None:
        self._receivers[index].is_ready = False

    def session(self, index: int, session: str) -> Sends:
        """What the receiver says first on every connection, and when a new session starts."""
        receiver, again = self._receivers[index], Sends()
        if session != receiver.session:
            self._reclaim(index)
        elif not receiver.is_ready:  # what was sent over the connection before may not have arrived
            again = [(index, uid) for uid, entry in self._entries.items() if self._is_on_its_way(entry, index)]
        receiver.session, receiver.is_ready = session, True
        return again + self._send()

    def ack(self, index: int, ack: Ack) -> Sends:
        entry = self._entry_at(index, ack)
        if entry is not None and entry.state is RecordState.SENT:
            self._leave(ack.uid, RecordState.HELD)
        return self._send()

    def verdict(self, index: int, verdict: Verdict) -> tuple[bool, Sends]:
        """(whether the verdict is news about a record of ours, what to send)."""
        if self._entry_at(index, verdict) is None:
            return False, []
        # What another receiver holds, or what was trained on but not committed, is safe only while its session lasts.
        is_held = verdict.kind in UNTIL_A_COMMIT
        self._leave(verdict.uid, RecordState.HELD if is_held else RecordState.JUDGED)
        return True, self._send()

    def unreadable(self, uid: str) -> Sends:
        """The payload cannot be read: never send it again."""
        if uid in self._entries:
            self._leave(uid, RecordState.JUDGED)
        return self._send()

    def is_expected(self, index: int, uid: str) -> bool:
        """Whether the record is still to be sent to this receiver."""
        entry = self._entries.get(uid)
        return entry is not None and self._is_on_its_way(entry, index)

    # --- parts ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_on_its_way(entry: _Entry, index: int) -> bool:
        return entry.receiver == index and entry.state is RecordState.SENT

    def _entry_at(self, index: int, said: Ack | Verdict) -> _Entry | None:
        receiver, entry = self._receivers.get(index), self._entries.get(said.uid)
        if receiver is None or receiver.session != said.session or entry is None or entry.receiver != index:
            return None
        return None if entry.state is RecordState.JUDGED else entry

    def _leave(self, uid: str, state: RecordState) -> None:
        """The record changes its state, and its place in a window with it."""
        entry = self._entries[uid]
        if entry.state is RecordState.SENT and entry.receiver is not None:
            self._receivers[entry.receiver].num_sent -= 1
        entry.state = state
        if state is RecordState.WAITING:
            entry.receiver = None
            heapq.heappush(self._waiting, (entry.order, uid))

    def _reclaim(self, index: int) -> None:
        """What this receiver held, and what was on its way to it, waits again."""
        for uid, entry in self._entries.items():
            if entry.receiver == index and entry.state is not RecordState.JUDGED:
                self._leave(uid, RecordState.WAITING)

    def _send(self) -> Sends:
        """Send what waits, oldest first, while there is room in a window."""
        sends = Sends()
        while (uid := self._first_waiting()) is not None and (
            index := self._turn(self._entries[uid].order)
        ) is not None:
            heapq.heappop(self._waiting)
            entry, receiver = self._entries[uid], self._receivers[index]
            entry.state, entry.receiver = RecordState.SENT, index
            receiver.num_sent += 1
            sends.append((index, uid))
        return sends

    def _first_waiting(self) -> str | None:
        while self._waiting:
            uid = self._waiting[0][1]
            if uid in self._entries and self._entries[uid].state is RecordState.WAITING:
                return uid
            heapq.heappop(self._waiting)
        return None

    def _turn(self, order: int) -> int | None:
        """The receiver whose turn it is, or the next one that takes records now."""
        indices = sorted(self._receivers)
        turn = order % len(indices) if indices else 0
        for index in indices[turn:] + indices[:turn]:
            receiver = self._receivers[index]
            if receiver.is_ready and receiver.num_sent < WINDOW:
                return index
        return None
