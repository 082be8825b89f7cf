"""TrajectorySender: finished trajectories of one rollout worker -> its spool -> the receivers, in turns.

    finished --encoded once--> spool (fsync) --> SenderBook --frames--> the receiver whose turn it is
                                                     ^------Ack, Verdict, Session------+
             ... --delivered--> ... --a commit covers it--> discarded
                      | rejected as stale, unreadable
                      `--> discarded; its prompt is issued again

Where a record stands is in the book, which is pure:

    waiting --room in a window--> on its way --ack--> held ----+--a commit covers it----> forgotten
       ^                              |                |       `--any: a final verdict--> forgotten
       +------------------------------+----------------+
         the receiver starts a new session, is gone for good, or asks for it again

A record that was sent over a connection that then broke stays with its receiver, because it may be held there: it is
sent there again, and acknowledged without being taken in twice. Verdicts of UNTIL_A_COMMIT count as an acknowledgement:
they hold for one session. Records go to receivers by turns of their admission numbers, which all senders draw from one
sequence: so every receiver gets its share of all that the trial makes, however few of them one sender has. Another one
takes a turn only while its receiver is away or behind.

A record is its stream header and tensors, in the stream's own encoding: the same frames go to the spool and over the
wire. They are kept until they are acknowledged, and read back from the spool only for a session that comes later, or
after this process was started anew. Only the spool is used from other threads; what it raises (a full or broken disk)
ends the worker: what is on disk then decides what the next one generates again.
"""

import asyncio
import heapq
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from corral.workers.delivery.messages import (
    UNTIL_A_COMMIT,
    Ack,
    SenderHello,
    Session,
    ToSender,
    TrajectoryHeader,
    Verdict,
    VerdictKind,
    uid_of_delivery,
)
from corral.workers.delivery.spool import Spool
from corral.workers.streams.closing import AsyncClosing
from corral.workers.streams.codec import Buffer, MessageCodec, Tensors
from corral.workers.streams.link import DealerLink
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)

_READ_PAUSES_S = (0.5, 2.0, 8.0)  # before a record is read again that the file system has not given
WINDOW = 4  # records on their way to one receiver: the next is sent while the last is taken in


@dataclass(slots=True)
class _Entry:
    order: int
    receiver: int | None = None
    """That it was sent to, and may hold it; None while it waits."""


@dataclass(slots=True)
class _Receiver:
    is_ready: bool = False
    """Whether it has said its session on the present connection."""
    session: str | None = None
    on_its_way: dict[str, None] = field(default_factory=dict)
    """Records that it has not acknowledged, in the order in which they were sent."""


Sends = list[tuple[int, str]]
"""(index of the receiver, name of the record to send to it)."""


