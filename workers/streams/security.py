"""The one factory of ZeroMQ sockets: keys of a trial -> sockets that only this trial's workers can talk to.

    StreamSecurity --bind_router(address, roles)--> ServerSocket   ROUTER, CURVE server, its own ZAP domain
                   --connect_dealer(endpoint)-----> ClientSocket   DEALER, CURVE client, one connection, no silent
                   retries

Every socket of every stream comes from here (a test reads the source of all workers to prove it), because one forgotten
option is a hole or a hang: other users of the cluster reach every port, and a client with a wrong key would wait for
    ever.
"""

import itertools
import logging
import threading
import weakref
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol, Self

import zmq

from corral.workers.streams.closing import Closing
from corral.workers.streams.zap import ZAP_ENDPOINT, ZapHandler

logger = logging.getLogger(__name__)

CONTROL_MESSAGE_BYTES = 64 * 2**20 + 1024
"""Largest frame of a control socket. Without a limit, strangers fill our memory before they are authenticated."""
BULK_MESSAGE_BYTES = 2**30
"""Largest frame of a socket that carries tensors."""

_HANDSHAKE_TIMEOUT_MS = 5000
_HEARTBEAT_INTERVAL_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 3000  # a stopped process or a vanished host is a disconnect after this
_LINGER_MS = 500  # a last reply still leaves; a dead peer does not hold us up

_SERVER_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_CLIENT_EVENTS = _SERVER_EVENTS | zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED


class SecretText(Protocol):
    """A string that does not print itself, such as `experiments.secrets.Secret`."""

    def reveal(self) -> str: ...


class CurvePairLike(Protocol):
    """A CURVE key pair as the trial's secrets hold it; keys are z85 text."""

    @property
    def public(self) -> str: ...
    @property
    def secret(self) -> SecretText: ...


