"""Who gets in, who does not, and how each of them hears of it."""

import ast
import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

import corral.workers
from corral.experiments.trial import guarded_listener
from corral.experiments.trial.secrets import CurvePair, Secret, TrialSecrets
from corral.workers.delivery.receiver import TrajectoryReceiver
from corral.workers.requests.client import RankClient
from corral.workers.requests.handler import WorkerRequestStream
from corral.workers.requests.messages import ClearDataCache, OkReply
from corral.workers.streams import link as link_module
from corral.workers.streams import security as security_module
from corral.workers.streams.codec import MessageCodec
from corral.workers.streams.errors import StreamTimeoutError, WrongTrialKeyError
from corral.workers.streams.link import DealerLink
from corral.workers.streams.router import Peer, RouterEndpoint
from corral.workers.streams.rpc import RequestServer, ServerClient
from corral.workers.streams.security import StreamSecurity
from tests.workers.stream_helpers import LOOPBACK, TRIAL, Words, ask, echo, said, until, wait_up

AsRole = Callable[[str], StreamSecurity]
CODEC: MessageCodec[OkReply] = MessageCodec(OkReply, trial_uuid=TRIAL)
WORKERS_ROOT = Path(next(iter(corral.workers.__path__)))


def test_only_the_security_module_makes_sockets_and_none_pickles() -> None:
    for path in WORKERS_ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "socket":
                is_plain_socket = isinstance(node.func.value, ast.Name) and node.func.value.id == "socket"
                assert is_plain_socket or path.name == "security.py", f"{path}:{node.lineno} makes a socket of its own"
            if isinstance(node, ast.Attribute) and node.attr in ("recv_pyobj", "send_pyobj"):
                raise AssertionError(f"{path}:{node.lineno} pickles")
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"pickle", "cloudpickle", "dill"}, path


@pytest.mark.parametrize("address", ["*", "0.0.0.0", "::", ""])
def test_no_socket_listens_on_all_interfaces(as_role: AsRole, address: str) -> None:
    with pytest.raises(ValueError, match="all interfaces"), echo(as_role("model_worker"), address=address):
        pass


def test_an_address_of_another_machine_is_an_error_that_names_it(as_role: AsRole) -> None:
    with pytest.raises(OSError, match="203.0.113.1"), echo(as_role("model_worker"), address="203.0.113.1"):
        pass


def test_security_refuses_to_close_under_an_open_stream(as_role: AsRole) -> None:
    security = as_role("model_worker")
    with echo(security):
        with pytest.raises(RuntimeError, match="still open"):
            security.close()


async def connect(security: StreamSecurity, endpoint: str, *, deadline_s: float) -> None:
    link = DealerLink(
        security,
        CODEC,
        lambda: endpoint,
        server="master_worker",
        on_message=lambda message: None,
        on_up=lambda: None,
    )
    try:
        await wait_up(link, deadline_s)
    finally:
        await link.close()


def test_a_stranger_hears_within_two_seconds_that_its_key_is_wrong(
    as_role: AsRole, stranger: StreamSecurity, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        with RankClient(as_role("master_worker"), address=LOOPBACK, epoch=1) as client:
            with pytest.raises(WrongTrialKeyError, match="reads the secrets of the trial") as refused:
                await connect(stranger, client.endpoint, deadline_s=2.0)
            assert client.endpoint in str(refused.value)
            await until(lambda: "were refused so far" in caplog.text, waiting_for="the refusal in the log", timeout_s=2)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())


