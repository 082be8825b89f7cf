"""TrajectoryReceiver: finished trajectories in, acknowledged and held until the model worker drains them.

    rollout workers --RouterEndpoint thread--> ReceiverBook --drain()--> model worker
                    <----Grant, Ack, Verdict------+

`start_session` forgets everything: the senders, who hear of it, offer again whatever no commit covers. What a receiver
holds, has promised room for, and has decided, is in its book, which is pure:

    offered --room--> reserved --record--> held --drain()--> the model worker        one session
       |                 |                   |
       +--- withdrawn, or   -+               +--- known: offered again, it is acknowledged without being sent
            sender disconnected: its room is free again

That a known record is not sent twice is an optimisation, and all that is here may be forgotten: a record is safe in its
spool until a commit covers it, and a second copy that is taken in is turned away by the master.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

from corral.workers.delivery.messages import (
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
from corral.workers.streams.closing import Closing
from corral.workers.streams.codec import Message, MessageCodec, Tensors, tensors_size_bytes
from corral.workers.streams.errors import PeerDeadError
from corral.workers.streams.loop_thread import LoopThread
from corral.workers.streams.router import Peer, RouterEndpoint
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
Outgoing = list[tuple[bytes, ToSender]]
"""(identity of the connection, message), in order."""


@dataclass(frozen=True, slots=True)
class _Offered:
    identity: bytes
    size_bytes: int


class ReceiverBook(Generic[ItemT]):
    """Pure: events in, messages out."""

    def __init__(self, *, capacity_records: int, capacity_bytes: int) -> None:
        if capacity_records < 1 or capacity_bytes < 1:
            raise ValueError(f"capacities must be positive, got {capacity_records} records and {capacity_bytes} bytes")
        self._capacity = Credit(capacity_records, capacity_bytes)
        self.session: str | None = None
        self._senders: dict[bytes, str] = {}
        self._forget_all()

    def _forget_all(self) -> None:
        self._offered: OrderedDict[str, _Offered] = OrderedDict()
        self._reserved: dict[str, _Offered] = {}
        self._held: OrderedDict[str, tuple[ItemT, int]] = OrderedDict()
        self._held_bytes = 0
        self._identity_by_uid: dict[str, bytes] = {}
        self._verdict_by_uid: dict[str, VerdictKind] = {}

    @property
    def num_held(self) -> int:
        """Records that wait for `drain`."""
        return len(self._held)

    @property
    def credit(self) -> Credit:
        """Room that is neither used nor promised; bytes can be negative after one oversized record."""
        reserved_bytes = sum(offered.size_bytes for offered in self._reserved.values())
        return Credit(
            self._capacity.records - len(self._held) - len(self._reserved),
            self._capacity.size_bytes - self._held_bytes - reserved_bytes,
        )

    def start_session(self, session: str) -> Outgoing:
        """A new trainer epoch: nothing is held any more. Starting the present session again changes nothing."""
        if session == self.session:
            return []
        self.session = session
        self._forget_all()
        return self._announce(list(self._senders))

    def hello(self, identity: bytes, sender: str) -> Outgoing:
        self._senders[identity] = sender
        announced = self._announce([identity])
        if self.session is None:
            return announced
        # Verdicts that were given while it was away; it passes over those that are not about its own records.
        verdicts = self._verdict_by_uid.items()
        return announced + [(identity, Verdict(session=self.session, uid=uid, kind=kind)) for uid, kind in verdicts]

    def disconnected(self, identity: bytes) -> Outgoing:
        """Room that was promised to this connection is free again."""
        self._senders.pop(identity, None)
        for table in (self._offered, self._reserved):
            for uid in [uid for uid, offered in table.items() if offered.identity == identity]:
                del table[uid]
        return self._grant()

    def offer(self, identity: bytes, offer: Offer) -> Outgoing:
        if offer.session != self.session:
            return []  # it was told, or will be told, of the session; it then offers again
        uid = offer.uid
        if uid in self._verdict_by_uid:
            return [(identity, Verdict(session=offer.session, uid=uid, kind=self._verdict_by_uid[uid]))]
        if uid in self._identity_by_uid:
            self._identity_by_uid[uid] = identity
            return [(identity, Ack(session=offer.session, uid=uid))]
        self._reserved.pop(uid, None)  # a sender that came back asks again
        self._offered[uid] = _Offered(identity, offer.size_bytes)
        return self._grant()

    def withdraw(self, withdraw: Withdraw) -> Outgoing:
        if withdraw.session != self.session:
            return []
        self._offered.pop(withdraw.uid, None)
        self._reserved.pop(withdraw.uid, None)
        return self._grant()

    def record(self, identity: bytes, record: Record, item: ItemT, size_bytes: int) -> Outgoing:
        """A record has arrived: held and acknowledged, or refused."""
        if record.session != self.session:
            return []
        uid = record.header.uid
        if uid in self._identity_by_uid:
            return [(identity, Ack(session=record.session, uid=uid))]
        reserved = self._reserved.pop(uid, None)
        if reserved is None:
            return []  # withdrawn; if it was offered again since, a grant will ask for it again
        if size_bytes > reserved.size_bytes:
            logger.warning("refused record %s: it has %d bytes, not %d", uid, size_bytes, reserved.size_bytes)
            return [(identity, Verdict(session=record.session, uid=uid, kind="malformed")), *self._grant()]
        self._held[uid] = (item, size_bytes)
        self._held_bytes += size_bytes
        self._identity_by_uid[uid] = identity
        return [(identity, Ack(session=record.session, uid=uid)), *self._grant()]

    def drain(self, max_records: int) -> tuple[list[ItemT], Outgoing]:
        """Take out the oldest arrivals; their uids stay known."""
        items: list[ItemT] = []
        while self._held and len(items) < max_records:
            _, (item, size_bytes) = self._held.popitem(last=False)
            self._held_bytes -= size_bytes
            items.append(item)
        if not items:
            return [], []
        granted = self._grant()
        return items, granted + self._announce(list(self._senders))

    def verdict(self, uid: str, kind: VerdictKind) -> Outgoing:
        """Remember what was decided, and tell who sent it."""
        if self.session is None:
            return []
        self._verdict_by_uid[uid] = kind
        identity = self._identity_by_uid.get(uid)
        if identity not in self._senders:
            return []
        return [(identity, Verdict(session=self.session, uid=uid, kind=kind))]

    def forget(self, uids: Set[str]) -> None:
        """A commit covers these, and their senders know."""
        for uid in uids:
            self._identity_by_uid.pop(uid, None)
            self._verdict_by_uid.pop(uid, None)

    def _announce(self, identities: list[bytes]) -> Outgoing:
        if self.session is None:
            return []
        return [(identity, Session(session=self.session, credit=self.credit)) for identity in identities]

    def _grant(self) -> Outgoing:
        """Promise room, first come first served."""
        outgoing: Outgoing = []
        while self._offered and self.session is not None:
            uid, offered = next(iter(self._offered.items()))
            credit = self.credit
            is_empty = not self._held and not self._reserved  # then even what is larger than all our room may come
            if credit.records < 1 or not (offered.size_bytes <= credit.size_bytes or is_empty):
                break
            self._reserved[uid] = self._offered.pop(uid)
            outgoing.append((offered.identity, Grant(session=self.session, uid=uid)))
        return outgoing


Trajectory = tuple[TrajectoryHeader, Tensors]


class TrajectoryReceiver(Closing):
    """One data-parallel head's end of the trajectory stream; methods may be called from any thread.

    Example:
        with TrajectoryReceiver(security, address="10.0.0.7", capacity_records=256, capacity_bytes=2**30) as receiver:
            names.add(keys.trajectory_receiver(0), receiver.endpoint)
            receiver.start_session(f"{epoch}-{incarnation}")
            for header, tensors in receiver.drain(max_records=64): ...
    """

    def __init__(self, security: StreamSecurity, *, address: str, capacity_records: int, capacity_bytes: int) -> None:
        """Listen; nothing is taken in before `start_session`.

        Args:
            address: IP address of the interface to listen on.
            capacity_records, capacity_bytes: at most so much is held or on its way here; one record may be larger than
                all of it.
        """
        self._book: ReceiverBook[Trajectory] = ReceiverBook(
            capacity_records=capacity_records, capacity_bytes=capacity_bytes
        )
        self._codec: MessageCodec[ToReceiver] = MessageCodec(ToReceiver, trial_uuid=security.trial_uuid)
        self._on_arrival: Callable[[], None] = _nobody
        self._thread = LoopThread("trajectories")
        self._router: RouterEndpoint[ToReceiver]

        def start() -> None:
            # Set in the loop's thread: a sender that is quick is answered before this thread hears of the socket.
            self._router = RouterEndpoint(
                security,
                self._codec,
                address=address,
                roles={"rollout_worker"},
                purpose="trajectories",
                on_message=self._receive,
                on_peer_gone=lambda identity: self._send(self._book.disconnected(identity)),
                bulk=True,
            )

        try:
            self._thread.call(start)
        except BaseException:
            self._thread.close()
            raise

    @property
    def endpoint(self) -> str:
        """Where senders connect: "tcp://host:port"."""
        return self._router.endpoint

    @property
    def num_held(self) -> int:
        """Records that wait for `drain`."""
        return self._book.num_held

    def announce_to(self, on_arrival: Callable[[], None]) -> None:
        """From now on call this whenever a record has become ready for `drain`, in the thread that receives it."""
        self._on_arrival = on_arrival

    def start_session(self, session: str) -> None:
        """Forget everything and tell the senders, who then send again what no commit covers.

        Args:
            session: new for every trainer epoch and every process, such as "3-5f0c9a".
        """
        self._thread.call(lambda: self._send(self._book.start_session(session)))

    def drain(self, max_records: int) -> list[Trajectory]:
        """Up to so many records, in order of arrival; the tensors are read-only views. Their room is free again."""

        def drain() -> list[Trajectory]:
            items, outgoing = self._book.drain(max_records)
            self._send(outgoing)
            return items

        return self._thread.call(drain)

    def verdict(self, uid: str, kind: VerdictKind) -> None:
        """Tell the sender that a record is not needed (any more); offering it again gets the same answer."""
        self._thread.call(lambda: self._send(self._book.verdict(uid, kind)))

    def forget(self, uids: Set[str]) -> None:
        """A commit covers these: their ids need no memory here."""
        self._thread.call(lambda: self._book.forget(uids))

    def close(self) -> None:
        try:
            self._thread.call(self._router.close)
        finally:
            self._thread.close()

    def _receive(self, peer: Peer, message: Message[ToReceiver]) -> None:
        held_before = self._book.num_held
        self._send(self._apply(peer.identity, message))
        if self._book.num_held > held_before:
            self._on_arrival()

    def _apply(self, identity: bytes, message: Message[ToReceiver]) -> Outgoing:
        body = message.body
        match body:
            case SenderHello():
                return self._book.hello(identity, body.sender)
            case Offer():
                return self._book.offer(identity, body)
            case Withdraw():
                return self._book.withdraw(body)
            case Record():
                item = (body.header, message.tensors)
                return self._book.record(identity, body, item, tensors_size_bytes(message.tensors))

    def _send(self, outgoing: Outgoing) -> None:
        for identity, message in outgoing:
            try:
                self._router.send(identity, self._codec.encode(message, epoch=0))
            except PeerDeadError:
                logger.debug("a rollout worker is gone; it asks again when it is back")


def _nobody() -> None:
    """Is told of arrivals before somebody wants to know."""
