"""What a rank gives away, kept until a peer asks for it: one thread serves all peers, whatever the others do.

    give(buffers, peer, tag) ──► held ───────────────┐
    peer ──connects──► hello ──► asks for a tag ─────┴──► header, buffers ──► peer

Nothing is copied together: the buffers of a parcel travel from where they lie, many with one call of the kernel. A peer
that asks is taking, so that what travels never waits in its socket for something else to be taken first.
"""

import hmac
import logging
import os
import queue
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

logger = logging.getLogger(__name__)

HELLO = struct.Struct("<16sq")
"""What a peer says first: the courier's secret, and its own rank."""
QUESTION = struct.Struct("<q")
"""The tag of what it wants."""
HEADER = struct.Struct("<qq")
"""Before the bytes that it gets: their tag, and how many there are."""
_MOST_BUFFERS = 64  # of one sendmsg: it looks at all of them, though its socket may take the first few only
_MOST_QUESTION_BYTES = 4096  # read at once


@dataclass(frozen=True, slots=True)
class _Given:
    buffers: Sequence[memoryview]
    peer: int
    tag: int


@dataclass(slots=True, eq=False)
class _Asker:
    """A connection that a peer has opened."""

    socket: socket.socket
    rank: int | None = None
    """Whose it is; None until it has said so."""
    heard: bytearray = field(default_factory=bytearray)
    """What it has said and was not understood yet."""
    leaving: deque[memoryview] = field(default_factory=deque)
    """What it has asked for and was not sent yet."""
    waits_for_room: bool = False
    """Whether something is leaving that its socket did not take."""

    def has_sent(self, num_bytes: int) -> None:
        """These bytes have left; their memory is held no longer."""
        while self.leaving and num_bytes >= len(self.leaving[0]):
            num_bytes -= len(self.leaving.popleft())
        if num_bytes:
            self.leaving[0] = self.leaving[0][num_bytes:]


class Courier:
    """Listens, and sends what was given to whoever it was given for. `give` may be called in any thread."""

    def __init__(self, *, rank: int, address: str) -> None:
        """
        Args:
            address: IP address of the interface to listen on.
        """
        self._rank = rank
        self.secret = os.urandom(16)
        """Whoever does not say it first is not answered."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._given: queue.SimpleQueue[_Given | None] = queue.SimpleQueue()
        self._is_closed = False
        # The rest is the thread's own.
        self._held: dict[tuple[int, int], deque[_Given]] = {}  # by peer and tag
        self._asked: dict[tuple[int, int], deque[_Asker]] = {}
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name=f"courier of rank {rank}", daemon=True)
        self._thread.start()

    def give(self, buffers: Sequence[memoryview], peer: int, tag: int) -> None:
        """Send these bytes to the peer once it asks for them; they must not change any more."""
        self._given.put(_Given(buffers, peer, tag))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread and all connections; what nobody has asked for is not sent any more. May be repeated."""
        if not self._is_closed:
            self._is_closed = True
            self._given.put(None)
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)

    def _serve(self) -> None:
        with self._selector, self._listener:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._wake, selectors.EVENT_READ)
            try:
                while self._serve_once():
                    pass
            finally:
                for key in list(self._selector.get_map().values()):
                    if isinstance(key.data, _Asker):
                        key.data.socket.close()

    def _serve_once(self) -> bool:
        """Wait for something to do and do it; False at the end."""
        for key, events in self._selector.select():
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj == self._wake:
                if not self._take_over():
                    return False
            else:
                self._attend(key.data, events)
        return True

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has gone again
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection, selectors.EVENT_READ, _Asker(connection))

    def _take_over(self) -> bool:
        """Hold what was given, or send it to a peer that has asked already; False at the end."""
        os.eventfd_read(self._wake)
        while not self._given.empty():
            given = self._given.get()
            if given is None:
                return False
            key = (given.peer, given.tag)
            if askers := self._asked.get(key):
                asker = askers.popleft()
                if not askers:
                    del self._asked[key]
                self._answer(asker, given)
            else:
                self._held.setdefault(key, deque()).append(given)
        return True

    def _attend(self, asker: _Asker, events: int) -> None:
        """Hear what a peer asks, and send what it takes at present."""
        if events & selectors.EVENT_WRITE:
            self._send(asker)
        if events & selectors.EVENT_READ:
            try:
                self._hear(asker)
            except BlockingIOError:
                return
            except (OSError, ValueError) as error:
                if asker.leaving:
                    logger.warning("rank %d could not send all to rank %s: %s", self._rank, asker.rank, error)
                self._forget(asker)

    def _hear(self, asker: _Asker) -> None:
        """
        Raises:
            OSError: if the connection has ended.
            ValueError: if it is a stranger's.
        """
        heard = asker.socket.recv(_MOST_QUESTION_BYTES)
        if not heard:
            raise ConnectionResetError("it has closed the connection")
        asker.heard += heard
        if asker.rank is None:
            if len(asker.heard) < HELLO.size:
                return
            secret, rank = HELLO.unpack_from(asker.heard)
            if not hmac.compare_digest(secret, self.secret):
                raise ValueError("a stranger has connected")
            asker.rank = rank
            del asker.heard[: HELLO.size]
        whole = len(asker.heard) // QUESTION.size * QUESTION.size
        for (tag,) in QUESTION.iter_unpack(bytes(asker.heard[:whole])):
            self._ask(asker, asker.rank, tag)
        del asker.heard[:whole]

    def _ask(self, asker: _Asker, rank: int, tag: int) -> None:
        if held := self._held.get((rank, tag)):
            given = held.popleft()
            if not held:
                del self._held[rank, tag]
            self._answer(asker, given)
        else:
            self._asked.setdefault((rank, tag), deque()).append(asker)

    def _answer(self, asker: _Asker, given: _Given) -> None:
        asker.leaving.append(memoryview(HEADER.pack(given.tag, sum(map(len, given.buffers)))))
        asker.leaving.extend(given.buffers)
        self._send(asker)

    def _send(self, asker: _Asker) -> None:
        """Send as much as the socket takes, and the rest once it takes more."""
        try:
            asker.has_sent(asker.socket.sendmsg(islice(asker.leaving, _MOST_BUFFERS)))
        except BlockingIOError:
            pass
        except OSError as error:  # it is heard of its end next
            logger.warning("rank %d could not send all to rank %s: %s", self._rank, asker.rank, error)
            asker.leaving.clear()
        if bool(asker.leaving) != asker.waits_for_room:
            asker.waits_for_room = bool(asker.leaving)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if asker.waits_for_room else 0)
            self._selector.modify(asker.socket, events, asker)

    def _forget(self, asker: _Asker) -> None:
        """Give up a connection; what it has asked for is held for the next one that asks."""
        self._asked = {
            key: deque(others)
            for key, askers in self._asked.items()
            if (others := [other for other in askers if other is not asker])
        }
        self._selector.unregister(asker.socket)
        asker.socket.close()
