"""TrajectoryReceiver: finished trajectories in, acknowledged and held until the model worker drains them.

    offered --room--> reserved --record--> held --drain()--> the model worker        one session
       |                 |                   |
       +--- withdrawn, or   -+               +--- known: offered again, it is acknowledged without being sent
            sender disconnected: its room is free again

`start_session` forgets everything: the senders, who hear of it, offer again whatever no commit covers.
"""

import logging
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from numpy.typing import NDArray

from corral.workers.streams.codec import Buffer, Message, MessageCodec, tensors_size_bytes
from corral.workers.streams.errors import MalformedMessageError, PeerDeadError
from corral.workers.streams.loop_thread import LoopThread
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
    """What the receiver holds, has promised room for, and has decided. Pure: events in, messages out."""

    def __init__(self, *, capacity_records: int, capacity_bytes: int) -> None:
        if capacity_records < 1 or capacity_bytes < 1:
            raise ValueError(f"capacities must be positive, got {capacity_records} records and {capacity_bytes} bytes")
        self._capacity = Credit(capacity_records, capacity_bytes)
        self._session: str | None = None
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
    def session(self) -> str | None:
        return self._session

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
        if session == self._session:
            return []
        self._session = session
        self._forget_all()
        return self._announce(list(self._senders))

    def hello(self, identity: bytes, sender: str) -> Outgoing:
        self._senders[identity] = sender
        return self._announce([identity])

    def disconnected(self, identity: bytes) -> Outgoing:
        """Room that was promised to this connection is free again."""
        self._senders.pop(identity, None)
        for table in (self._offered, self._reserved):
            for uid in [uid for uid, offered in table.items() if offered.identity == identity]:
                del table[uid]
        return self._grant()

    def offer(self, identity: bytes, offer: Offer) -> Outgoing:
        if offer.session != self._session:
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
        if withdraw.session != self._session:
            return []
        self._offered.pop(withdraw.uid, None)
        self._reserved.pop(withdraw.uid, None)
        return self._grant()

    def record(self, identity: bytes, record: Record, item: ItemT, size_bytes: int) -> Outgoing:
        """A record has arrived: held and acknowledged, or refused."""
        if record.session != self._session:
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
        if self._session is None:
            return []
        self._verdict_by_uid[uid] = kind
        identity = self._identity_by_uid.get(uid)
        if identity not in self._senders:
            return []
        return [(identity, Verdict(session=self._session, uid=uid, kind=kind))]

    def forget(self, uids: Set[str]) -> None:
        """A commit covers these, and their senders know."""
        for uid in uids:
            self._identity_by_uid.pop(uid, None)
            self._verdict_by_uid.pop(uid, None)

    def _announce(self, identities: list[bytes]) -> Outgoing:
        if self._session is None:
            return []
        return [(identity, Session(session=self._session, credit=self.credit)) for identity in identities]

    def _grant(self) -> Outgoing:
        """Promise room, first come first served."""
        outgoing: Outgoing = []
        while self._offered and self._session is not None:
            uid, offered = next(iter(self._offered.items()))
            credit = self.credit
            is_empty = not self._held and not self._reserved  # then even what is larger than all our room may come
            if credit.records < 1 or not (offered.size_bytes <= credit.size_bytes or is_empty):
                break
            self._reserved[uid] = self._offered.pop(uid)
            outgoing.append((offered.identity, Grant(session=self._session, uid=uid)))
        return outgoing


Trajectory = tuple[TrajectoryHeader, dict[str, NDArray[Any]]]


class TrajectoryReceiver:
    """One data-parallel head's end of the trajectory stream; methods may be called from any thread.

    Example:
        with TrajectoryReceiver(security, address="10.0.0.7", capacity_records=256, capacity_bytes=2**30) as receiver:
            names.add(keys.trajectory_receiver(0), receiver.endpoint, replace=True)
            receiver.start_session(f"{epoch}-{incarnation}")
            for header, tensors in receiver.drain(max_records=64): ...
    """

    def __init__(
        self,
        security: StreamSecurity,
        *,
        address: str,
        capacity_records: int,
        capacity_bytes: int,
        session: str | None = None,
        roles: Set[str] = frozenset({"rollout_worker"}),
    ) -> None:
        """
        Args:
            address: IP address of the interface to listen on.
            capacity_records, capacity_bytes: at most so much is held or on its way here; one record may be larger than
                all of it.
            session: None: nothing is taken in before `start_session`.
        """
        self._book: ReceiverBook[Trajectory] = ReceiverBook(
            capacity_records=capacity_records, capacity_bytes=capacity_bytes
        )
        self._codec: MessageCodec[ToReceiver] = MessageCodec(ToReceiver, trial_uuid=security.trial_uuid)
        self.num_malformed = 0
        self._thread = LoopThread("trajectories")

        def start() -> RouterEndpoint:
            return RouterEndpoint(
                security,
                address=address,
                roles=roles,
                purpose="trajectories",
                on_message=self._receive,
                on_peer_gone=lambda identity: self._send(self._book.disconnected(identity)),
                bulk=True,
            )

        try:
            self._router = self._thread.call(start)
        except BaseException:
            self._thread.close()
            raise
        if session is not None:
            self.start_session(session)

    @property
    def endpoint(self) -> str:
        """Where senders connect: "tcp://host:port"."""
        return self._router.endpoint

    @property
    def num_held(self) -> int:
        """Records that wait for `drain`."""
        return self._book.num_held

    @property
    def num_refused_handshakes(self) -> int:
        return self._router.num_refused_handshakes

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, peer: Peer, frames: list[Buffer]) -> None:
        try:
            message = self._codec.decode(frames)
        except MalformedMessageError as error:
            self.num_malformed += 1
            logger.warning("dropped a malformed trajectory message of a %s: %s", peer.role, error)
            return
        self._send(self._apply(peer.identity, message))

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
