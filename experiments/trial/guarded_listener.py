"""Ports whose descriptors strangers cannot use up: what connects has to show its key soon.

    GuardedListener accepts, or another library does
       └─add─► unproven ──prove, forget──► kept for as long as it lasts
                  ├── not proven within `timeout_s` ──────────────► closed
                  └── there are too many of them ─────────────────► the oldest one of the busiest peer is closed

A peer is a user of this host, if the kernel knows the owner of the other end, or else an address: who floods the port
loses connections of its own. Connections of this user and of root have the deadline, and no bound: both could do worse.
"""

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

logger = logging.getLogger(__name__)

PROOF_TIMEOUT_S = 30.0  # from the first packet to a key, on a machine that is loaded
_MOST_UNPROVEN = 4096
_DESCRIPTORS_EACH = 8  # so that all that is unproven has a quarter of the process's descriptors, where each takes two
_ACCEPTED_AT_ONCE = 64  # before the loop has another turn
_PAUSE_S = 1.0  # of accepting, where descriptors or memory are used up
_LOG_INTERVAL_S = 60.0
_SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LISTENING = 10  # linux/include/net/tcp_states.h


@dataclass(frozen=True, slots=True)
class _Connection:
    peer: int | str | None
    """A user's id, or an address; None: this user or root."""
    close: Callable[[], bool]
    timer: asyncio.TimerHandle | None


class Unproven:
    """Connections to one port on the running loop that have shown no key."""

    refused: ClassVar[Counter[int]] = Counter()
    """Connections that this process's open ports closed without a proof, by port."""

    def __init__(self, port: int, *, timeout_s: float | None) -> None:
        """timeout_s: after which a connection is closed; None for no such limit."""
        self._port = port
        self._timeout_s = timeout_s
        self._most = most_unproven()
        self._connections: dict[Any, _Connection] = {}
        """The oldest first."""
        self._of_peer = Counter[int | str]()
        self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
        self._kernel.settimeout(_PAUSE_S)
        self._warned_at = 0.0

    def add(self, key: Any, connection: socket.socket, other_end: Any, close: Callable[[], bool]) -> None:
        """A connection is there; an earlier one of the same key has ended.

        Args:
            other_end: address and port.
            close: ends it, and says whether it was still open.
        """
        self.forget(key)
        owner = owner_of_other_end(self._kernel, connection, other_end)
        peer = other_end[0] if owner is None else None if owner in (0, os.getuid()) else owner
        if peer is not None:
            if self._of_peer.total() >= self._most:
                busiest = self._of_peer.most_common(1)[0][0]
                self._refuse(next(key for key, each in self._connections.items() if each.peer == busiest))
            self._of_peer[peer] += 1
        timer = None
        if self._timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(self._timeout_s, self._refuse, key)
        self._connections[key] = _Connection(peer, close, timer)

    def forget(self, key: Any) -> _Connection | None:
        """A connection has shown a key, or has ended."""
        if (connection := self._connections.pop(key, None)) is not None:
            if connection.timer is not None:
                connection.timer.cancel()
            if connection.peer is not None:
                self._of_peer -= Counter([connection.peer])
        return connection

    def close(self) -> None:
        """Close them all; what is proven stays."""
        for key in list(self._connections):
            if (connection := self.forget(key)) is not None:
                connection.close()
        self._kernel.close()
        self.refused.pop(self._port, None)

    def _refuse(self, key: Any) -> None:
        """Close a connection, and count it unless it has ended before."""
        connection = self.forget(key)
        if connection is None or not connection.close():
            return
        self.refused[self._port] += 1
        if time.monotonic() - self._warned_at >= _LOG_INTERVAL_S:
            self._warned_at = time.monotonic()
            logger.warning("%s", describe_refusals())