class SenderBook:
    """Pure: events in, what to send out."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._receivers: dict[int, _Receiver] = {}
        self._waiting: list[tuple[int, str]] = []
        """Heap by admission number; what was forgotten meanwhile is skipped."""

    def add(self, uid: str, *, order: int) -> Sends:
        """A new record; adding it again changes nothing."""
        if uid not in self._entries:
            self._entries[uid] = _Entry(order)
            heapq.heappush(self._waiting, (order, uid))
        return self._send()

    def forget(self, uids: Iterable[str]) -> Sends:
        """A commit covers these, or nobody will ever train on them, or they cannot be read."""
        for uid in uids:
            entry = self._entries.pop(uid, None)
            if entry is not None and entry.receiver is not None:
                self._receivers[entry.receiver].on_its_way.pop(uid, None)
        return self._send()

    def add_receiver(self, index: int) -> None:
        self._receivers[index] = _Receiver()

    def remove_receiver(self, index: int) -> Sends:
        """The receiver is gone for good, with all its records."""
        self._reclaim(index)
        del self._receivers[index]
        return self._send()

    def disconnected(self, index: int) -> None:
        self._receivers[index].is_ready = False

    def session(self, index: int, session: str) -> Sends:
        """What the receiver says first on every connection, and when a new session starts."""
        receiver = self._receivers[index]
        if session != receiver.session:
            self._reclaim(index)
        # What was sent over the connection before may not have arrived.
        again = [] if receiver.is_ready else [(index, uid) for uid in receiver.on_its_way]
        receiver.session, receiver.is_ready = session, True
        return again + self._send()

    def ack(self, index: int, ack: Ack) -> Sends:
        if self._is_of_ours(index, ack):
            self._receivers[index].on_its_way.pop(ack.uid, None)
        return self._send()

    def verdict(self, index: int, verdict: Verdict) -> tuple[bool, Sends]:
        """(whether the verdict is news about a record of ours, what to send)."""
        if not self._is_of_ours(index, verdict):
            return False, []
        if verdict.kind == "again":
            self._receivers[index].on_its_way.pop(verdict.uid, None)
            entry = self._entries[verdict.uid]
            entry.receiver = None
            heapq.heappush(self._waiting, (entry.order, verdict.uid))
            return False, self._send()
        # What another receiver holds, or what was trained on but not committed, is safe only while its session lasts.
        if verdict.kind not in UNTIL_A_COMMIT:
            return True, self.forget([verdict.uid])
        self._receivers[index].on_its_way.pop(verdict.uid, None)
        return True, self._send()

    def is_expected(self, index: int, uid: str) -> bool:
        """Whether the record is still to be sent to this receiver."""
        return index in self._receivers and uid in self._receivers[index].on_its_way

    # --- parts ------------------------------------------------------------------------------------------------------

    def _is_of_ours(self, index: int, answer: Ack | Verdict) -> bool:
        """Whether something is said of a record that this receiver was sent in its present session."""
        receiver, entry = self._receivers.get(index), self._entries.get(answer.uid)
        is_present = receiver is not None and receiver.session == answer.session
        return is_present and entry is not None and entry.receiver == index

    def _reclaim(self, index: int) -> None:
        """What this receiver held, and what was on its way to it, waits again."""
        self._receivers[index].on_its_way.clear()
        for uid, entry in self._entries.items():
            if entry.receiver == index:
                entry.receiver = None
                heapq.heappush(self._waiting, (entry.order, uid))

    def _send(self) -> Sends:
        """Send what waits, oldest first, while there is room in a window."""
        sends = Sends()
        while self._waiting:
            order, uid = self._waiting[0]
            if uid in self._entries:
                if (index := self._turn(order)) is None:
                    break
                self._entries[uid].receiver = index
                self._receivers[index].on_its_way[uid] = None
                sends.append((index, uid))
            heapq.heappop(self._waiting)
        return sends

    def _turn(self, order: int) -> int | None:
        """The receiver whose turn it is, or the next one that takes records now."""
        indices = sorted(self._receivers)
        turn = order % len(indices) if indices else 0
        for index in indices[turn:] + indices[:turn]:
            receiver = self._receivers[index]
            if receiver.is_ready and len(receiver.on_its_way) < WINDOW:
                return index
        return None


class TrajectorySender(AsyncClosing):
    """All records of one rollout worker that no commit covers, delivered as often as it takes until one does.

    All methods belong to the loop's thread. A record is known by the uid of its sample here and in the spool, and to
    receivers by its delivery id.

    Example:
        async with TrajectorySender(security, spool, on_verdict=settle) as sender:
            sender.set_receivers({0: "tcp://10.0.0.7:45123"})
            await sender.put(header, tensors)
            ...
            await sender.remove(uids_of_the_commit)
    """

    def __init__(
        self, security: StreamSecurity, spool: Spool, *, on_verdict: Callable[[str, VerdictKind], None]
    ) -> None:
        """
        Args:
            spool: what is in it is delivered, too.
            on_verdict: gets (delivery id, kind) of a record that its receiver does not need. After those of
                UNTIL_A_COMMIT it is sent again in the next session; the others are final. It is kept until `remove`.
        """
        self._security = security
        self._spool = spool
        self._on_verdict = on_verdict
        self._codec: MessageCodec[ToSender] = MessageCodec(ToSender, trial_uuid=security.trial_uuid)
        headers: MessageCodec[TrajectoryHeader] = MessageCodec(TrajectoryHeader, trial_uuid=security.trial_uuid)
        self._book = SenderBook()
        self._header_by_uid = {uid: headers.decode(spool.payload(uid)).body for uid in spool.uids()}
        for header in self._header_by_uid.values():
            self._book.add(header.uid, order=header.order)
        self._void: set[str] = set()
        """Uids of records with answers that nobody trains on: their prompts were dropped."""
        self._frames: dict[str, Sequence[Buffer]] = {}
        """By delivery id, of what has not been acknowledged since it was made."""
        self._removing = asyncio.Lock()
        self._links: dict[int, DealerLink[ToSender]] = {}
        self._addresses: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def uids(self) -> list[str]:
        return list(self._header_by_uid)

    def holds(self, delivery: str) -> bool:
        """Whether the record of this delivery is here, and not another one of its uid."""
        header = self._header_by_uid.get(uid_of_delivery(delivery))
        return header is not None and header.uid == delivery

    def orders(self, status: Literal["finished", "dropped"]) -> dict[str, int]:
        """Admission number by uid, of the records that hold answers, or of those of dropped prompts."""
        is_wanted = status == "finished"
        return {
            uid: header.order
            for uid, header in self._header_by_uid.items()
            if (header.status == "finished" and uid not in self._void) == is_wanted
        }

    async def put(self, header: TrajectoryHeader, tensors: Tensors) -> None:
        """Make a record durable and deliver it; OSError if it cannot be written."""
        frames = self._codec.encode(header, epoch=0, tensors=tensors)
        uid = uid_of_delivery(header.uid)
        await asyncio.to_thread(self._spool.append, uid, frames)
        self._header_by_uid[uid], self._frames[header.uid] = header, frames
        self._perform(self._book.add(header.uid, order=header.order))

    async def remove(self, uids: Iterable[str]) -> list[str]:
        """Forget records on disk and here: a commit covers them, or their prompts are issued again.

        Returns:
            The uids that were here.
        """
        async with self._removing:  # or a record could go twice, and with it the next one of its uid
            here = [uid for uid in dict.fromkeys(uids) if uid in self._header_by_uid]
            if here:
                await asyncio.to_thread(self._spool.discard, here)
            gone = [self._header_by_uid.pop(uid).uid for uid in here]
            self._void.difference_update(here)
            for delivery in gone:
                self._frames.pop(delivery, None)
            self._perform(self._book.forget(gone))
            return here

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
        """Raise why a receiver cannot be used, such as `WrongTrialKeyError`, or what a sending failed of, if it did."""
        if self._failure is not None:
            raise self._failure
        for link in self._links.values():
            link.raise_failure()

    async def close(self) -> None:
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _link(self, index: int) -> DealerLink[ToSender]:
        def address() -> str:
            if index not in self._addresses:
                raise LookupError(f"receiver {index} is gone")
            return self._addresses[index]

        return DealerLink(
            self._security,
            self._codec,
            address,
            server=f"trajectory receiver {index}",
            on_message=lambda message: self._receive(index, message.body),
            on_up=lambda: self._send(index, self._codec.encode(SenderHello(), epoch=0)),
            on_down=lambda: self._handle_down(index),
            bulk=True,
        )

    def _send(self, index: int, frames: Sequence[Buffer]) -> None:
        """Over a link that is there; what is lost with its connection is sent again over the next one."""
        if index in self._links:
            self._links[index].send(list(frames))

    def _handle_down(self, index: int) -> None:
        if index in self._links:
            self._book.disconnected(index)

    def _receive(self, index: int, body: ToSender) -> None:
        if index not in self._links:
            return
        match body:
            case Session():
                self._perform(self._book.session(index, body.session))
            case Ack():
                self._frames.pop(body.uid, None)
                self._perform(self._book.ack(index, body))
            case Verdict():
                self._frames.pop(body.uid, None)
                is_news, sends = self._book.verdict(index, body)
                self._perform(sends)
                if is_news:
                    if body.kind == "dropped":
                        self._void.add(uid_of_delivery(body.uid))
                    self._on_verdict(body.uid, body.kind)

    def _perform(self, sends: Sends) -> None:
        for index, delivery in sends:
            if (frames := self._frames.get(delivery)) is not None:
                self._send(index, frames)
            else:
                self._spawn(self._read_and_send(index, delivery))

    async def _read_and_send(self, index: int, delivery: str) -> None:
        try:
            frames = await self._read_back(uid_of_delivery(delivery))
        except Exception as error:  # whatever the spool raises: the record is lost, and that must be counted
            if self.holds(delivery):  # or it was removed in the meantime
                logger.exception("the payload of %s cannot be read back", delivery, exc_info=error)
                self._perform(self._book.forget([delivery]))
                self._on_verdict(delivery, "unreadable")
            return
        if self._book.is_expected(index, delivery):
            self._send(index, frames)

    async def _read_back(self, uid: str) -> Sequence[Buffer]:
        """What was put; again and again for a while, where the file system does not give it."""
        for pause_s in _READ_PAUSES_S:
            try:
                return await asyncio.to_thread(self._spool.payload, uid)
            except OSError as error:
                logger.warning("the payload of %s cannot be read back now: %s", uid, error)
            await asyncio.sleep(pause_s)
        return await asyncio.to_thread(self._spool.payload, uid)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._handle_task_done)

    def _handle_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
