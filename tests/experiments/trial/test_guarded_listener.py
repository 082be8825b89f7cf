"""Strangers at a port: they lose their own connections, and who has a key loses none."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest

from corral.experiments.trial import guarded_listener
from corral.experiments.trial.guarded_listener import GuardedListener, Unproven

STRANGER = 4711
HOLDS = """
import encodings.idna, os, socket, sys
os.setgid(65534)
os.setuid(65534)
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
print("held", flush=True)
ended = 0
for connection in held:
    connection.settimeout(60)
    try:
        ended += connection.recv(1) == b""
    except ConnectionError:
        ended += 1
print(ended, flush=True)
"""


class Says(asyncio.Protocol):
    """Proves whoever says "key", and says what it hears."""

    def __init__(self, guard: GuardedListener) -> None:
        self.guard = guard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if data == b"key":
            self.guard.prove(self.transport)
        self.transport.write(data)


async def at(guard: GuardedListener, act: Callable[[int], Awaitable[None]]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    guard.listen(listener, lambda: Says(guard))
    try:
        async with asyncio.timeout(60.0):
            await act(port)
    finally:
        guard.close()


async def shown_key(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"key")
    assert await reader.read(3) == b"key"
    return reader, writer


def test_what_shows_no_key_in_time_is_closed_and_counted_and_what_shows_one_stays() -> None:
    async def act(port: int) -> None:
        reader, writer = await shown_key(port)
        _, leaving = await asyncio.open_connection("127.0.0.1", port)  # by itself, before it would be refused
        leaving.close()
        silent, silent_writer = await asyncio.open_connection("127.0.0.1", port)
        assert await silent.read() == b""
        silent_writer.close()
        writer.write(b"more")
        assert await reader.read(4) == b"more"
        writer.close()
        assert Unproven.refused[port] == 1
        assert f"1 connections from strangers refused at port {port}" in guarded_listener.describe_refusals()

    asyncio.run(at(GuardedListener(timeout_s=2.0), act))
    assert not guarded_listener.describe_refusals(), "a closed listener refuses nothing"


def test_a_stranger_who_floods_a_port_loses_connections_of_his_own(monkeypatch: pytest.MonkeyPatch) -> None:
    owners: list[int | None] = [None, *[STRANGER] * 6]
    monkeypatch.setattr(guarded_listener, "owner_of_other_end", lambda *_: owners.pop(0))
    monkeypatch.setattr(guarded_listener, "_MOST_UNPROVEN", 4)

    async def act(port: int) -> None:
        slow, slow_writer = await asyncio.open_connection("127.0.0.1", port)  # of another host, without a key yet
        flood = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        for reader, _ in flood[:3]:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        slow_writer.write(b"key")
        assert await slow.read(3) == b"key"
        for _, writer in [(slow, slow_writer), *flood]:
            writer.close()

    asyncio.run(at(GuardedListener(timeout_s=60.0), act))


def test_the_kernel_names_the_user_of_the_other_end() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel,
    ):
        accepted, other_end = listener.accept()
        with accepted:
            assert guarded_listener.owner_of_other_end(kernel, accepted, other_end) == os.getuid()
            assert guarded_listener.owner_of_other_end(kernel, accepted, ("127.0.0.9", 9)) is None
        assert client.fileno() >= 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root has other users")
def test_of_many_connections_of_another_user_only_so_many_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_listener, "_MOST_UNPROVEN", 10)

    async def act(port: int) -> None:
        stranger = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-c", HOLDS, str(port), "100", stdout=subprocess.PIPE
        )
        assert stranger.stdout is not None and await stranger.stdout.readline() == b"held\n"
        reader, writer = await shown_key(port)
        assert await stranger.stdout.readline() == b"100\n", "those that were too many at once, the others in time"
        assert await stranger.wait() == 0
        writer.write(b"still")
        assert await reader.read(5) == b"still"
        writer.close()

    asyncio.run(at(GuardedListener(timeout_s=3.0), act))


def test_an_accept_without_descriptors_left_ends_nothing() -> None:
    script = """
import asyncio, resource, socket
from corral.experiments.trial.guarded_listener import GuardedListener
from tests.experiments.trial.test_guarded_listener import at, shown_key
async def act(port):
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    lost = []
    while True:
        try:
            lost.append(open("/dev/null"))
        except OSError:
            break
    await asyncio.sleep(0.2)
    for each in (*held, *lost):
        each.close()
    await shown_key(port)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
asyncio.run(at(GuardedListener(), act))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
