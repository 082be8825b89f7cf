"""SenderBook: where every record stands that no commit covers.

    WAITING --offer--> ASKED --grant--> SENT --ack--> ACKED ---covered()---> forgotten
       ^                 |                |             |
       |   withdrawn, or |                |             |        any --final verdict--> JUDGED --covered()--> forgotten
       |   disconnected  |                |             |
       +-----------------+----------------+-------------+        the receiver starts a new session, or is gone for good

A record that was sent to a receiver whose connection then broke stays with it, because it may be held there: it is
offered again there, and acknowledged without being sent. The verdicts "duplicate" and "consumed" count as an
acknowledgement: they hold for one session.
"""

import enum
import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from corral.workers.delivery.messages import Ack, Credit, Grant, Offer, Session, Verdict, Withdraw


class RecordState(enum.Enum):
    """Where a record stands; the walk is drawn above."""

    WAITING = "waiting"
    ASKED = "asked"
    SENT = "sent"
    ACKED = "acked"
    JUDGED = "judged"


@dataclass(slots=True)
class _Entry:
    order: int
    size_bytes: int
    state: RecordState = RecordState.WAITING
    receiver: int | None = None


@dataclass(slots=True)
class _Receiver:
    is_connected: bool = False
    is_resumed: bool = True
    """False from a disconnect until the first Session message after it."""
    session: str | None = None
    credit: Credit = Credit(0, 0)
    """As announced, less what we have asked for since."""
    num_asked: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """Read the payload of `uid` and send it."""

    session: str
    uid: str


Action = tuple[int, Offer | Withdraw | Send]
"""(index of the receiver, what to say to it)."""


