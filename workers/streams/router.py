"""RouterEndpoint: a bound ROUTER on an asyncio loop; messages with who sent them in, frames to a peer out.

    libzmq --frames--> SocketReader --> on_message(Peer, Message)         one call per message, never concurrently
           --events--> SocketReader --> probe every known peer --> on_peer_gone(identity)

libzmq tells a ROUTER that *some* connection ended, not whose. So each disconnect makes us send an empty probe to every
peer that has spoken: with ROUTER_MANDATORY the send fails exactly for those that are gone. Clients ignore probes.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

import zmq
from zmq.utils.monitor import parse_monitor_message

from corral.experiments.trial.guarded_listener import Unproven
from corral.workers.streams.codec import BodyT, Buffer, Message, MessageCodec
from corral.workers.streams.errors import MalformedMessageError, PeerDeadError, StreamClosedError
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)

PROBE: list[Buffer] = [b""]
"""A message without meaning; no encoded header is empty."""

# As plain numbers, and frame by frame: pyzmq's enums and multipart functions cost more than the messages of a step.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_COPIED_BYTES = 65536  # sharing a smaller frame with libzmq costs more than a copy
_BURST = 128  # messages of one socket that are handled before the loop's other tasks get their turn
# The monitor speaks before the ROUTER has let go of the connection: look again a little later.
_PROBE_DELAYS_S = (0.005, 0.02, 0.25)
_LOG_INTERVAL_S = 10.0


class Refusals:
    """What a socket turned away, counted always and logged now and then.

    Who holds a key, or only reaches a port, decides how much is turned away; a line for each would fill the disk.
    """

    def __init__(self, what: str) -> None:
        """what: such as "malformed messages to the control socket", for the log."""
        self._what = what
        self._next_line_at = float("-inf")
        self.count = 0

    def note(self, last: object) -> None:
        """One more; `last` says what it was."""
        self.count += 1
        if (now := time.monotonic()) >= self._next_line_at:
            self._next_line_at = now + _LOG_INTERVAL_S
            logger.warning("%d %s were refused so far, the last one: %s", self.count, self._what, last)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who sent a message."""

    identity: bytes
    """Of the connection; a reconnecting peer gets a new one."""
    role: str
    """Proven by its key."""


class SocketReader:
    """Calls `deliver` with every message that a socket receives, on the running asyncio loop.

    A ZeroMQ socket's file descriptor announces state changes, not messages: after it became readable, and after
    anything else was done with the socket, one must read until nothing is left.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", deliver: Callable[[list[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self._closed = False
        self._scheduled = False
        self._loop.add_reader(self._descriptor, self.read)
        self.look_again()

    def look_again(self) -> None:
        """Read later what the socket may have received while we used it otherwise, such as for sending."""
        if not (self._closed or self._scheduled):
            self._scheduled = True
            self._loop.call_soon(self.read)

    def close(self) -> None:
        """Stop reading. Call it before the socket is closed."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)

    def read(self) -> None:
        """Deliver now what was received, such as the rest before a connection ended."""
        self._scheduled = False
        for _ in range(_BURST):
            if self._closed:
                return
            try:
                frames = [self._socket.recv(_NOBLOCK, copy=False)]
                while frames[-1].more:
                    frames.append(self._socket.recv(_NOBLOCK, copy=False))
            except zmq.Again:
                return
            try:
                self._deliver(frames)
            except BaseException:
                self.look_again()  # the messages after this one must not wait for the next to arrive
                raise
        self.look_again()


def read_events(monitor: "zmq.Socket[bytes]", on_event: Callable[[int, int], None]) -> SocketReader:
    """Calls `on_event` with everything that a socket monitor tells: an event, and its number, such as a descriptor."""

    def deliver(frames: list[zmq.Frame]) -> None:
        if len(frames) == 2:
            monitored = parse_monitor_message([frame.bytes for frame in frames])
            on_event(int(monitored["event"]), monitored["value"])

    return SocketReader(monitor, deliver)


class _Strangers:
    """Connections that libzmq has accepted, by their descriptors, until a message comes: then their key was right.

    libzmq closes no connection for us, but gives one up that is shut down. Its thread may close a descriptor at any
    time, and the process may use the number again: so we shut down a copy, once its two ends say that it is the right
    one. To make a copy takes no free descriptor.
    """

    def __init__(self, endpoint: str) -> None:
        """endpoint: "tcp://10.0.0.7:45123"."""
        self._unproven = Unproven(int(endpoint.rpartition(":")[2]), timeout_s=None)  # libzmq ends slow handshakes
        self._copy = socket.socket(socket.AF_INET6 if "[" in endpoint else socket.AF_INET)
        self._nothing = socket.socket()

    def add(self, descriptor: int) -> None:
        if (ends := self._make_copy(descriptor)) is not None:
            self._unproven.add(descriptor, self._copy, ends[1], partial(self._hang_up, descriptor, ends))
        self._drop_copy()

    def forget(self, descriptor: int) -> None:
        self._unproven.forget(descriptor)

    def close(self) -> None:
        self._unproven.close()
        self._copy.close()
        self._nothing.close()

    def _hang_up(self, descriptor: int, ends: tuple[Any, Any]) -> bool:
        if is_there := self._make_copy(descriptor) == ends:
            with suppress(OSError):  # it has just ended
                self._copy.shutdown(socket.SHUT_RDWR)
        self._drop_copy()
        return is_there

    def _make_copy(self, descriptor: int) -> tuple[Any, Any] | None:
        """Of a connection; both of its ends, None if it has ended."""
        try:
            os.dup2(descriptor, self._copy.fileno(), inheritable=False)
            return self._copy.getsockname(), self._copy.getpeername()
        except OSError:
            return None

    def _drop_copy(self) -> None:
        os.dup2(self._nothing.fileno(), self._copy.fileno(), inheritable=False)