class GuardedListener:
    """One listening socket on the running loop.

    Example:
        guard = GuardedListener()
        guard.listen(socket.create_server((address, 0)), protocol_factory, tls=trust.server())
        ...
        guard.prove(transport)   # of a request with the right key
        guard.close()
    """

    def __init__(self, *, timeout_s: float = PROOF_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._listener: socket.socket | None = None

    def listen(
        self, listener: socket.socket, factory: Callable[[], asyncio.BaseProtocol], *, tls: ssl.SSLContext | None = None
    ) -> None:
        """Accept from now on; `listener` is closed with this."""
        listener.setblocking(False)
        self._listener, self._factory, self._tls = listener, factory, tls
        self._port: int = listener.getsockname()[1]
        self._loop = asyncio.get_running_loop()
        self._unproven = Unproven(self._port, timeout_s=self._timeout_s)
        self._loop.add_reader(listener, self._accept)

    def prove(self, transport: asyncio.BaseTransport | None) -> None:
        """Its other end has shown a key."""
        if transport is not None:
            self._unproven.forget(transport.get_extra_info("peername"))

    def close(self) -> None:
        """Accept no more; what is proven stays."""
        if self._listener is None:
            return
        self._loop.remove_reader(self._listener)
        self._unproven.close()
        self._listener.close()
        self._listener = None

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._listener is None:
                return
            try:
                connection, other_end = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # most are of a single connection, whose other end has left
                if error.errno in _SHORTAGE:
                    logger.warning("port %d accepts nothing for %g s: %s", self._port, _PAUSE_S, error)
                    self._loop.remove_reader(self._listener)
                    self._loop.call_later(_PAUSE_S, self._accept_again)
                    return
                continue
            self._take(connection, other_end)

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _take(self, connection: socket.socket, other_end: Any) -> None:
        connection.setblocking(False)
        opening = self._loop.create_task(self._open(connection))

        def close() -> bool:
            if not opening.done():
                return opening.cancel()
            if (transport := opening.result()) is None or transport.is_closing():
                return False
            transport.abort()
            return True

        def close_unopened(opening: "asyncio.Task[asyncio.Transport | None]") -> None:
            if opening.cancelled() or opening.exception() is not None or opening.result() is None:
                connection.close()

        opening.add_done_callback(close_unopened)
        self._unproven.add(other_end, connection, other_end, close)

    async def _open(self, connection: socket.socket) -> asyncio.Transport | None:
        with suppress(OSError):  # it left, or is no client of ours
            timeout_s = self._timeout_s if self._tls is not None else None
            transport, _ = await self._loop.connect_accepted_socket(
                self._factory, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
            return transport
        return None


def most_unproven() -> int:
    """Connections without a key that a port keeps, as the limit of open files allows."""
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(_MOST_UNPROVEN, max(1, open_files // _DESCRIPTORS_EACH))


def describe_refusals() -> str:
    """The connections that this process's listeners have refused, for people; "" for none."""
    refused = list(Unproven.refused.items())  # several threads have ports
    return ", ".join(f"{number} connections from strangers refused at port {port}" for port, number in refused)


_SOCK_DIAG = 4  # linux/netlink.h
_BY_FAMILY = 20  # linux/sock_diag.h
_IS_REQUEST = 1
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_QUESTION = struct.Struct("=BBBxI2s2s16s16sI8s")  # struct inet_diag_req_v2
_ANSWER = struct.Struct("=BB62xI")  # struct inet_diag_msg, as far as the user


def owner_of_other_end(kernel: socket.socket, connection: socket.socket, other_end: Any) -> int | None:
    """The user whose process of this host has the other end of a connection; None if it is on another host.

    Args:
        kernel: a socket of NETLINK_SOCK_DIAG.
        other_end: address and port.
    """
    family = connection.family
    try:
        both = (other_end, connection.getsockname())
        ports = [end[1].to_bytes(2, "big") for end in both]
        addresses = [socket.inet_pton(family, end[0]) for end in both]
        question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 2**32 - 1, *ports, *addresses, 0, b"\xff" * 8)
        kernel.send(_HEADER.pack(_HEADER.size + len(question), _BY_FAMILY, _IS_REQUEST, 0, 0) + question)
        answer = kernel.recv(4096)
    except OSError:
        return None
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None  # there is no such socket here
    _, state, user = _ANSWER.unpack_from(answer, _HEADER.size)
    return None if state == _LISTENING else int(user)
