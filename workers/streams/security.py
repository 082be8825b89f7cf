"""The one factory of ZeroMQ sockets: keys of a trial -> sockets that only this trial's workers can talk to.

    StreamSecurity --bind_router(address, roles)--> MonitoredSocket   ROUTER, CURVE server, its own ZAP domain
                   --connect_dealer(endpoint)-----> MonitoredSocket   DEALER, CURVE client, one connection,
                                                                      no silent retries

Every socket of every stream comes from here (a test reads the source of all workers to prove it), because one forgotten
option is a hole or a hang: other users of the cluster reach every port, and a client with a wrong key would wait
for ever.

ZAP (https://rfc.zeromq.org/spec/27/): every CURVE handshake becomes the role that its key belongs to, or a refusal.

    handshake --key, domain, address--> ZapHandler thread --200 + User-Id = role | 400--> libzmq

A domain names one server socket; `roles_by_domain` says who may connect to it. The role travels on every later message
of the connection as the `User-Id` property, so a handler knows who is speaking without asking the peer.
"""

import itertools
import logging
import threading
import weakref
from collections.abc import Mapping, Set
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from corral.experiments.trial.guarded_listener import most_unproven
from corral.experiments.trial.secrets import TrialSecrets
from corral.workers.streams.closing import Closing

logger = logging.getLogger(__name__)

CONTROL_MESSAGE_BYTES = 64 * 2**20 + 1024
"""Largest frame of a control socket. Without a limit, strangers fill our memory before they are authenticated."""
BULK_MESSAGE_BYTES = 2**30
"""Largest frame of a socket that carries tensors."""

_HANDSHAKE_TIMEOUT_MS = 5000
_HEARTBEAT_INTERVAL_S = 10.0
_HEARTBEAT_TIMEOUT_MS = 3000
_MOST_BACKLOG = 100  # libzmq's own
_LINGER_MS = 500  # a last reply still leaves; a dead peer does not hold us up

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_NUM_REQUEST_FRAMES = 7  # version, request id, domain, address, identity, mechanism, the CURVE public key

_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_SERVER_EVENTS = _ENDS | zmq.EVENT_ACCEPTED
_CLIENT_EVENTS = _ENDS | zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED


@dataclass(frozen=True, slots=True)
class MonitoredSocket:
    """A socket, and what tells of its connections.

    Of a bound ROUTER, `monitor` says ACCEPTED, DISCONNECTED and HANDSHAKE_FAILED_*. A DEALER is for exactly one
    connection: when `monitor` says that it ended, close this and connect anew.
    """

    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    endpoint: str
    """Where the socket is bound, with the real port, or connects to: "tcp://10.0.0.7:45123"."""
    domain: bytes = b""
    """Of a ROUTER: what ZAP knows it by."""

    def close(self, *, linger_ms: int = _LINGER_MS) -> None:
        # In this order: the last monitor event blocks for ever once nobody reads it.
        if not self.socket.closed:
            self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)


