"""TrajectoryReceiver: finished trajectories in, acknowledged and held until the model worker drains them.

    rollout workers --RouterEndpoint thread--> ReceiverBook --drain()--> model worker
                    <-------Ack, Verdict-----------+

`start_session` forgets everything: the senders, who hear of it, send again whatever no commit covers. What a receiver
holds and has decided is in its book, which is pure.

That a known record is not taken in twice is an optimisation, and all that is here may be forgotten: a record is safe in
its spool until a commit covers it, and a second copy that is taken in is turned away by the master.
"""

import logging
from collections import deque
from collections.abc import Callable, Set
from typing import Generic, TypeVar

from corral.workers.delivery.messages import (
    Ack,
    SenderHello,
    Session,
    ToReceiver,
    ToSender,
    TrajectoryHeader,
    Verdict,
    VerdictKind,
)
from corral.workers.streams.closing import Closing
from corral.workers.streams.codec import Message, MessageCodec, Tensors
from corral.workers.streams.errors import PeerDeadError
from corral.workers.streams.loop_thread import LoopThread
from corral.workers.streams.router import Peer, RouterEndpoint
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
Outgoing = list[tuple[bytes, ToSender]]
"""(identity of the connection, message), in order."""


class ReceiverBook(Generic[ItemT]):
    """Pure: events in, messages out."""

    def __init__(self) -> None:
        self.session: str | None = None
        self._senders: set[bytes] = set()
        self._forget_all()

    def _forget_all(self) -> None:
        self._held: deque[ItemT] = deque()
        self._identity_by_uid: dict[str, bytes] = {}
        self._verdict_by_uid: dict[str, VerdictKind] = {}

    @property
    def num_held(self) -> int:
        """Records that wait for `drain`."""
        return len(self._held)

    def start_session(self, session: str) -> Outgoing:
        """A new trainer epoch: nothing is held any more. Starting the present session again changes nothing."""
        if session == self.session:
            return []
        self.session = session
        self._forget_all()
        return [(identity, Session(session=session)) for identity in self._senders]

    def hello(self, identity: bytes) -> Outgoing:
        self._senders.add(identity)
        if self.session is None:
            return []
        # Verdicts that were given while it was away; it passes over those that are not about its own records.
        verdicts = self._verdict_by_uid.items()
        verdict_messages: list[ToSender] = [Verdict(session=self.session, uid=uid, kind=kind) for uid, kind in verdicts]
        return [(identity, message) for message in (Session(session=self.session), *verdict_messages)]

    def disconnected(self, identity: bytes) -> None:
        self._senders.discard(identity)

    def record(self, identity: bytes, uid: str, item: ItemT) -> Outgoing:
        """A record has arrived: held and acknowledged, if it is not known."""
        if self.session is None:
            return []  # it was sent in the session of a process that was here before; all comes again in the next one
        if self._verdict_by_uid.get(uid) == "again":
            self.forget({uid})
        if uid in self._verdict_by_uid:
            return [(identity, Verdict(session=self.session, uid=uid, kind=self._verdict_by_uid[uid]))]
        if uid not in self._identity_by_uid:
            self._held.append(item)
        self._identity_by_uid[uid] = identity
        return [(identity, Ack(session=self.session, uid=uid))]

    def drain(self, max_records: int) -> list[ItemT]:
        """Take out the oldest arrivals; their uids stay known."""
        return [self._held.popleft() for _ in range(min(max_records, len(self._held)))]

    def verdict(self, uid: str, kind: VerdictKind) -> Outgoing:
        """Remember the decision, and send it to the record's sender."""
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


Trajectory = tuple[TrajectoryHeader, Tensors]


class TrajectoryReceiver(Closing):
    """One data-parallel head's end of the trajectory stream; methods may be called from any thread.

    Example:
        with TrajectoryReceiver(security, address="10.0.0.7") as receiver:
            names.add(keys.trajectory_receiver(0), receiver.endpoint)
            receiver.start_session(f"{epoch}-{incarnation}")
            for header, tensors in receiver.drain(max_records=64): ...
    """

    def __init__(self, security: StreamSecurity, *, address: str) -> None:
        """Listen; nothing is taken in before `start_session`.

        Args:
            address: IP address of the interface to listen on.
        """
        self._book: ReceiverBook[Trajectory] = ReceiverBook()
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
                on_peer_gone=self._book.disconnected,
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
        """Up to so many records, in order of arrival; the tensors are read-only views."""
        return self._thread.call(lambda: self._book.drain(max_records))

    def verdict(self, uid: str, kind: VerdictKind) -> None:
        """Tell the sender that a record is not needed (any more); sending it again gets the same answer."""
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
        body = message.body
        if isinstance(body, SenderHello):
            self._send(self._book.hello(peer.identity))
            return
        held_before = self._book.num_held
        answer = self._book.record(peer.identity, body.uid, (body, message.tensors))
        if self._book.num_held > held_before:
            self._on_arrival()
        self._send(answer)

    def _send(self, outgoing: Outgoing) -> None:
        for identity, message in outgoing:
            try:
                self._router.send(identity, self._codec.encode(message, epoch=0))
            except PeerDeadError:
                logger.debug("a rollout worker is gone; it hears of it when it is back")


def _nobody() -> None:
    """The listener for arrivals until a request waits for them."""
