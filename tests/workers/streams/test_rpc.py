"""Requests to a bound server that may restart and move; what a handler and a client remember, without sockets."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from corral.workers.streams.codec import Buffer, Message, MessageCodec
from corral.workers.streams.errors import RemoteError, StreamClosedError, StreamTimeoutError, WrongTrialKeyError
from corral.workers.streams.router import Peer
from corral.workers.streams.rpc import PendingReplies, RequestClient, RequestHandler, RequestServer, ServerClient
from corral.workers.streams.security import StreamSecurity
from tests.workers.stream_helpers import LOOPBACK, TRIAL, Cable, until

AsRole = Callable[[str], StreamSecurity]


class Add(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="add"):
    """-> Sum"""

    left: int
    right: int


class Wait(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="wait"):
    """-> Sum, once the test allows it"""


class Anything(msgspec.Struct, frozen=True, tag="anything"):
    value: object


class Sum(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sum"):
    value: int


Request = Add | Wait


class Calculator:
    """A handler that counts, and can be made to wait."""

    def __init__(self) -> None:
        self.roles: list[str] = []
        self.num_waits = 0
        self.may_answer = asyncio.Event()

    async def handle(self, peer: Peer, request: Request) -> Sum:
        self.roles.append(peer.role)
        if isinstance(request, Wait):
            self.num_waits += 1
            await self.may_answer.wait()
            return Sum(self.num_waits)
        if request.left < 0:
            raise ValueError("only natural numbers")
        return Sum(request.left + request.right)


Server = RequestServer[Request]
Client = ServerClient[Request, Sum]


def start_server(security: StreamSecurity, calculator: Calculator) -> Server:
    return RequestServer(
        security, Request, calculator.handle, address=LOOPBACK, roles={"rollout_worker"}, purpose="manager"
    )


def start_client(security: StreamSecurity, address: Callable[[], str]) -> Client:
    return ServerClient(security, Sum, address, server="gserver_manager")


def with_calculator(as_role: AsRole, test: Callable[[Client, Server, Calculator], Awaitable[None]]) -> None:
    async def run() -> None:
        calculator = Calculator()
        async with start_server(as_role("gserver_manager"), calculator) as server:
            async with start_client(as_role("rollout_worker"), lambda: server.endpoint) as client:
                await test(client, server, calculator)

    asyncio.run(run())


def test_requests_find_their_answers_while_others_wait(as_role: AsRole) -> None:
    async def run(client: Client, server: Server, calculator: Calculator) -> None:
        waiting = asyncio.create_task(client.request(Wait(), deadline_s=10))
        sums = await asyncio.gather(*(client.request(Add(index, 1), deadline_s=10) for index in range(200)))
        assert sums == [Sum(index + 1) for index in range(200)]
        assert not waiting.done()
        calculator.may_answer.set()
        assert await waiting == Sum(1)
        assert set(calculator.roles) == {"rollout_worker"}

    with_calculator(as_role, run)


def test_the_handlers_exception_arrives_with_its_traceback(as_role: AsRole) -> None:
    async def run(client: Client, server: Server, calculator: Calculator) -> None:
        with pytest.raises(
            RemoteError, match=r"gserver_manager \(Add \w+:1\) raised ValueError: only natural numbers"
        ) as raised:
            await client.request(Add(-1, 1), deadline_s=10)
        assert "in handle" in str(raised.value)

    with_calculator(as_role, run)


def test_a_missed_deadline_names_the_server_and_the_request(as_role: AsRole) -> None:
    async def run(client: Client, server: Server, calculator: Calculator) -> None:
        assert await client.request(Add(1, 1), deadline_s=10) == Sum(2)
        with pytest.raises(StreamTimeoutError, match=r"gserver_manager at tcp://.* did not answer Wait \w+:2 within"):
            await client.request(Wait(), deadline_s=0.1)

    with_calculator(as_role, run)


def test_an_unknown_address_is_named_in_the_timeout(as_role: AsRole) -> None:
    async def run() -> None:
        def unknown() -> str:
            raise LookupError("generation/manager")

        async with start_client(as_role("rollout_worker"), unknown) as client:
            with pytest.raises(StreamTimeoutError, match="gserver_manager .*not known: generation/manager"):
                await client.request(Add(1, 1), deadline_s=0.2)

    asyncio.run(run())


def test_a_request_waits_through_a_restart_of_the_server_at_another_address(as_role: AsRole) -> None:
    async def run() -> None:
        manager = as_role("gserver_manager")
        first, second = Calculator(), Calculator()
        old = start_server(manager, first)
        addresses = [old.endpoint]
        async with start_client(as_role("rollout_worker"), lambda: addresses[-1]) as client:
            assert await client.request(Add(1, 1), deadline_s=10) == Sum(2)
            waiting = asyncio.create_task(client.request(Wait(), deadline_s=20))
            await until(lambda: first.num_waits == 1, waiting_for="the request at the first server")
            await old.close()
            second.may_answer.set()
            async with start_server(manager, second) as new:
                addresses.append(new.endpoint)
                assert await waiting == Sum(1)
                assert second.num_waits == 1

    asyncio.run(run())


def test_a_reply_that_was_lost_with_the_connection_is_given_again(as_role: AsRole) -> None:
    async def run() -> None:
        calculator = Calculator()
        async with start_server(as_role("gserver_manager"), calculator) as server:
            cable = Cable(server.endpoint)
            endpoint = await cable.start()
            async with start_client(as_role("rollout_worker"), lambda: endpoint) as client:
                waiting = asyncio.create_task(client.request(Wait(), deadline_s=10))
                await until(lambda: calculator.num_waits == 1, waiting_for="the request")
                cable.cut()
                calculator.may_answer.set()  # the answer is given before the client is back
                assert await waiting == Sum(1)
                assert calculator.num_waits == 1
            await cable.stop()

    asyncio.run(run())


def test_a_wrong_key_fails_waiting_and_later_requests(as_role: AsRole, stranger: StreamSecurity) -> None:
    async def run() -> None:
        async with start_server(as_role("gserver_manager"), Calculator()) as server:
            async with start_client(stranger, lambda: server.endpoint) as client:
                for _ in range(2):
                    with pytest.raises(WrongTrialKeyError, match="gserver_manager"):
                        await client.request(Add(1, 1), deadline_s=2.0)

    asyncio.run(run())


def test_closing_the_client_fails_what_waits_on_it(as_role: AsRole) -> None:
    async def run(client: Client, server: Server, calculator: Calculator) -> None:
        waiting = asyncio.create_task(client.request(Wait(), deadline_s=100))
        await until(lambda: calculator.num_waits == 1, waiting_for="the request")
        await client.close()
        with pytest.raises(StreamClosedError):
            await waiting

    with_calculator(as_role, run)


def test_an_answer_that_cannot_travel_is_an_error_and_not_a_hang(as_role: AsRole) -> None:
    async def handle(peer: Peer, request: Wait) -> Anything:
        return Anything(object())

    async def run() -> None:
        server = RequestServer[Wait](
            as_role("gserver_manager"), Wait, handle, address=LOOPBACK, roles={"rollout_worker"}, purpose="manager"
        )
        client = ServerClient[Wait, Sum](
            as_role("rollout_worker"), Sum, lambda: server.endpoint, server="gserver_manager/0"
        )
        async with server, client:
            with pytest.raises(RemoteError, match=r"gserver_manager/0 .* raised TypeError"):
                await client.request(Wait(), deadline_s=10)

    asyncio.run(run())


def test_a_request_that_was_given_up_is_not_sent_again(as_role: AsRole) -> None:
    async def run() -> None:
        calculator = Calculator()
        async with start_server(as_role("gserver_manager"), calculator) as server:
            addresses = ["tcp://127.0.0.1:1"]
            async with start_client(as_role("rollout_worker"), lambda: addresses[-1]) as client:
                given_up = asyncio.create_task(client.request(Wait(), deadline_s=100))
                await asyncio.sleep(0)
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
                addresses.append(server.endpoint)
                assert await client.request(Add(1, 1), deadline_s=100) == Sum(2)
                assert calculator.num_waits == 0

    asyncio.run(run())


def test_the_oldest_replies_are_given_up() -> None:
    codec: MessageCodec[Any] = MessageCodec(Sum, trial_uuid=TRIAL)
    runs: list[str] = []
    replies: list[tuple[str, int]] = []

    def handle(sender: str, message: Message[Sum]) -> Sum:
        runs.append(message.request_id)
        return Sum(len(runs))

    def send(sender: str, frames: list[Buffer]) -> None:
        message = codec.decode(frames)
        replies.append((message.request_id, message.body.value))

    handler: RequestHandler[str, Sum] = RequestHandler(
        codec=codec, handle=handle, send=send, name="sums", num_cached_replies=2
    )
    for request_id in ("a", "b", "c", "c", "b", "a"):
        handler.receive("client", codec.decode(codec.encode(Sum(0), epoch=0, request_id=request_id)))
    assert runs == ["a", "b", "c", "a"]
    assert replies == [("a", 1), ("b", 2), ("c", 3), ("c", 3), ("b", 2), ("a", 4)]


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What is freed now, is freed because nobody holds it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_who_waits_for_replies_and_knows_them_does_not_keep_them() -> None:
    told: list[list[str]] = []
    sent: list[str] = []

    class Noting(RequestClient[Add, Sum]):
        def send(self, peer: str, frames: list[Buffer]) -> None:
            sent.append(peer)

    async def run() -> None:
        client = Noting(MessageCodec(Sum, trial_uuid=TRIAL), epoch=1)

        async def ask() -> weakref.ref[PendingReplies[Sum]]:
            pending = client.ask(dict.fromkeys("ab", Add(1, 1)), deadline_s=60, name="Add")
            pending.when_settled(lambda: told.append(list(pending.missing)))
            for peer in "ab":
                client.receive(peer, "1:1", Sum(2))
            assert await pending.results() == {"a": Sum(2), "b": Sum(2)}
            return weakref.ref(pending)

        kept = await ask()
        await asyncio.sleep(0)
        assert kept() is None
        client.send_again("a")

    asyncio.run(run())
    assert (told, sent) == ([[]], ["a", "b"])
