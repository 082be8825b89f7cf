"""Messages between ranks: whoever wants one asks for it, in any order; and whoever gets none is told whom it lacks."""

import errno
import gc
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from corral.workers.model import network
from corral.workers.model.network import HEADER, HELLO, QUESTION, Network, TransferError
from tests.workers.model.planes import DEADLINE_S


@contextmanager
def networks(number: int) -> Iterator[list[Network]]:
    """Ranks that have met, all in this process."""
    store = dist.HashStore()

    def join(rank: int) -> Network:
        return Network(store, rank=rank, world_size=number, address="127.0.0.1", timeout_s=DEADLINE_S)

    with ThreadPoolExecutor(number) as threads, ExitStack() as stack:
        yield [stack.enter_context(closing(network)) for network in threads.map(join, range(number))]


def receive(network: Network, peer: int, tag: int, *, size_bytes: int) -> bytes:
    buffer = np.zeros(size_bytes, np.uint8)
    network.ask(peer, tag=tag)
    take_in(network, buffer, peer, tag)
    return buffer.tobytes()


def take_in(network: Network, buffer: np.ndarray, peer: int, tag: int) -> None:  # type: ignore[type-arg]
    network.receive(buffer, peer=peer, tag=tag, what="four bytes", deadline=time.monotonic() + DEADLINE_S)


def test_messages_are_taken_in_any_order() -> None:
    with networks(2) as (one, other):
        for tag in range(5):
            one.send([np.full(3, tag, np.uint8)], 1, tag=tag)
        assert [receive(other, 0, tag, size_bytes=3)[0] for tag in (4, 0, 3, 1, 2)] == [4, 0, 3, 1, 2]


def test_a_large_message_that_nobody_wants_yet_stands_before_no_other() -> None:
    with networks(2) as (one, other):
        large = np.arange(2**22, dtype=np.int64)  # more than fits in any socket
        one.send([large], 1, tag=1)
        one.send([np.array([7], np.uint8)], 1, tag=2)
        assert receive(other, 0, 2, size_bytes=1) == b"\7"
        assert receive(other, 0, 1, size_bytes=large.nbytes) == large.tobytes()


def test_messages_of_one_number_keep_their_order() -> None:
    with networks(2) as (one, other):
        for value in (1, 2):
            one.send([np.array([value], np.uint8)], 1, tag=9)
        assert receive(other, 0, 9, size_bytes=1) + receive(other, 0, 9, size_bytes=1) == b"\1\2"


def test_a_message_without_bytes_is_one_too() -> None:
    with networks(2) as (one, other):
        one.send([np.empty(0, np.int64)], 1, tag=1)
        one.send([], 1, tag=2)
        assert [receive(other, 0, tag, size_bytes=0) for tag in (2, 1)] == [b"", b""]


@pytest.mark.parametrize("asks_first", [False, True])
def test_thousands_of_arrays_of_any_type_are_one_message(asks_first: bool) -> None:
    arrays: Sequence[np.ndarray] = [  # type: ignore[type-arg]
        *(np.full(number % 7, number, np.int32) for number in range(3000)),
        np.array([True, False]),
        np.arange(12, dtype=np.float64).reshape(4, 3)[:, 1:],
    ]
    expected = b"".join(array.tobytes() for array in arrays)
    with networks(2) as (one, other):
        into = np.zeros(len(expected), np.uint8)
        if asks_first:
            other.ask(0, tag=1)
            one.send(arrays, 1, tag=1)
        else:
            one.send(arrays, 1, tag=1)
            other.ask(0, tag=1)
        take_in(other, into, 0, 1)
        assert into.tobytes() == expected


def test_what_was_sent_is_held_until_it_is_taken_and_no_longer() -> None:
    with networks(2) as (one, other):
        array = np.arange(10)
        is_gone = threading.Event()
        weakref.finalize(array, is_gone.set)
        one.send([array], 1, tag=1)
        expected = array.tobytes()
        del array
        gc.collect()
        assert not is_gone.is_set()
        assert receive(other, 0, 1, size_bytes=80) == expected
        assert is_gone.wait(DEADLINE_S)


def test_a_peer_that_sends_another_size_is_named() -> None:
    with networks(2) as (one, other):
        one.send([np.zeros(4, np.uint8)], 1, tag=3)
        with pytest.raises(TransferError, match=r"from rank 0 .* message 3 has 4 bytes, and 5 were expected of 3"):
            receive(other, 0, 3, size_bytes=5)


def test_a_peer_that_leaves_is_named_at_once() -> None:
    with networks(2) as (one, other):
        other.ask(0, tag=1)
        one.close()
        with pytest.raises(TransferError, match="rank 1 did not get four bytes from rank 0 .* that rank died"):
            take_in(other, np.zeros(4, np.uint8), 0, 1)
        with pytest.raises(TransferError, match="rank 1 cannot receive from rank 0"):
            other.ask(0, tag=2)


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_said() -> None:
    with pytest.raises(TransferError, match=r"rank 0 waited 0 s for the other 1 ranks"):
        Network(dist.HashStore(), rank=0, world_size=2, address="127.0.0.1", timeout_s=0.2)


def test_a_stranger_is_turned_away_without_a_word_and_others_are_served() -> None:
    with networks(1) as (one,):
        one.send([np.frombuffer(b"values", np.uint8)], 1, tag=5)
        answers = [hear(one, secret) for secret in (bytes(16), one.secret)]
    assert answers == [b"", HEADER.pack(5, 6) + b"values"]


def hear(network: Network, secret: bytes) -> bytes:
    """What a rank answers to rank 1 that asks for message 5; nothing if it ends the connection."""
    with socket.create_connection(("127.0.0.1", network.port), DEADLINE_S) as connection:
        connection.sendall(HELLO.pack(secret, 1) + QUESTION.pack(5))
        return connection.recv(HEADER.size + 6, socket.MSG_WAITALL)


def test_strangers_who_say_nothing_are_closed_and_an_error_of_accept_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "_HELLO_TIMEOUT_S", 0.5)
    monkeypatch.setattr(network, "_MOST_UNPROVEN", 4)
    errors = [OSError(errno.EMFILE, "no descriptor"), ConnectionAbortedError(), OSError(errno.EPROTO, "of one")]
    accept = socket.socket.accept

    def accept_late(listener: socket.socket) -> tuple[socket.socket, Any]:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_late)
    with networks(2) as (one, other), ExitStack() as stack:
        address = ("127.0.0.1", one.port)
        silent = [stack.enter_context(socket.create_connection(address, DEADLINE_S)) for _ in range(12)]
        assert [connection.recv(1) for connection in silent] == [b""] * 12
        one.send([np.array([7], np.uint8)], 1, tag=1)
        assert receive(other, 0, 1, size_bytes=1) == b"\7"
    assert not errors
