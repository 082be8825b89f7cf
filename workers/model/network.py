"""Messages between training ranks, apart from the group that computes: each travels when its receiver asks for it.

    send(buffers, peer, tag) ──► held ────────────┐
    ask(peer, tag) ──connects, hello──► question ─┴──► a thread for this peer ──► header, buffers
                                                       receive(into, peer, tag) ──► straight into where they stay

A rank that computes still sends. Nothing is copied together: the buffers of a transfer leave from where they lie, many
with one call of the kernel. Gloo, which would move messages as well, takes each as one piece of memory.

What is asked of one peer comes in the order of the questions, and is to be received in that order. So no order of
sends can deadlock, as long as nothing is asked for that its sender has to wait for this rank to send.
"""

import hmac
import json
import logging
import os
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from torch._C._distributed_c10d import Store  # re-exported by torch.distributed, but not for type checkers

logger = logging.getLogger(__name__)

Buffer = npt.NDArray[Any]

HELLO = struct.Struct("<16sq")
"""What a peer says first: this rank's secret, and its own rank."""
QUESTION = struct.Struct("<q")
"""The tag of what it wants."""
HEADER = struct.Struct("<qq")
"""Before the bytes that it gets: their tag, and how many there are."""
_HELLO_TIMEOUT_S = 10.0  # a peer says it with its first packet
_MOST_UNPROVEN = 512  # connections at a time that have not said the secret
_ACCEPT_PAUSE_S = 0.05  # after an error of accept
_MOST_BUFFERS = 64  # of one sendmsg: it looks at all of them, though its socket may take the first few only


class TransferError(RuntimeError):
    """A peer did not send or take its part of the plan; the trainer group cannot go on together."""


