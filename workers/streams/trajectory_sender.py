"""TrajectorySender: trajectories of one rollout worker -> whichever receiver has room, until a commit covers them.

    WAITING --offer--> ASKED --grant--> SENT --ack--> ACKED ---covered()---> forgotten
       ^                 |                |             |
       |   withdrawn, or |                |             |        any --verdict--> JUDGED --covered()--> forgotten
       |   disconnected  |                |             |
       +-----------------+----------------+-------------+        the receiver starts a new session, or is gone for good

A record that was sent to a receiver whose connection then broke stays with it, because it may be held there: it is
offered again there, and acknowledged without being sent. Payloads are not kept in memory: they are read back from the
spool whenever a receiver has room for them.
"""

import asyncio
import enum
import heapq
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from corral.workers.streams.codec import Buffer, MessageCodec, Tensors
from corral.workers.streams.errors import MalformedMessageError
from corral.workers.streams.link import DealerLink
from corral.workers.streams.messages_trajectory import (
    Ack,
    Credit,
    Grant,
    Offer,
    Record,
    SenderHello,
    Session,
    ToReceiver,
    ToSender,
    TrajectoryHeader,
    Verdict,
    VerdictKind,
    Withdraw,
)
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)


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
    """State of every record that no commit covers. Pure: events in, what to send out."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._receivers: dict[int, _Receiver] = {}
        self._waiting: list[tuple[int, str]] = []
        """Heap by admission number; entries that moved on are skipped."""

    def __contains__(self, uid: str) -> bool:
        return uid in self._entries

    def counts(self) -> dict[RecordState, int]:
        """Number of records in each state."""
        counts = dict.fromkeys(RecordState, 0)
        for entry in self._entries.values():
            counts[entry.state] += 1
        return counts

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
        # Another receiver holds a duplicate only as long as its session lasts: it counts as held, not as settled.
        entry.state = RecordState.ACKED if verdict.kind == "duplicate" else RecordState.JUDGED
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


@dataclass(frozen=True, slots=True)
class _Payload:
    header: TrajectoryHeader
    provider: Callable[[], Tensors]


class TrajectorySender:
    """One rollout worker's end of the trajectory stream. All methods belong to the loop's thread.

    Example:
        async with TrajectorySender(security, sender_id="rollout_worker/0", on_verdict=settle) as sender:
            sender.set_receivers({0: "tcp://10.0.0.7:45123"})
            sender.offer(header, lambda: read(spool, header.uid), size_bytes=850_000)
            ...
            sender.covered(uids_of_the_commit)
    """

    def __init__(
        self, security: StreamSecurity, *, sender_id: str, on_verdict: Callable[[str, VerdictKind], None]
    ) -> None:
        """
        Args:
            sender_id: "rollout_worker/0".
            on_verdict: gets (uid, kind) of records that will not be trained on; all kinds but "duplicate" are final,
                and the record is kept, silently, until `covered`.
        """
        self._security = security
        self._sender_id = sender_id
        self._on_verdict = on_verdict
        self._codec: MessageCodec[ToSender] = MessageCodec(ToSender, trial_uuid=security.trial_uuid)
        self._book = SenderBook()
        self._payloads: dict[str, _Payload] = {}
        self._links: dict[int, DealerLink] = {}
        self._addresses: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_malformed = 0
        self.num_sent = 0

    def offer(self, header: TrajectoryHeader, tensors_provider: Callable[[], Tensors], *, size_bytes: int) -> None:
        """Deliver a record, as often as it takes until `covered`; offering it again changes nothing.

        Args:
            tensors_provider: reads the payload from the spool; called in another thread, once per sending.
            size_bytes: of the tensors; not less than what the provider gives.
        """
        if header.uid not in self._book:
            self._payloads[header.uid] = _Payload(header, tensors_provider)
            self._perform(self._book.add(header.uid, order=header.order, size_bytes=size_bytes))

    def covered(self, uids: Iterable[str]) -> None:
        """A commit covers these, as trained or dropped: forget them."""
        uids = list(uids)
        self._perform(self._book.covered(uids))
        for uid in uids:
            self._payloads.pop(uid, None)

    def counts(self) -> dict[RecordState, int]:
        """Number of records in each state."""
        return self._book.counts()

    def set_receivers(self, address_by_index: Mapping[int, str]) -> None:
        """The receivers that exist now; what a vanished one held is delivered to the others."""
        for index in [index for index in self._links if index not in address_by_index]:
            self._spawn(self._links.pop(index).close())
            del self._addresses[index]
            self._perform(self._book.remove_receiver(index))
        for index, address in address_by_index.items():
            self._addresses[index] = address
            if index not in self._links:
                self._book.add_receiver(index)
                self._links[index] = self._link(index)

    def raise_failure(self) -> None:
        """Raise why a receiver cannot be used, such as `WrongTrialKeyError`, if there is one."""
        for link in self._links.values():
            link.raise_failure()

    async def wait_connected(self, deadline_s: float) -> None:
        """Wait until every receiver has let us in; errors as for `DealerLink.wait_up`."""
        await asyncio.gather(*(link.wait_up(deadline_s) for link in self._links.values()))

    async def close(self) -> None:
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _link(self, index: int) -> DealerLink:
        def address() -> str:
            if index not in self._addresses:
                raise LookupError(f"receiver {index} is gone")
            return self._addresses[index]

        return DealerLink(
            self._security,
            address,
            server=f"trajectory receiver {index}",
            on_message=lambda frames: self._receive(index, frames),
            on_up=lambda: self._say_hello(index),
            on_down=lambda reason: self._handle_down(index),
            bulk=True,
        )

    def _say_hello(self, index: int) -> None:
        if index in self._links:
            self._links[index].send(self._codec.encode(SenderHello(sender=self._sender_id), epoch=0))

    def _handle_down(self, index: int) -> None:
        if index in self._links:
            self._perform(self._book.disconnected(index))

    def _receive(self, index: int, frames: list[Buffer]) -> None:
        if index not in self._links:
            return
        try:
            body = self._codec.decode(frames).body
        except MalformedMessageError as error:
            self.num_malformed += 1
            logger.warning("dropped a malformed message of trajectory receiver %d: %s", index, error)
            return
        match body:
            case Session():
                self._perform(self._book.session(index, body))
            case Grant():
                self._perform(self._book.grant(index, body))
            case Ack():
                self._perform(self._book.ack(index, body))
            case Verdict():
                is_news, actions = self._book.verdict(index, body)
                self._perform(actions)
                if is_news:
                    self._on_verdict(body.uid, body.kind)

    def _perform(self, actions: list[Action]) -> None:
        for index, action in actions:
            if isinstance(action, Send):
                self._spawn(self._send_record(index, action))
            elif index in self._links:
                self._links[index].send(self._codec.encode(action, epoch=0))

    async def _send_record(self, index: int, send: Send) -> None:
        payload = self._payloads.get(send.uid)
        if payload is None:
            return  # covered in the meantime; the room was given back
        try:
            tensors = await asyncio.to_thread(payload.provider)
            record: ToReceiver = Record(session=send.session, header=payload.header)
            frames = self._codec.encode(record, epoch=0, tensors=tensors)
        except Exception as error:  # whatever the spool raises: the record is lost, and that must be counted
            logger.exception("the payload of %s cannot be read back", send.uid, exc_info=error)
            self._perform(self._book.unreadable(send.uid))
            self._on_verdict(send.uid, "unreadable")
            return
        if index in self._links and self._book.is_expected(index, send.session, send.uid):
            self.num_sent += self._links[index].send(frames)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