class TrialSecretsLike(Protocol):
    """What this module needs of `experiments.secrets.TrialSecrets`."""

    @property
    def server_public(self) -> str: ...
    @property
    def server_secret(self) -> SecretText: ...
    def client(self, role: str) -> CurvePairLike: ...
    def role_by_public_key(self) -> Mapping[bytes, str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """Keys of one process of a trial, all z85 (40 bytes). Secrets stay out of `repr`."""

    server_public: bytes
    client_public: bytes
    client_secret: bytes = field(repr=False)
    server_secret: bytes | None = field(default=None, repr=False)
    """None in a process that only connects."""
    role_by_public_key: Mapping[bytes, str] = field(default_factory=dict)
    """Every client of the trial; empty in a process that only connects."""


@dataclass(frozen=True, slots=True)
class ServerSocket:
    """A bound ROUTER. `monitor` says DISCONNECTED and HANDSHAKE_FAILED_*."""

    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    endpoint: str
    """With the real port: "tcp://10.0.0.7:45123"."""
    domain: bytes

    def close(self) -> None:
        _close_monitored(self.socket, self.monitor, linger_ms=_LINGER_MS)


@dataclass(frozen=True, slots=True)
class ClientSocket:
    """A DEALER for exactly one connection: when `monitor` says that it ended, close this and connect anew."""

    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    endpoint: str

    def close(self, *, linger_ms: int = _LINGER_MS) -> None:
        _close_monitored(self.socket, self.monitor, linger_ms=linger_ms)


class StreamSecurity(Closing):
    """Makes all ZeroMQ sockets of one process, which acts in one role of one trial.

    Example:
        with StreamSecurity.from_trial_secrets(secrets, "rollout_worker", trial_uuid=plan.trial_uuid) as security:
            client = AsyncRequestClient(security, lambda: names.get(keys.manager()), ...)

    Make it after any fork: threads and ZeroMQ contexts do not survive one. Close every stream before it.
    """

    def __init__(self, keys: CurveKeys, *, role: str, trial_uuid: str) -> None:
        """
        Args:
            keys: of this trial.
            role: whose client key `keys` holds; for messages only.
            trial_uuid: goes into every message, so that one of another trial is never taken for ours.
        """
        self.role = role
        self.trial_uuid = trial_uuid
        self._keys = keys
        self._context = zmq.Context()
        # Each connection takes three sockets, and libzmq would stop at 1,023 of them.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._sockets: weakref.WeakSet[zmq.Socket[bytes]] = weakref.WeakSet()
        self._zap: ZapHandler | None = None
        self._zap_lock = threading.Lock()
        self._serials = itertools.count()

    @classmethod
    def from_trial_secrets(cls, secrets: TrialSecretsLike, role: str, *, trial_uuid: str) -> Self:
        """The sockets of a worker that may read the trial's secrets."""
        pair = secrets.client(role)
        keys = CurveKeys(
            server_public=secrets.server_public.encode(),
            server_secret=secrets.server_secret.reveal().encode(),
            client_public=pair.public.encode(),
            client_secret=pair.secret.reveal().encode(),
            role_by_public_key=dict(secrets.role_by_public_key()),
        )
        return cls(keys, role=role, trial_uuid=trial_uuid)

    def bind_router(self, address: str, *, roles: Set[str], purpose: str, bulk: bool = False) -> ServerSocket:
        """Bind a ROUTER to a free port of one interface.

        Args:
            address: IP address of the interface.
            roles: whose keys may connect.
            purpose: what the socket is for, for log messages: "control", "trajectories".
            bulk: frames of up to 1 GiB instead of 64 MiB.

        Raises:
            ValueError: if `address` means all interfaces, or this process holds no server key.
        """
        if address in ("", "*", "0.0.0.0", "::", "[::]"):
            raise ValueError(
                f"the {purpose} socket must not listen on all interfaces (address {address!r}): "
                "give the address of the one interface that the trial's nodes share"
            )
        if self._keys.server_secret is None:
            raise ValueError(f"cannot bind the {purpose} socket: this process ({self.role}) has no server key")
        domain = f"{purpose}#{next(self._serials)}".encode()
        self._zap_handler().allow(domain, roles)
        is_ipv6 = ":" in address
        socket = self._socket(zmq.ROUTER, bulk=bulk, ipv6=is_ipv6)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a peer that is gone is an error, not silence
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.server_secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, domain)
        monitor = self._monitor(socket, _SERVER_EVENTS)
        try:
            socket.bind(f"tcp://[{address}]:*" if is_ipv6 else f"tcp://{address}:*")
        except zmq.ZMQError as error:
            _close_monitored(socket, monitor, linger_ms=0)
            raise OSError(error.errno, f"cannot bind the {purpose} socket to {address!r}: {error}") from error
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return ServerSocket(socket, monitor, endpoint.rstrip(b"\x00").decode(), domain)

    def connect_dealer(self, endpoint: str, *, bulk: bool = False) -> ClientSocket:
        """Start to connect a DEALER to "tcp://host:port".

        Raises:
            ValueError: if `endpoint` is not a TCP endpoint.
        """
        if not endpoint.startswith("tcp://"):
            raise ValueError(f"streams connect to tcp://host:port, not to {endpoint!r}")
        socket = self._socket(zmq.DEALER, bulk=bulk, ipv6="[" in endpoint)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that has not let us in
        socket.setsockopt(
            zmq.RECONNECT_IVL, -1
        )  # a new connection is a new socket: nothing is lost without our knowing
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.client_secret)
        monitor = self._monitor(socket, _CLIENT_EVENTS)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            _close_monitored(socket, monitor, linger_ms=0)
            raise ValueError(f"cannot connect to {endpoint!r}: {error}") from error
        return ClientSocket(socket, monitor, endpoint)

    def release(self, server: ServerSocket) -> None:
        """Close a server socket and forget who might connect to it."""
        server.close()
        if self._zap is not None:
            self._zap.forget(server.domain)

    def close(self) -> None:
        """End the ZAP thread and the context. Every stream must be closed before."""
        if self._context.closed:
            return
        still_open = sum(not socket.closed for socket in self._sockets)
        if still_open:
            # term() would wait for ever for the stream that somebody forgot.
            raise RuntimeError(f"{still_open} ZeroMQ sockets are still open: close every stream before its security")
        self._context.term()
        if self._zap is not None:
            self._zap.join(timeout_s=5)

    def _zap_handler(self) -> ZapHandler:
        with self._zap_lock:
            if self._zap is None:
                socket = self._context.socket(zmq.REP)
                socket.bind(ZAP_ENDPOINT)
                self._zap = ZapHandler(socket, self._keys.role_by_public_key)
            return self._zap

    def _socket(self, kind: int, *, bulk: bool, ipv6: bool) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        self._sockets.add(socket)
        socket.setsockopt(zmq.MAXMSGSIZE, BULK_MESSAGE_BYTES if bulk else CONTROL_MESSAGE_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.IPV6, ipv6)
        # What can queue up is bounded by requests and credits, and a full queue towards one slow peer would
        # stop the others.
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


def _close_monitored(socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]", *, linger_ms: int) -> None:
    # In this order: the last monitor event blocks for ever once nobody reads it.
    if not socket.closed:
        socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=linger_ms)
