"""TrajectorySender: trajectories of one rollout worker -> whichever receiver has room, until a commit covers them.

    spool --offer()--> SenderBook --Offer--> receiver with most room --Grant--> payload read back --Record--> receiver
                           ^------------------------Ack, Verdict, Session----------------------------------------+

Payloads are not kept in memory: they are read back from the spool whenever a receiver has room for them.
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
)
from corral.workers.delivery.sender_book import Action, RecordState, Send, SenderBook
from corral.workers.streams.closing import AsyncClosing
from corral.workers.streams.codec import MessageCodec, Tensors
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
        """Raise why a receiver cannot be used, such as `WrongTrialKeyError`, or what a sending failed of, if it did."""
        if self._failure is not None:
            raise self._failure
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