class Network:
    """The connections of one rank to all others. Any thread may send; one at a time may receive.

    What it gives away is kept until a peer asks for it; a thread for each of them sends, whatever others do.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, address: str, timeout_s: float) -> None:
        """Meet the other ranks, which do the same; connections are made when they are needed.

        Args:
            store: in which no network has met before.
            address: IP address of the interface to listen on.
            timeout_s: how long others are waited for, but for sends: those wait until the network is closed, since a
                receiver may have to end a long computation first.

        Raises:
            TransferError: if the others do not come in time.
        """
        self.rank = rank
        self.timeout_s = timeout_s
        self.secret = os.urandom(16)
        """A peer that does not say it first is not answered."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
        self.port: int = self._listener.getsockname()[1]
        self._store = store
        self._world_size = world_size
        self._num_barriers = 0
        self._connections: dict[int, socket.socket] = {}
        """To peers that were asked for something."""
        self._held: defaultdict[tuple[int, int], deque[Sequence[memoryview]]] = defaultdict(deque)  # by peer and tag
        self._changed = threading.Condition()
        self._serving: set[socket.socket] | None = set()
        """From peers that ask; None once this is closed."""
        self._unproven: dict[socket.socket, None] = {}
        """Those that have not said the secret yet, the oldest first."""
        self._start(self._accept)
        try:
            store.set(f"transfer server {rank}", json.dumps([address, self.port, self.secret.hex()]))
            self.barrier()
        except BaseException:
            self.close()
            raise

    def send(self, buffers: Sequence[Buffer], peer: int, *, tag: int) -> None:
        """Send these, one behind the other, once the peer asks for them; they must not change any more."""
        views = [np.ascontiguousarray(buffer).data.cast("B") for buffer in buffers if buffer.size]
        with self._changed:
            self._held[peer, tag].append(views)
            self._changed.notify_all()

    def ask(self, peer: int, *, tag: int) -> None:
        """Have a peer send something, which is to be received then.

        Raises:
            TransferError: if the peer is gone.
        """
        try:
            self._connection(peer).sendall(QUESTION.pack(tag))
        except OSError as error:
            raise TransferError(f"rank {self.rank} cannot receive from rank {peer}: {error}") from error

    def receive(self, buffer: Buffer, *, peer: int, tag: int, what: str, deadline: float) -> None:
        """Fill `buffer`, which has no gaps and as many bytes as are sent, with what was asked for.

        Args:
            what: for the message of the error.
            deadline: of `time.monotonic`.

        Raises:
            TransferError: if the peer is gone, or has not sent it in time.
        """
        connection, target = self._connections[peer], buffer.reshape(-1).view(np.uint8).data
        try:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            its_tag, size_bytes = HEADER.unpack(_received(connection, HEADER.size))
            if (its_tag, size_bytes) != (tag, len(target)):
                raise ConnectionError(
                    f"message {its_tag} has {size_bytes} bytes, and {len(target)} were expected of {tag}"
                )
            _receive_into(connection, target)
        except OSError as error:
            # What came next would be taken for another answer. Who asks again hears of it at once.
            connection.close()
            raise TransferError(
                f"rank {self.rank} did not get {what} from rank {peer} within {self.timeout_s:.0f} s; "
                f"that rank died, hangs, or follows another plan: {error}"
            ) from error

    def barrier(self) -> None:
        """Return once every rank has come here.

        Raises:
            TransferError: if one does not come in time.
        """
        self._num_barriers += 1
        key = f"barrier {self._num_barriers}"
        try:
            if self._store.add(f"number at {key}", 1) == self._world_size:
                self._store.set(key, "all are here")
            self._store.wait([key], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise TransferError(
                f"rank {self.rank} waited {self.timeout_s:.0f} s for the other {self._world_size - 1} ranks at a "
                f"barrier: {error}"
            ) from error

    def close(self) -> None:
        """Break all connections, also under sends that nobody has taken. May be repeated."""
        with self._changed:
            ending, self._serving = self._serving or set(), None
            self._held.clear()
            self._changed.notify_all()
        for connection in (self._listener, *ending, *self._connections.values()):
            _end(connection)

    def _connection(self, peer: int) -> socket.socket:
        if peer not in self._connections:
            address, port, secret = json.loads(self._store.get(f"transfer server {peer}"))
            self._connections[peer] = connection = socket.create_connection((address, port), self.timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(HELLO.pack(bytes.fromhex(secret), self.rank))
        return self._connections[peer]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(_HELLO_TIMEOUT_S)
            except OSError:
                if self._serving is None:
                    return
                time.sleep(_ACCEPT_PAUSE_S)  # of one connection, whose other end has left, or for want of descriptors
                continue
            with self._changed:
                if self._serving is None:
                    connection.close()
                    return
                self._serving.add(connection)
                self._unproven[connection] = None
                if len(self._unproven) > _MOST_UNPROVEN:
                    with suppress(OSError):  # its thread closes it
                        next(iter(self._unproven)).shutdown(socket.SHUT_RDWR)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        """All that one peer asks for."""
        rank: int | None = None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secret, rank = HELLO.unpack(_received(connection, HELLO.size))
            if not hmac.compare_digest(secret, self.secret):
                return
            with self._changed:
                del self._unproven[connection]
            connection.settimeout(None)
            while True:
                (tag,) = QUESTION.unpack(_received(connection, QUESTION.size))
                if (buffers := self._taken(rank, tag)) is None:
                    return
                _send(connection, [memoryview(HEADER.pack(tag, sum(map(len, buffers)))), *buffers])
                del buffers
        except ConnectionAbortedError:
            return  # it has all that it asked for
        except OSError as error:
            if self._serving is not None and rank is not None:
                logger.warning("rank %d could not send all to rank %s: %s", self.rank, rank, error)
        finally:
            with self._changed:
                self._unproven.pop(connection, None)
                if self._serving is not None:
                    self._serving.discard(connection)
            _end(connection)

    def _taken(self, peer: int, tag: int) -> Sequence[memoryview] | None:
        """Wait until something is given; None once this is closed."""
        key = (peer, tag)
        with self._changed:
            self._changed.wait_for(lambda: self._serving is None or self._held.get(key))
            if self._serving is None:
                return None
            given = self._held[key].popleft()
            if not self._held[key]:
                del self._held[key]
            return given

    def _start(self, work: Any, *arguments: socket.socket) -> None:
        threading.Thread(target=work, args=arguments, name=f"transfers of rank {self.rank}", daemon=True).start()


def _end(connection: socket.socket) -> None:
    """Close a socket, also under a thread that waits for it."""
    with suppress(OSError):  # the other end has left
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _send(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    leaving = deque(buffers)
    while leaving:
        num_bytes = connection.sendmsg(islice(leaving, _MOST_BUFFERS))
        while leaving and num_bytes >= len(leaving[0]):
            num_bytes -= len(leaving.popleft())
        if num_bytes:
            leaving[0] = leaving[0][num_bytes:]


def _received(connection: socket.socket, size: int) -> bytearray:
    received = bytearray(size)
    _receive_into(connection, memoryview(received))
    return received


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    """Until it is full.

    Raises:
        ConnectionAbortedError: if the peer has left.
    """
    while target:
        num_bytes = connection.recv_into(target)
        if not num_bytes:
            raise ConnectionAbortedError("the connection has ended")
        target = target[num_bytes:]