class SenderBook:
    """Pure: events in, what to send out."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._receivers: dict[int, _Receiver] = {}
        self._waiting: list[tuple[int, str]] = []
        """Heap by admission number; entries that moved on are skipped."""

    def __contains__(self, uid: str) -> bool:
        return uid in self._entries

    def add(self, uid: str, *, order: int, size_bytes: int) -> list[Action]:
        """A new record; adding it again changes nothing."""
        if uid in self._entries:
            return []
        self._entries[uid] = _Entry(order, size_bytes)
        self._wait(uid)
        return self._ask()

    def covered(self, uids: Iterable[str]) -> list[Action]:
        """A commit covers these: forget them."""
        actions: list[Action] = []
        for uid in uids:
            if uid in self._entries:
                actions += self._withdraw(uid)
                del self._entries[uid]
        return actions + self._ask()

    def add_receiver(self, index: int) -> None:
        self._receivers[index] = _Receiver()

    def remove_receiver(self, index: int) -> list[Action]:
        """It is gone for good, with all that it held."""
        del self._receivers[index]
        self._reclaim(index, {RecordState.ASKED, RecordState.SENT, RecordState.ACKED})
        return self._ask()

    def disconnected(self, index: int) -> list[Action]:
        receiver = self._receivers[index]
        receiver.is_connected = receiver.is_resumed = False
        receiver.num_asked = 0
        self._reclaim(index, {RecordState.ASKED})
        return self._ask()

    def session(self, index: int, message: Session) -> list[Action]:
        """What the receiver says about itself: on every connection, and whenever its credit or session changes."""
        receiver = self._receivers[index]
        receiver.is_connected = True
        actions: list[Action] = []
        if message.session != receiver.session:
            receiver.session = message.session
            receiver.num_asked = 0
            self._reclaim(index, {RecordState.ASKED, RecordState.SENT, RecordState.ACKED})
        elif not receiver.is_resumed:
            actions += self._ask_again(index)
        receiver.is_resumed = True
        receiver.credit = Credit(message.credit.records - receiver.num_asked, message.credit.size_bytes)
        return actions + self._rebalance(index) + self._ask()

    def grant(self, index: int, grant: Grant) -> list[Action]:
        entry = self._entry_at(index, grant.session, grant.uid)
        if entry is None or entry.state is RecordState.ACKED:
            return []  # withdrawn in the meantime
        # SENT: the grant of an earlier offer was taken for this one's, and the record came while it had no room.
        self._leave_asked(entry)
        entry.state = RecordState.SENT
        return [(index, Send(grant.session, grant.uid)), *self._ask()]

    def ack(self, index: int, ack: Ack) -> list[Action]:
        entry = self._entry_at(index, ack.session, ack.uid)
        if entry is None:
            return []
        self._leave_asked(entry)
        entry.state = RecordState.ACKED
        return self._ask()

    def verdict(self, index: int, verdict: Verdict) -> tuple[bool, list[Action]]:
        """(whether the verdict is news about a record of ours, what to send)."""
        entry = self._entry_at(index, verdict.session, verdict.uid)
        if entry is None:
            return False, []
        self._leave_asked(entry)
        # What another receiver holds, or what was trained on but not committed, is safe only while its session lasts.
        is_held = verdict.kind in ("duplicate", "consumed")
        entry.state = RecordState.ACKED if is_held else RecordState.JUDGED
        return True, self._ask()

    def unreadable(self, uid: str) -> list[Action]:
        """The payload cannot be read: never offer it again, and give back the room that waits for it."""
        entry = self._entries.get(uid)
        if entry is None:
            return []
        actions = self._withdraw(uid)
        entry.state = RecordState.JUDGED
        return actions + self._ask()

    def is_expected(self, index: int, session: str, uid: str) -> bool:
        """Whether the receiver still waits for a record that it granted."""
        entry = self._entry_at(index, session, uid)
        return entry is not None and entry.state is RecordState.SENT

    # --- parts ------------------------------------------------------------------------------------------------------

    def _entry_at(self, index: int, session: str, uid: str) -> _Entry | None:
        receiver, entry = self._receivers.get(index), self._entries.get(uid)
        if receiver is None or receiver.session != session or entry is None or entry.receiver != index:
            return None
        return None if entry.state is RecordState.JUDGED else entry

    def _wait(self, uid: str) -> None:
        entry = self._entries[uid]
        entry.state, entry.receiver = RecordState.WAITING, None
        heapq.heappush(self._waiting, (entry.order, uid))

    def _reclaim(self, index: int, states: set[RecordState]) -> None:
        for uid, entry in self._entries.items():
            if entry.receiver == index and entry.state in states:
                self._wait(uid)

    def _leave_asked(self, entry: _Entry) -> None:
        if entry.state is RecordState.ASKED and entry.receiver is not None:
            self._receivers[entry.receiver].num_asked -= 1

    def _withdraw(self, uid: str) -> list[Action]:
        entry = self._entries[uid]
        if entry.state not in (RecordState.ASKED, RecordState.SENT) or entry.receiver is None:
            return []
        self._leave_asked(entry)
        receiver = self._receivers[entry.receiver]
        if not receiver.is_connected or receiver.session is None:
            return []
        return [(entry.receiver, Withdraw(session=receiver.session, uid=uid))]

    def _ask(self) -> list[Action]:
        """Offer what waits, oldest first, where there is most room; one offer waits at each receiver that is full."""
        actions: list[Action] = []
        while (uid := self._first_waiting()) is not None and (index := self._best_receiver()) is not None:
            heapq.heappop(self._waiting)
            actions.append(self._ask_one(index, uid))
        return actions

    def _first_waiting(self) -> str | None:
        while self._waiting:
            uid = self._waiting[0][1]
            if uid in self._entries and self._entries[uid].state is RecordState.WAITING:
                return uid
            heapq.heappop(self._waiting)
        return None

    def _best_receiver(self) -> int | None:
        candidates = [
            (receiver.credit.records, receiver.credit.size_bytes, -index)
            for index, receiver in self._receivers.items()
            if receiver.is_connected and (receiver.credit.records > 0 or receiver.num_asked == 0)
        ]
        return -max(candidates)[2] if candidates else None

    def _ask_one(self, index: int, uid: str) -> Action:
        entry, receiver = self._entries[uid], self._receivers[index]
        assert receiver.session is not None
        entry.state, entry.receiver = RecordState.ASKED, index
        receiver.num_asked += 1
        receiver.credit = Credit(receiver.credit.records - 1, receiver.credit.size_bytes - entry.size_bytes)
        return index, Offer(session=receiver.session, uid=uid, size_bytes=entry.size_bytes)

    def _ask_again(self, index: int) -> list[Action]:
        """The connection broke after these were sent: they may or may not have arrived."""
        uids = [
            uid for uid, entry in self._entries.items() if entry.receiver == index and entry.state is RecordState.SENT
        ]
        return [self._ask_one(index, uid) for uid in uids]

    def _rebalance(self, index: int) -> list[Action]:
        """`index` has room: take back offers that wait at receivers without any."""
        actions: list[Action] = []
        room = self._receivers[index].credit.records
        for uid, entry in self._entries.items():
            if len(actions) >= room:
                break
            if entry.state is RecordState.ASKED and entry.receiver is not None and entry.receiver != index:
                if self._receivers[entry.receiver].credit.records <= 0:
                    actions += self._withdraw(uid)
                    self._wait(uid)
        return actions
