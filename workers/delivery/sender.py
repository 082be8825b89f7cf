"""RecordStore and TrajectorySender: trajectories of one rollout worker -> the receivers, in turns.

    finished --encoded once--> spool (fsync) --> SenderBook --frames--> the receiver whose turn it is
                                                     ^------Ack, Verdict, Session------+
             ... --delivered--> ... --a commit covers it--> discarded
                      | rejected as stale, unreadable
                      `--> discarded; its prompt is issued again

A record is its stream header and tensors, in the stream's own encoding: the same frames go to the spool and over the
wire. They are kept until they are acknowledged, and read back from the spool only for a session that comes later, or
after this process was started anew. Only the spool is used from other threads; what it raises (a full or broken disk)
ends the worker: what is on disk then decides what the next one generates again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass

from corral.workers.delivery.messages import (
    Ack,
    SenderHello,
    Session,
    ToSender,
    TrajectoryHeader,
    Verdict,
    VerdictKind,
    uid_of_delivery,
)
from corral.workers.delivery.sender_book import SenderBook, Sends
from corral.workers.delivery.spool import Spool
from corral.workers.streams.closing import AsyncClosing
from corral.workers.streams.codec import Buffer, MessageCodec, Tensors
from corral.workers.streams.link import DealerLink
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Payload:
    read: Callable[[], Sequence[Buffer]]
    frames: Sequence[Buffer] | None
    """While they have not been acknowledged."""


class TrajectorySender(AsyncClosing):
    """One rollout worker's end of the trajectory stream. All methods belong to the loop's thread.

    Example:
        async with TrajectorySender(security, on_verdict=settle) as sender:
            sender.set_receivers({0: "tcp://10.0.0.7:45123"})
            sender.deliver(header, lambda: spool.payload(uid), frames=frames)
            ...
            sender.covered(uids_of_the_commit)
    """

    def __init__(self, security: StreamSecurity, *, on_verdict: Callable[[str, VerdictKind], None]) -> None:
        """
        Args:
            on_verdict: gets (uid, kind) of a record that its receiver does not need. After "duplicate" and "consumed"
                it is sent again in the next session; the other kinds are final. It is kept until `covered`.
        """
        self._security = security
        self._on_verdict = on_verdict
        self._codec: MessageCodec[ToSender] = MessageCodec(ToSender, trial_uuid=security.trial_uuid)
        self._book = SenderBook()
        self._payloads: dict[str, _Payload] = {}
        self._links: dict[int, DealerLink[ToSender]] = {}
        self._addresses: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def deliver(
        self,
        header: TrajectoryHeader,
        read: Callable[[], Sequence[Buffer]],
        *,
        frames: Sequence[Buffer] | None = None,
    ) -> None:
        """Deliver a record, as often as it takes until `covered`; delivering it again changes nothing.

        Args:
            read: reads the frames of header and tensors from the spool; called in another thread, once per sending.
            frames: these, where they are at hand.
        """
        if header.uid not in self._book:
            self._payloads[header.uid] = _Payload(read, frames)
            self._perform(self._book.add(header.uid, order=header.order))

    def covered(self, uids: Iterable[str]) -> None:
        """A commit covers these, as trained or dropped: forget them."""
        uids = list(uids)
        for uid in uids:
            self._payloads.pop(uid, None)
        self._perform(self._book.covered(uids))

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
            on_down=lambda reason: self._handle_down(index),
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
                self._perform(self._book.ack(index, body))
                self._let_go(body.uid)
            case Verdict():
                is_news, sends = self._book.verdict(index, body)
                self._perform(sends)
                self._let_go(body.uid)
                if is_news:
                    self._on_verdict(body.uid, body.kind)

    def _let_go(self, uid: str) -> None:
        """Somebody has it, or nobody needs it: it need not be in memory."""
        if uid in self._payloads:
            self._payloads[uid].frames = None

    def _perform(self, sends: Sends) -> None:
        for index, uid in sends:
            payload = self._payloads[uid]
            if payload.frames is not None:
                self._send(index, payload.frames)
            else:
                self._spawn(self._read_and_send(index, uid, payload))

    async def _read_and_send(self, index: int, uid: str, payload: _Payload) -> None:
        try:
            frames = await asyncio.to_thread(payload.read)
        except Exception as error:  # whatever the spool raises: the record is lost, and that must be counted
            if self._payloads.get(uid) is payload:  # or it was covered, and removed, in the meantime
                logger.exception("the payload of %s cannot be read back", uid, exc_info=error)
                self._perform(self._book.unreadable(uid))
                self._on_verdict(uid, "unreadable")
            return
        if self._book.is_expected(index, uid):
            self._send(index, frames)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._handle_task_done)

    def _handle_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error


class RecordStore:
    """All records of one rollout worker that no commit covers. All methods belong to the loop's thread."""

    def __init__(self, spool: Spool, sender: TrajectorySender, *, trial_uuid: str) -> None:
        self._spool = spool
        self._sender = sender
        self._codec: MessageCodec[TrajectoryHeader] = MessageCodec(TrajectoryHeader, trial_uuid=trial_uuid)
        self._header_by_uid: dict[str, TrajectoryHeader] = {}
        self._removing = asyncio.Lock()
        for uid in spool.uids():
            self._header_by_uid[uid] = self._codec.decode(spool.payload(uid)).body

    def __contains__(self, uid: str) -> bool:
        return uid in self._header_by_uid

    def uids(self) -> list[str]:
        return list(self._header_by_uid)

    def holds(self, delivery: str) -> bool:
        """Whether the record of this delivery is here, and not another one of its uid."""
        header = self._header_by_uid.get(uid_of_delivery(delivery))
        return header is not None and header.uid == delivery

    def orders(self) -> dict[str, int]:
        """Admission number by uid, of the records that hold answers."""
        return {uid: header.order for uid, header in self._header_by_uid.items() if header.status == "finished"}

    async def put(self, header: TrajectoryHeader, tensors: Tensors) -> None:
        """Make a record durable and deliver it to the trainer; OSError if it cannot be written."""
        frames = self._codec.encode(header, epoch=0, tensors=tensors)
        uid = uid_of_delivery(header.uid)
        await asyncio.to_thread(self._spool.append, uid, frames)
        self._header_by_uid[uid] = header
        self._deliver(uid, frames)

    def deliver_all(self) -> None:
        """Deliver everything that is here to the trainer; what is under way is not sent twice."""
        for uid in self._header_by_uid:
            self._deliver(uid)

    async def remove(self, uids: Iterable[str]) -> list[str]:
        """Forget records on disk, here and in the stream; returns the uids that were here."""
        async with self._removing:  # or a record could go twice, and with it the next one of its uid
            here = [uid for uid in dict.fromkeys(uids) if uid in self._header_by_uid]
            if here:
                await asyncio.to_thread(self._spool.discard, here)
            self._sender.covered([self._header_by_uid.pop(uid).uid for uid in here])
            return here

    def _deliver(self, uid: str, frames: Sequence[Buffer] | None = None) -> None:
        self._sender.deliver(self._header_by_uid[uid], lambda: self._spool.payload(uid), frames=frames)