class RouterEndpoint(Generic[BodyT]):
    """One bound ROUTER. All methods belong to the loop's thread."""

    def __init__(
        self,
        security: StreamSecurity,
        codec: MessageCodec[BodyT],
        *,
        address: str,
        roles: Set[str],
        purpose: str,
        on_message: Callable[[Peer, Message[BodyT]], None],
        on_peer_gone: Callable[[bytes], None] = lambda _: None,
        bulk: bool = False,
    ) -> None:
        """
        Args:
            codec: of what peers say; what else arrives is counted and dropped.
            address: IP address of the interface to listen on; the port is chosen freely, see `endpoint`.
            roles: who may connect.
            on_message: gets every message; may raise nothing but `MalformedMessageError`, which counts as above.
            on_peer_gone: gets the identity of every peer that had sent something and is no longer connected.
        """
        self._security = security
        self._codec = codec
        self._purpose = purpose
        self._on_message = on_message
        self._on_peer_gone = on_peer_gone
        self._peer_by_identity: dict[bytes, Peer] = {}
        self._loop = asyncio.get_running_loop()
        self._probe_timer: asyncio.TimerHandle | None = None
        self._num_probes = 0
        self._closed = False
        self._refused = Refusals(f"connections to the {purpose} socket")
        self._malformed = Refusals(f"malformed messages to the {purpose} socket")
        self._server = security.bind_router(address, roles=roles, purpose=purpose, bulk=bulk)
        self.endpoint = self._server.endpoint
        """ "tcp://10.0.0.7:45123", to be published."""
        self._strangers = _Strangers(self._server.endpoint)
        self._reader = SocketReader(self._server.socket, self._deliver)
        self._monitor_reader = read_events(self._server.monitor, self._handle_event)

    @property
    def num_malformed(self) -> int:
        """Messages that were counted and dropped."""
        return self._malformed.count

    def knows(self, peer: Peer) -> bool:
        """Whether a peer that has spoken is still connected."""
        return peer.identity in self._peer_by_identity

    def send(self, identity: bytes, frames: list[Buffer]) -> None:
        """Send to a peer that has spoken before; never blocks.

        Raises:
            PeerDeadError: if it is not connected any more.
            StreamClosedError: if this endpoint is closed.
        """
        if self._closed:
            raise StreamClosedError(f"the {self._purpose} socket is closed")
        try:
            self._server.socket.send(identity, _MORE)
            for frame in frames[:-1]:
                self._server.socket.send(frame, _MORE, copy=len(frame) < _COPIED_BYTES)
            self._server.socket.send(frames[-1], _NOBLOCK, copy=len(frames[-1]) < _COPIED_BYTES)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerDeadError(f"the peer of this {self._purpose} connection is gone") from error
        finally:
            self._reader.look_again()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._reader.close()
        self._monitor_reader.close()
        self._strangers.close()
        self._security.release(self._server)

    def _deliver(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        peer = self._peer_by_identity.get(identity)
        if peer is None:  # the role is the connection's, and each connection has an identity of its own
            role = frames[-1].get("User-Id")
            assert isinstance(role, str)
            peer = self._peer_by_identity[identity] = Peer(identity, role)
            self._monitor_reader.read()  # it was accepted before
            self._strangers.forget(int(frames[-1].get(zmq.SRCFD)))
        if len(frames) < 2:
            return
        try:
            self._on_message(peer, self._codec.decode([frame.buffer for frame in frames[1:]]))
        except MalformedMessageError as error:
            self._malformed.note(f"of a {peer.role}: {error}")

    def _handle_event(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._strangers.add(descriptor)
        elif event == zmq.EVENT_DISCONNECTED:
            self._strangers.forget(descriptor)
            self._schedule_probes()
        elif event in (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH,
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        ):
            self._refused.note(f"it did not prove at {self.endpoint} to belong to this trial")

    def _schedule_probes(self) -> None:
        self._num_probes = 0  # a timer that already runs is followed by the whole series again
        if self._probe_timer is None:
            self._probe_timer = self._loop.call_later(_PROBE_DELAYS_S[0], self._probe)

    def _probe(self) -> None:
        self._probe_timer = None
        for identity in list(self._peer_by_identity):
            try:
                self.send(identity, PROBE)
            except PeerDeadError:
                del self._peer_by_identity[identity]
                self._on_peer_gone(identity)
        self._num_probes += 1
        if self._num_probes < len(_PROBE_DELAYS_S):
            self._probe_timer = self._loop.call_later(_PROBE_DELAYS_S[self._num_probes], self._probe)