def test_a_link_that_was_let_in_outlasts_whoever_takes_the_port(
    as_role: AsRole, stranger: StreamSecurity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_REFUSAL_GRACE_S", 0.0)
    refusals: list[str] = []

    async def run(own: str, foreign: str) -> None:
        address = own

        def now() -> str:
            if address == foreign:
                refusals.append(address)
            return address

        link = DealerLink(
            as_role("master_worker"),
            CODEC,
            now,
            server="model_worker/0",
            on_message=lambda message: None,
            on_up=lambda: None,
            silence_s=0.1,
        )
        try:
            await wait_up(link, 10.0)
            address = foreign
            await until(lambda: len(refusals) > 4, waiting_for="refusals", timeout_s=30.0)
            address = own
            await wait_up(link, 10.0)
        finally:
            await link.close()

    with echo(as_role("model_worker")) as own, echo(stranger) as foreign:
        asyncio.run(run(own, foreign))


def test_an_unknown_key_with_the_right_server_key_is_refused_and_logged(
    as_role: AsRole, secrets_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody who has seen the public key of the server, which is no secret."""

    async def run() -> None:
        master = as_role("master_worker")
        public, secret = zmq.curve_keypair()
        own = CurvePair(public.decode(), Secret(secret.decode()))
        secrets = msgspec.structs.replace(TrialSecrets.load(secrets_directory), clients={"model_worker": own})
        with StreamSecurity(secrets, "model_worker", trial_uuid=TRIAL) as thief:
            with RankClient(master, address=LOOPBACK, epoch=1) as client:
                with pytest.raises(WrongTrialKeyError):
                    await connect(thief, client.endpoint, deadline_s=2.0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "refused a connection from 127.0.0.1 to requests#" in caplog.text
    assert "unknown key" in caplog.text


def test_a_role_that_the_socket_does_not_serve_is_refused(as_role: AsRole, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        with RankClient(as_role("master_worker"), address=LOOPBACK, epoch=1) as client:
            with pytest.raises(WrongTrialKeyError, match="does not serve this role"):
                await connect(as_role("rollout_worker"), client.endpoint, deadline_s=2.0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "this socket serves model_worker, not the role rollout_worker" in caplog.text


def test_a_client_without_a_key_is_refused(as_role: AsRole, caplog: pytest.LogCaptureFixture) -> None:
    with echo(as_role("model_worker")) as endpoint:
        context = zmq.Context()
        plain = context.socket(zmq.DEALER)
        plain.setsockopt(zmq.IMMEDIATE, 1)
        plain.connect(endpoint)
        assert plain.poll(500, zmq.POLLOUT) == 0, "an unauthenticated connection could send"
        plain.close(linger=0)
        context.term()
        assert "connections to the echo socket were refused so far" in caplog.text


def test_the_worker_stream_raises_a_wrong_key_in_the_main_thread(as_role: AsRole, stranger: StreamSecurity) -> None:
    with echo(as_role("model_worker")) as endpoint:
        with WorkerRequestStream(
            stranger,
            lambda: endpoint,
            worker_id="model_worker/0",
            incarnation="a",
            non_blocking=lambda request: OkReply(),
        ) as stream:
            with pytest.raises(WrongTrialKeyError):
                stream.next_blocking(timeout_s=2.0)


def test_nobody_listening_is_a_timeout_that_names_the_server(as_role: AsRole) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        endpoint = f"tcp://{LOOPBACK}:{taken.getsockname()[1]}"
    with pytest.raises(StreamTimeoutError, match=f"model_worker/3 at {endpoint} .*nobody listens there"):
        asyncio.run(said(endpoint, "hello", as_role("master_worker"), deadline_s=0.3))


def test_an_address_provider_that_breaks_is_an_error_and_not_a_hang(as_role: AsRole) -> None:
    async def run() -> None:
        def broken() -> str:
            raise ZeroDivisionError("oops")

        link = DealerLink(
            as_role("model_worker"),
            CODEC,
            broken,
            server="master_worker",
            on_message=lambda message: None,
            on_up=lambda: None,
        )
        with pytest.raises(Exception, match="the link to master_worker broke: ZeroDivisionError: oops"):
            await wait_up(link, 5.0)
        await link.close()

    asyncio.run(run())


def send_garbage(endpoint: str, *, count: int, seed: int) -> None:
    """Raw TCP connections that say something else than ZeroMQ, or begin like it and then do not go on."""
    rng = random.Random(seed)
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00CURVE".ljust(24, b"\0") + b"\0" * 31
    prefixes = [b"", b"GET / HTTP/1.1\r\n\r\n", greeting, greeting[:11], greeting + b"\x06" + b"\xff" * 8]
    for _ in range(count):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            try:
                connection.sendall(rng.choice(prefixes) + rng.randbytes(rng.randrange(200)))
            except (BrokenPipeError, ConnectionResetError):
                continue  # it hung up on us first, as it should


def test_servers_survive_a_thousand_connections_of_garbage(as_role: AsRole) -> None:
    worker, master = as_role("model_worker"), as_role("master_worker")
    with (
        echo(worker) as echoing,
        TrajectoryReceiver(worker, address=LOOPBACK) as receiver,
    ):
        for index, endpoint in enumerate([echoing, receiver.endpoint]):
            send_garbage(endpoint, count=350, seed=index)
        assert asyncio.run(said(echoing, "hello", master, deadline_s=10)) == "hello"
        assert receiver.drain(1) == []

        async def master_goes_on() -> None:
            with RankClient(master, address=LOOPBACK, epoch=1) as client:
                await asyncio.to_thread(send_garbage, client.endpoint, count=350, seed=2)
                with WorkerRequestStream(
                    worker,
                    lambda: client.endpoint,
                    worker_id="model_worker/0",
                    incarnation="a",
                    non_blocking=lambda request: OkReply(),
                ) as stream:
                    await client.wait_for_workers([stream.worker_id], timeout_s=120)
                    assert await ask(client, stream.worker_id, ClearDataCache(uids=[]), deadline_s=10) == OkReply()
                    await asyncio.to_thread(send_garbage, client.endpoint, count=50, seed=3)
                    assert await ask(client, stream.worker_id, ClearDataCache(uids=[]), deadline_s=10) == OkReply()

        asyncio.run(master_goes_on())


def test_a_stranger_who_floods_a_stream_loses_connections_of_his_own(
    as_role: AsRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections are taken for one stranger's here; who has sent a message keeps its own all the same."""
    monkeypatch.setattr(guarded_listener, "owner_of_other_end", lambda *_: 4711)
    monkeypatch.setattr(guarded_listener, "_MOST_UNPROVEN", 4)
    monkeypatch.setattr(security_module, "_HANDSHAKE_TIMEOUT_MS", 600_000)  # does not end them either
    peers: set[Peer] = set()

    async def answer(peer: Peer, request: Words) -> Words:
        peers.add(peer)
        return request

    def ended(connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            while connection.recv(4096):
                pass

    async def run() -> None:
        server = RequestServer(
            as_role("model_worker"), Words, answer, address=LOOPBACK, roles={"master_worker"}, purpose="echo"
        )
        client = ServerClient[Words, Words](
            as_role("master_worker"), Words, lambda: server.endpoint, server="model_worker/3"
        )
        port = int(server.endpoint.rsplit(":", 1)[1])
        async with server, client:
            assert await client.request(Words("before"), deadline_s=60) == Words("before")
            flood = [socket.create_connection((LOOPBACK, port), timeout=60) for _ in range(20)]
            for connection in flood[:16]:
                await asyncio.to_thread(ended, connection)
            assert guarded_listener.describe_refusals() == f"16 connections from strangers refused at port {port}"
            assert await client.request(Words("after"), deadline_s=60) == Words("after")
            for connection in flood:
                connection.close()
        assert len(peers) == 1, "the client did not have to connect again"

    asyncio.run(run())


def test_malformed_messages_of_a_trial_member_are_counted_and_dropped(
    as_role: AsRole, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        worker = as_role("model_worker")
        with RankClient(as_role("master_worker"), address=LOOPBACK, epoch=1) as client:
            rng = random.Random(7)
            connection = worker.connect_dealer(client.endpoint)
            for _ in range(100):
                frames = [rng.randbytes(rng.randint(1, 50)) for _ in range(rng.randint(1, 3))]
                await asyncio.to_thread(connection.socket.send_multipart, frames)
            await until(lambda: client._router.num_malformed == 100, waiting_for="100 malformed messages to be counted")
            connection.close()

    asyncio.run(run())
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1, "a line each fills disks"


def test_frames_above_the_limit_end_the_connection_and_nothing_else(as_role: AsRole) -> None:
    async def run() -> None:
        worker = as_role("model_worker")
        router = RouterEndpoint(
            as_role("master_worker"),
            CODEC,
            address=LOOPBACK,
            roles={"model_worker"},
            purpose="requests",
            on_message=lambda peer, message: None,
        )
        connection = worker.connect_dealer(router.endpoint)
        await asyncio.to_thread(connection.socket.send, bytes(70 * 2**20))
        events: list[int] = []

        def ended() -> bool:
            while connection.monitor.poll(0):
                events.append(int.from_bytes(connection.monitor.recv_multipart()[0][:2], "little"))
            return zmq.EVENT_DISCONNECTED in events or router.num_malformed > 0

        await until(ended, waiting_for="the large frame to be refused, or taken")
        assert router.num_malformed == 0
        connection.close()
        connection = worker.connect_dealer(router.endpoint)
        await asyncio.to_thread(connection.socket.send, bytes(1000))
        await until(lambda: router.num_malformed == 1, waiting_for="the small frame, which is no message")
        connection.close()
        router.close()

    asyncio.run(run())
