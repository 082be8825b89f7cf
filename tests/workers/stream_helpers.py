"""What the stream tests share: keys of a throw-away trial, and waiting for a condition with a deadline."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from corral.experiments.trial.secrets import TrialSecrets
from corral.workers.requests.client import RankClient
from corral.workers.requests.messages import ReplyPayload, Request
from corral.workers.streams.link import DealerLink
from corral.workers.streams.loop_thread import LoopThread
from corral.workers.streams.router import Peer
from corral.workers.streams.rpc import RequestServer, ServerClient
from corral.workers.streams.security import StreamSecurity

LOOPBACK = "127.0.0.1"
TRIAL = "0123456789abcdef0123456789abcdef"
ROOT = Path(__file__).parents[2]


def security_of(directory: Path, role: str, *, heartbeat_s: float = 10.0) -> StreamSecurity:
    """Sockets of one role of the trial whose secrets are in `directory`."""
    return StreamSecurity(TrialSecrets.load(directory), role, trial_uuid=TRIAL, heartbeat_s=heartbeat_s)


def wait_until(condition: Callable[[], bool], *, waiting_for: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {waiting_for}")
        time.sleep(0.005)


async def until(condition: Callable[[], bool], *, waiting_for: str, timeout_s: float = 120.0) -> None:
    """As `wait_until`, on an asyncio loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {waiting_for}")
        await asyncio.sleep(0.005)


async def wait_up(link: DealerLink[Any], timeout_s: float) -> None:
    """Until the server has let the link in; raises why it never will."""
    try:
        await until(lambda: link.is_up or link.failure is not None, waiting_for="a connection", timeout_s=timeout_s)
    except TimeoutError as error:
        raise TimeoutError(f"no connection to {link.describe()}") from error
    link.raise_failure()


def start_stub(name: str, *arguments: object) -> "subprocess.Popen[str]":
    """A real process that runs a stub module, named by its folder."""
    command = [sys.executable, "-m", f"tests.workers.{name}", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


async def ask(client: RankClient, worker: str, request: Request, *, deadline_s: float) -> ReplyPayload:
    """One worker's answer."""
    return (await client.post({worker: request}, deadline_s=deadline_s).results())[worker]


class Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="words"):
    text: str


@contextlib.contextmanager
def echo(security: StreamSecurity, *, address: str = LOOPBACK) -> Iterator[str]:
    """The address of a server, in a thread of its own, that says to a master what the master says."""

    async def handle(peer: Peer, request: Words) -> Words:
        return request

    async def start() -> RequestServer[Words]:
        return RequestServer(security, Words, handle, address=address, roles={"master_worker"}, purpose="echo")

    thread = LoopThread("echo")
    try:
        server = thread.wait(start())
        try:
            yield server.endpoint
        finally:
            thread.wait(server.close())
    finally:
        thread.close()


async def said(endpoint: str, text: str, security: StreamSecurity, *, deadline_s: float) -> str:
    """What an `echo` answers."""
    client = ServerClient[Words, Words](security, Words, lambda: endpoint, server="model_worker/3")
    async with client:
        return (await client.request(Words(text), deadline_s=deadline_s)).text


class Cable:
    """A TCP connection to a server that can be cut."""

    def __init__(self, endpoint: str) -> None:
        self._target = ("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
        self._writers: list[asyncio.StreamWriter] = []
        self.num_connections = 0

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._carry, LOOPBACK, 0)
        return f"tcp://{LOOPBACK}:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def stop(self) -> None:
        self._server.close()
        self.cut()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, other_writer]
        self.num_connections += 1
        await asyncio.gather(self._pump(reader, other_writer), self._pump(other_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()
