"""RecordStore and TrajectorySender: trajectories of one rollout worker -> whichever receiver has room.

    finished --spool (fsync)--> offered --delivered--> ... --a commit covers it--> discarded
                    ^                       | rejected as stale, malformed, unreadable
              read back at a restart        `--> discarded; its prompt is issued again

    offer() --> SenderBook --Offer--> receiver with most room --Grant--> payload read back --Record--> receiver
                    ^------------------------Ack, Verdict, Session----------------------------------------+

A record is its stream header and tensors, in the stream's own encoding. Payloads are not kept in memory: they are read
back from the spool whenever a receiver has room for them. Only the spool is used from other threads; what it raises (a
full or broken disk) ends the worker: what is on disk then decides what the next one generates again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass

from corral.workers.delivery.messages import (
    Ack,
    Grant,
    Record,
    SenderHello,
    Session,
    ToReceiver,
    ToSender,
    TrajectoryHeader,
    Verdict,
    VerdictKind,
    uid_of_delivery,
)
from corral.workers.delivery.sender_book import Action, Send, SenderBook
from corral.workers.delivery.spool import Spool
from corral.workers.streams.closing import AsyncClosing
from corral.workers.streams.codec import MessageCodec, Tensors, tensors_size_bytes
from corral.workers.streams.link import DealerLink
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Payload:
    header: TrajectoryHeader
    provider: Callable[[], Tensors]


class TrajectorySender(AsyncClosing):
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
            on_verdict: gets (uid, kind) of a record that its receiver does not need. After "duplicate" and "consumed"
                it is offered again in the next session; the other kinds are final. It is kept until `covered`.
        """
        self._security = security
        self._sender_id = sender_id
        self._on_verdict = on_verdict
        self._codec: MessageCodec[ToSender] = MessageCodec(ToSender, trial_uuid=security.trial_uuid)
        self._book = SenderBook()
        self._payloads: dict[str, _Payload] = {}
        self._links: dict[int, DealerLink[ToSender]] = {}
        self._addresses: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

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

    def _receive(self, index: int, body: ToSender) -> None:
        if index not in self._links:
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
            self._links[index].send(frames)

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
        """Make a record durable and offer it to the trainer; OSError if it cannot be written."""
        frames = self._codec.encode(header, epoch=0, tensors=tensors)
        uid = uid_of_delivery(header.uid)
        await asyncio.to_thread(self._spool.append, uid, [bytes(frame) for frame in frames])
        self._header_by_uid[uid] = header
        self._offer(uid, size_bytes=tensors_size_bytes(tensors))

    def offer_all(self) -> None:
        """Offer everything that is here to the trainer; what was offered before is not offered twice."""
        for uid in self._header_by_uid:
            self._offer(uid, size_bytes=tensors_size_bytes(self._tensors(uid)))

    async def remove(self, uids: Iterable[str]) -> list[str]:
        """Forget records on disk, here and in the stream; returns the uids that were here."""
        async with self._removing:  # or a record could go twice, and with it the next one of its uid
            here = [uid for uid in dict.fromkeys(uids) if uid in self._header_by_uid]
            if here:
                await asyncio.to_thread(self._spool.discard, here)
            self._sender.covered([self._header_by_uid.pop(uid).uid for uid in here])
            return here

    def _offer(self, uid: str, *, size_bytes: int) -> None:
        self._sender.offer(self._header_by_uid[uid], lambda: self._tensors(uid), size_bytes=size_bytes)

    def _tensors(self, uid: str) -> Tensors:
        return self._codec.decode(self._spool.payload(uid)).tensors
