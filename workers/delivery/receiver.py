"""TrajectoryReceiver: finished trajectories in, acknowledged and held until the model worker drains them.

    rollout workers --RouterEndpoint thread--> ReceiverBook --drain()--> model worker
                    <----Grant, Ack, Verdict------+

`start_session` forgets everything: the senders, who hear of it, offer again whatever no commit covers.
"""

import logging
from collections.abc import Callable, Set

from corral.workers.delivery.messages import (
    Offer,
    Record,
    SenderHello,
    ToReceiver,
    TrajectoryHeader,
    VerdictKind,
    Withdraw,
)
from corral.workers.delivery.receiver_book import Outgoing, ReceiverBook
from corral.workers.streams.closing import Closing
from corral.workers.streams.codec import Message, MessageCodec, Tensors, tensors_size_bytes
from corral.workers.streams.errors import PeerDeadError
from corral.workers.streams.loop_thread import LoopThread
from corral.workers.streams.router import Peer, RouterEndpoint
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)

Trajectory = tuple[TrajectoryHeader, Tensors]


class TrajectoryReceiver(Closing):
    """One data-parallel head's end of the trajectory stream; methods may be called from any thread.

    Example:
        with TrajectoryReceiver(security, address="10.0.0.7", capacity_records=256, capacity_bytes=2**30) as receiver:
            names.add(keys.trajectory_receiver(0), receiver.endpoint, replace=True)
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
