"""Messages between the ranks of a gang, apart from the group that computes: numbered, in any order.

    send(buffers, peer, tag) ──► courier, a thread ──► held until the peer asks ──► its memory is free again
    receive(peer, tag, into) ──asks──► wait(deadline) ──► the bytes, straight into where they stay

A rank that computes still sends, and no order of sends and receives can deadlock, as long as everything is posted
before anything is waited for: the receiver asks for each message, so that none stands before one that it wants first.
Gloo, which would do the same, takes a message as one piece of memory, to which the arrays of a parcel would have to be
copied together, and many pieces cost it more than that copy.
"""

import json
import selectors
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
from torch._C._distributed_c10d import Store  # re-exported by torch.distributed, but not for type checkers

from corral.workers.model.courier import HEADER, HELLO, QUESTION, Courier

Buffer = npt.NDArray[Any]


class TransferError(RuntimeError):
    """A peer did not send or take its part of the plan; the gang cannot go on together."""


class Receiving:
    """A receive that was posted."""

    def __init__(self, network: "Network", target: memoryview, peer: int) -> None:
        self.target = target
        """Where what has not come yet goes."""
        self._network = network
        self._peer = peer

    def wait(self, what: str, *, deadline: float) -> None:
        """Return when all is there.

        Args:
            what: for the message of the error.
            deadline: of `time.monotonic`.

        Raises:
            TransferError: if the peer is gone, or has not sent it in time.
        """
        try:
            while self.target:
                self._network.take_in(self._peer, deadline=deadline)
        except OSError as error:
            raise TransferError(
                f"rank {self._network.rank} did not get {what} from rank {self._peer} within "
                f"{self._network.timeout_s:.0f} s; that rank died, hangs, or follows another plan: {error}"
            ) from error


class _Source:
    """The connection to a peer whose courier this rank asks."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.error: OSError | None = None
        """Why nothing comes any more."""
        self._expected: dict[int, list[Receiving]] = {}
        self._header = bytearray(HEADER.size)
        self._header_left = memoryview(self._header)
        self._coming: Receiving | None = None

    def ask(self, tag: int, receiving: Receiving) -> None:
        """
        Raises:
            OSError: if the peer is gone.
        """
        if self.error is not None:
            raise self.error
        if self.connection.send(QUESTION.pack(tag)) != QUESTION.size:
            raise ConnectionError("the connection is full of questions that it does not read")
        self._expected.setdefault(tag, []).append(receiving)

    def read(self) -> None:
        """Put what has come where it belongs."""
        try:
            while True:
                self._read()
        except BlockingIOError:
            return
        except OSError as error:
            self.error = error

    def _read(self) -> None:
        coming = self._coming
        num_bytes = self.connection.recv_into(self._header_left if coming is None else coming.target)
        if not num_bytes:
            raise ConnectionResetError("the connection has ended")
        if coming is not None:
            coming.target = coming.target[num_bytes:]
            if not coming.target:
                self._coming = None
            return
        self._header_left = self._header_left[num_bytes:]
        if not self._header_left:
            self._begin(*HEADER.unpack(self._header))
            self._header_left = memoryview(self._header)

    def _begin(self, tag: int, size_bytes: int) -> None:
        self._coming = self._expected[tag].pop(0)
        if not self._expected[tag]:
            del self._expected[tag]
        if size_bytes != len(self._coming.target):
            raise ConnectionError(f"message {tag} has {size_bytes} bytes, and {len(self._coming.target)} were expected")


class Network:
    """The connections of one rank to all others. Any thread may send; one at a time may receive."""

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
        self._store = store
        self._world_size = world_size
        self._num_barriers = 0
        self._sources: dict[int, _Source] = {}
        self._selector = selectors.DefaultSelector()
        self._courier = Courier(rank=rank, address=address)
        try:
            store.set(f"courier {rank}", json.dumps([address, self._courier.port, self._courier.secret.hex()]))
            self.barrier()
        except BaseException:
            self.close()
            raise

    def send(self, buffers: Sequence[Buffer], peer: int, *, tag: int) -> None:
        """Send these, one behind the other; they must not change any more. Nothing travels if they are empty."""
        if views := [np.ascontiguousarray(buffer).data.cast("B") for buffer in buffers if buffer.size]:
            self._courier.give(views, peer, tag)

    def receive(self, buffer: Buffer, peer: int, *, tag: int) -> Receiving:
        """Post a receive into `buffer`, which has no gaps and as many bytes as are sent.

        Raises:
            TransferError: if the peer is gone.
        """
        receiving = Receiving(self, buffer.data.cast("B") if buffer.size else memoryview(b""), peer)
        if buffer.size:
            try:
                self._source(peer).ask(tag, receiving)
            except OSError as error:
                raise TransferError(f"rank {self.rank} cannot receive from rank {peer}: {error}") from error
        return receiving

    def take_in(self, peer: int, *, deadline: float) -> None:
        """Wait until something has come, from whomever, and put it where it belongs.

        Raises:
            OSError: if the peer is gone, or nothing has come in time.
        """
        if (error := self._sources[peer].error) is not None:
            raise error
        ready = self._selector.select(max(0.0, deadline - time.monotonic()))
        if not ready and time.monotonic() >= deadline:
            raise TimeoutError("the deadline has passed")
        for key, _ in ready:
            source: _Source = key.data
            source.read()
            if source.error is not None:
                self._selector.unregister(source.connection)

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
        """Break all connections, also under sends that nobody has taken."""
        self._courier.close()
        for source in self._sources.values():
            source.connection.close()
        self._selector.close()

    def _source(self, peer: int) -> _Source:
        if peer not in self._sources:
            address, port, secret = json.loads(self._store.get(f"courier {peer}"))
            connection = socket.create_connection((address, port), self.timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(HELLO.pack(bytes.fromhex(secret), self.rank))
            connection.setblocking(False)
            self._sources[peer] = _Source(connection)
            self._selector.register(connection, selectors.EVENT_READ, self._sources[peer])
        return self._sources[peer]
