"""ZAP (https://rfc.zeromq.org/spec/27/): every CURVE handshake -> the role that its key belongs to, or a refusal.

    handshake --key, domain, address--> ZapHandler thread --200 + User-Id = role | 400--> libzmq

A domain names one server socket; `roles_by_domain` says who may connect to it. The role travels on every later message
of the connection as the `User-Id` property, so a handler knows who is speaking without asking the peer.
"""

import logging
import threading
from collections.abc import Mapping, Set

import zmq
from zmq.utils import z85

logger = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_NUM_REQUEST_FRAMES = 7  # version, request id, domain, address, identity, mechanism, the CURVE public key


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
        self._roles_by_domain: dict[bytes, frozenset[str]] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="zap", daemon=True)
        self._thread.start()

    def allow(self, domain: bytes, roles: Set[str]) -> None:
        """From now on, keys of these roles may connect to the server socket with this domain."""
        with self._lock:
            self._roles_by_domain[domain] = frozenset(roles)

    def forget(self, domain: bytes) -> None:
        """The server socket with this domain is closed."""
        with self._lock:
            self._roles_by_domain.pop(domain, None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

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
        with self._lock:
            allowed = self._roles_by_domain.get(domain, frozenset())
            if role in allowed:
                return role
        why = "unknown key (another trial's?)"
        if role is not None:
            why = f"this socket serves {', '.join(sorted(allowed))}, not the role {role}"
        logger.warning("refused a connection from %s to %s: %s", address, domain.decode(errors="replace"), why)
        return None