class ZapHandler:
    """Answers the handshakes of one ZeroMQ context, in a thread of its own that ends when the context is terminated."""

    def __init__(self, socket: "zmq.Socket[bytes]", role_by_public_key: Mapping[bytes, str]) -> None:
        """
        Args:
            socket: a REP socket bound to `ZAP_ENDPOINT`; the thread owns it from here on.
            role_by_public_key: z85 public key -> role, for every client of the trial.
        """
        self._socket = socket
        self._role_by_public_key = dict(role_by_public_key)
        self.roles_by_domain: dict[bytes, frozenset[str]] = {}
        """Whose keys may connect to which server socket; set and removed by any thread."""
        self.thread = threading.Thread(target=self._run, name="zap", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._answer(self._socket.recv_multipart())
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _answer(self, request: list[bytes]) -> None:
        role = self._role_of(request)
        request_id = request[1] if len(request) > 1 else b""
        verdict = (b"200", b"OK", role.encode()) if role is not None else (b"400", b"unknown key", b"")
        self._socket.send_multipart([_VERSION, request_id, *verdict, b""])

    def _role_of(self, request: list[bytes]) -> str | None:
        """The role of the peer, or None (and a warning) if it may not connect."""
        if len(request) != _NUM_REQUEST_FRAMES or request[0] != _VERSION or request[5] != b"CURVE":
            logger.warning("refused a handshake that does not use CURVE")
            return None
        domain, address, public_key = request[2], request[3].decode(errors="replace"), z85.encode(request[6])
        role = self._role_by_public_key.get(public_key)
        allowed = self.roles_by_domain.get(domain, frozenset())
        if role in allowed:
            return role
        why = "unknown key (another trial's?)"
        if role is not None:
            why = f"this socket serves {', '.join(sorted(allowed))}, not the role {role}"
        logger.warning("refused a connection from %s to %s: %s", address, domain.decode(errors="replace"), why)
        return None


class StreamSecurity(Closing):
    """Makes all ZeroMQ sockets of one process, which acts in one role of one trial.

    Example:
        with StreamSecurity(secrets, "rollout_worker", trial_uuid=plan.trial_uuid) as security:
            client = AsyncRequestClient(security, lambda: names.get(keys.manager()), ...)

    Make it after any fork: threads and ZeroMQ contexts do not survive one. Close every stream before it.

    A process that ends is a disconnect at once, and here it holds that one that is stopped, or whose host has vanished,
    is a disconnect too: each server asks each of its peers every `heartbeat_s`, and hangs up on one that has not
    answered three seconds later. Peers do not ask in turn. They look for a server that is silent (`DealerLink`), and a
    server of a thousand peers shall not spend more on being asked whether it is there than on its work.
    """

    def __init__(
        self, secrets: TrialSecrets, role: str, *, trial_uuid: str, heartbeat_s: float = _HEARTBEAT_INTERVAL_S
    ) -> None:
        """
        Args:
            role: whose client key this process shows.
            trial_uuid: goes into every message, so that one of another trial is never taken for ours.
            heartbeat_s: how often servers of this process ask whether a peer is still there. A second, and asking in
                turn, cost a server of a thousand peers 4 % of a core (`benchmarks/control_plane.py`): each answer has
                libzmq search the timers of all of them.
        """
        self.role = role
        self.trial_uuid = trial_uuid
        self._heartbeat_ms = round(1000 * heartbeat_s)
        self._secrets = secrets
        self._pair = secrets.clients[role]
        self._context = zmq.Context()
        # Each connection takes three sockets, and libzmq would stop at 1,023 of them.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._sockets: weakref.WeakSet[zmq.Socket[bytes]] = weakref.WeakSet()
        self._serials = itertools.count()
        zap_socket = self._context.socket(zmq.REP)
        zap_socket.bind(ZAP_ENDPOINT)
        self._zap = ZapHandler(zap_socket, secrets.role_by_public_key())

    def bind_router(self, address: str, *, roles: Set[str], purpose: str, bulk: bool = False) -> MonitoredSocket:
        """Bind a ROUTER to a free port of one interface.

        Args:
            address: IP address of the interface.
            roles: whose keys may connect.
            purpose: what the socket is for, for log messages: "control", "trajectories".
            bulk: frames of up to 1 GiB instead of 64 MiB.

        Raises:
            ValueError: if `address` means all interfaces.
        """
        if address in ("", "*", "0.0.0.0", "::", "[::]"):
            raise ValueError(
                f"the {purpose} socket must not listen on all interfaces (address {address!r}): "
                "give the address of the one interface that the trial's nodes share"
            )
        domain = f"{purpose}#{next(self._serials)}".encode()
        self._zap.roles_by_domain[domain] = frozenset(roles)
        is_ipv6 = ":" in address
        socket = self._socket(zmq.ROUTER, bulk=bulk, ipv6=is_ipv6)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a peer that is gone is an error, not silence
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secrets.server.secret.reveal().encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, domain)
        socket.setsockopt(zmq.HEARTBEAT_IVL, self._heartbeat_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        # libzmq accepts all at once, and `RouterEndpoint` ends what is too much a moment later.
        socket.setsockopt(zmq.BACKLOG, min(_MOST_BACKLOG, most_unproven() // 2))
        monitor = self._monitor(socket, _SERVER_EVENTS)
        try:
            socket.bind(f"tcp://[{address}]:*" if is_ipv6 else f"tcp://{address}:*")
        except zmq.ZMQError as error:
            MonitoredSocket(socket, monitor, address).close(linger_ms=0)
            raise OSError(error.errno, f"cannot bind the {purpose} socket to {address!r}: {error}") from error
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return MonitoredSocket(socket, monitor, endpoint.rstrip(b"\x00").decode(), domain)

    def connect_dealer(self, endpoint: str, *, bulk: bool = False) -> MonitoredSocket:
        """Start to connect a DEALER to "tcp://host:port".

        Raises:
            ValueError: if `endpoint` is not a TCP endpoint.
        """
        if not endpoint.startswith("tcp://"):
            raise ValueError(f"streams connect to tcp://host:port, not to {endpoint!r}")
        socket = self._socket(zmq.DEALER, bulk=bulk, ipv6="[" in endpoint)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that has not let us in
        # A new connection is a new socket: nothing is lost without our knowing.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._secrets.server.public.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.reveal().encode())
        client = MonitoredSocket(socket, self._monitor(socket, _CLIENT_EVENTS), endpoint)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            client.close(linger_ms=0)
            raise ValueError(f"cannot connect to {endpoint!r}: {error}") from error
        return client

    def release(self, server: MonitoredSocket) -> None:
        """Close a server socket and forget who might connect to it."""
        server.close()
        self._zap.roles_by_domain.pop(server.domain, None)

    def close(self) -> None:
        """End the ZAP thread and the context. Every stream must be closed before."""
        if self._context.closed:
            return
        still_open = sum(not socket.closed for socket in self._sockets)
        if still_open:
            # term() would wait for ever for the stream that somebody forgot.
            raise RuntimeError(f"{still_open} ZeroMQ sockets are still open: close every stream before its security")
        self._context.term()
        self._zap.thread.join(timeout=5)

    def _socket(self, kind: int, *, bulk: bool, ipv6: bool) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        self._sockets.add(socket)
        socket.setsockopt(zmq.MAXMSGSIZE, BULK_MESSAGE_BYTES if bulk else CONTROL_MESSAGE_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_TIMEOUT_MS)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.IPV6, ipv6)
        # What can queue up is bounded by requests and windows; a full queue to one slow peer would stop the others.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket

    def _monitor(self, socket: "zmq.Socket[bytes]", events: int) -> "zmq.Socket[bytes]":
        endpoint = f"inproc://monitor-{next(self._serials)}"
        socket.monitor(endpoint, events)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # the I/O thread blocks on a full monitor, and every socket with it
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(endpoint)
        return monitor
