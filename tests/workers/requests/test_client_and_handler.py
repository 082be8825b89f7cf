"""Master and model workers over real sockets: answers, errors, deadlines, deaths, repeats, epochs and order."""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from corral.scheduling.redistribution import Transfer
from corral.workers.requests import handler
from corral.workers.requests.client import RankClient
from corral.workers.requests.handler import WorkerRequestStream
from corral.workers.requests.messages import (
    BlockingRequest,
    ClearDataCache,
    DataTransfer,
    Fetch,
    FromWorker,
    Hello,
    Inference,
    MetadataReply,
    NonBlockingRequest,
    OkReply,
    ReplyPayload,
    SampleMetadata,
    StatsReply,
    TrainStep,
    WorkerRequest,
    Written,
)
from corral.workers.streams.codec import Buffer, MessageCodec
from corral.workers.streams.errors import (
    PeerDeadError,
    RemoteError,
    StaleEpochError,
    StreamClosedError,
    StreamTimeoutError,
)
from corral.workers.streams.loop_thread import LoopThread
from corral.workers.streams.rpc import ErrorReply
from tests.workers.requests.rig import INITIALIZE, AsRole, initialize, take, train, with_master, worker
from tests.workers.stream_helpers import LOOPBACK, TRIAL, Cable, ask, security_of, start_stub, until


def test_non_blocking_requests_are_answered_while_a_blocking_one_runs(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        with worker(as_role("model_worker"), lambda: client.endpoint) as stream:
            await initialize(client, stream)
            step = client.post({stream.worker_id: train(version=4)}, deadline_s=10)
            envelope = await take(stream)  # and now the main thread "computes"
            assert await ask(client, stream.worker_id, Written(role="actor"), deadline_s=10) == StatsReply(
                stats={"rows": 1000}
            )
            await asyncio.to_thread(stream.reply, envelope, StatsReply(stats={"loss": 0.25}))
            assert await step.results() == {stream.worker_id: StatsReply(stats={"loss": 0.25})}
            assert envelope.request == train(version=4)

    with_master(run, as_role("master_worker"))


def test_a_worker_is_let_in_however_late_its_own_thread_hears_of_the_link(
    as_role: AsRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_in = threading.Event()

    class LateLoopThread(LoopThread):
        """Its callers go on only when the master has heard from the worker."""

        def call(self, function: Callable[[], Any], *, deadline_s: float = 30.0) -> Any:
            result = super().call(function, deadline_s=deadline_s)
            is_in.wait(30)
            return result

    monkeypatch.setattr(handler, "LoopThread", LateLoopThread)

    async def run(client: RankClient) -> None:
        security = as_role("model_worker")

        def start() -> None:
            with worker(security, lambda: client.endpoint):
                pass

        started = asyncio.create_task(asyncio.to_thread(start))
        try:
            await client.wait_for_workers(["model_worker/0"], timeout_s=20)
        finally:
            is_in.set()
            await started

    with_master(run, as_role("master_worker"))


def test_all_workers_get_the_requests_that_they_share_in_the_same_order(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        security = as_role("model_worker")
        with (
            worker(security, lambda: client.endpoint) as first,
            worker(security, lambda: client.endpoint, index=1) as second,
        ):
            await initialize(client, first, second)
            orders: list[list[BlockingRequest]] = []
            both = [first.worker_id, second.worker_id]
            for version, workers in enumerate((both, both[::-1])):
                for name in ("actor_train", "critic_train"):
                    client.post(dict.fromkeys(workers, train(name, version)), deadline_s=10)
            client.post({second.worker_id: train("only the second")}, deadline_s=10)
            for stream, count in ((first, 4), (second, 5)):
                envelopes = [await take(stream) for _ in range(count)]
                orders.append([envelope.request for envelope in envelopes])
            assert orders[0] == orders[1][:4]

    with_master(run, as_role("master_worker"))


def test_a_request_that_is_refused_holds_up_none_after_it(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        with worker(as_role("model_worker"), lambda: client.endpoint) as stream:
            await client.wait_for_workers([stream.worker_id], timeout_s=120)
            early = client.post({stream.worker_id: train("too early")}, deadline_s=10)
            client.post({stream.worker_id: INITIALIZE}, deadline_s=10)
            with pytest.raises(RemoteError, match="came before an Initialize"):
                await early.results()
            assert (await take(stream)).request == INITIALIZE

    with_master(run, as_role("master_worker"))


def test_each_worker_gets_its_own_share_and_nothing_of_the_others(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        security = as_role("model_worker")
        with (
            worker(security, lambda: client.endpoint) as first,
            worker(security, lambda: client.endpoint, index=1) as second,
        ):
            await initialize(client, first, second)
            transfer = Transfer(tag=0, source=0, destinations=(1,), uids=("0:a",), keys=("rewards",))
            lacking = DataTransfer(transfers=[transfer], num_tokens={"0:a": [1]})
            shares = {
                first.worker_id: Inference(mfc="ref_inf", uids=["0:a"], offloads=True),
                second.worker_id: Inference(mfc="ref_inf", uids=["0:b"], take=lacking),
            }
            client.post(shares, deadline_s=10)
            for stream in (first, second):
                envelope = await take(stream)
                assert (envelope.epoch, envelope.request) == (1, shares[stream.worker_id])

    with_master(run, as_role("master_worker"))


def test_what_all_workers_get_alike_is_encoded_once(as_role: AsRole, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[msgspec.Struct] = []
    encode = MessageCodec.encode

    def count(codec: MessageCodec[Any], body: msgspec.Struct, **more: Any) -> list[Buffer]:
        encoded.append(body)
        return encode(codec, body, **more)

    async def run(client: RankClient) -> None:
        security = as_role("model_worker")
        with (
            worker(security, lambda: client.endpoint) as first,
            worker(security, lambda: client.endpoint, index=1) as second,
        ):
            await initialize(client, first, second)
            workers = [first.worker_id, second.worker_id]
            monkeypatch.setattr(MessageCodec, "encode", count)
            client.post(dict.fromkeys(workers, train("same")), deadline_s=10)
            client.post({name: train(name) for name in workers}, deadline_s=10)
            requests = [body.request for body in encoded if isinstance(body, WorkerRequest)]
            assert requests == [train("same"), *map(train, workers)]

    with_master(run, as_role("master_worker"))


def test_metadata_travels_typed(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        with worker(as_role("model_worker"), lambda: client.endpoint) as stream:
            await initialize(client, stream)
            request = Inference(mfc="ref_inf", uids=["0:a"])
            pending = client.post({stream.worker_id: request}, deadline_s=10)
            envelope = await take(stream)
            assert envelope.request == request
            reply = MetadataReply.of([SampleMetadata(uid="0:a", keys=("ref_logprobs",), num_tokens=[7], order=3)])
            await asyncio.to_thread(stream.reply, envelope, reply)
            assert (await pending.results())[stream.worker_id] == reply

    with_master(run, as_role("master_worker"))


def test_a_remote_exception_comes_with_its_traceback(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        with worker(as_role("model_worker"), lambda: client.endpoint) as stream:
            await client.wait_for_workers([stream.worker_id], timeout_s=120)
            with pytest.raises(RemoteError, match="model_worker/0.*LookupError: the dataset is gone") as raised:
                await ask(client, stream.worker_id, Fetch(max_samples=1, wait_s=0.0), deadline_s=10)
            assert 'raise LookupError("the dataset is gone")' in str(raised.value)
            assert await ask(client, stream.worker_id, ClearDataCache(uids=[]), deadline_s=10) == OkReply()

    with_master(run, as_role("master_worker"))


def test_a_missed_deadline_names_worker_and_request(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        with worker(as_role("model_worker"), lambda: client.endpoint) as stream:
            await initialize(client, stream)
            with pytest.raises(StreamTimeoutError, match=r"model_worker/0 did not answer TrainStep 1:\d+ within 0.1 s"):
                await ask(client, stream.worker_id, train(), deadline_s=0.1)
            assert await ask(client, stream.worker_id, ClearDataCache(uids=[]), deadline_s=10) == OkReply()

    with_master(run, as_role("master_worker"))


def test_a_reply_after_the_deadline_is_dropped(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        with worker(as_role("model_worker"), lambda: client.endpoint) as stream:
            await initialize(client, stream)
            pending = client.post({stream.worker_id: train()}, deadline_s=0.2)
            envelope = await take(stream)
            with pytest.raises(StreamTimeoutError):
                await pending.results()
            await asyncio.to_thread(stream.reply, envelope, OkReply())
            assert await ask(client, stream.worker_id, Written(role="actor"), deadline_s=100) == StatsReply(
                stats={"rows": 1000}
            )  # it came
            with pytest.raises(StreamTimeoutError):
                await pending.results()

    with_master(run, as_role("master_worker"))


def test_workers_that_do_not_come_are_named(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        with worker(as_role("model_worker"), lambda: client.endpoint) as stream:
            await client.wait_for_workers([stream.worker_id], timeout_s=120)
            with pytest.raises(
                StreamTimeoutError, match=r"^model_worker/7 did not connect .* \(1 of 2 workers are here\)"
            ):
                await client.wait_for_workers([stream.worker_id, "model_worker/7"], timeout_s=0.1)

    with_master(run, as_role("master_worker"))


def test_a_request_to_somebody_who_never_came_is_an_error_at_once(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        with pytest.raises(PeerDeadError, match="model_worker/7 got ClearDataCache 1:1 but has not said hello"):
            await ask(client, "model_worker/7", ClearDataCache(uids=[]), deadline_s=100)

    with_master(run, as_role("master_worker"))


@pytest.fixture
def worker_process(secrets_directory: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []

    def start(endpoint: str) -> "subprocess.Popen[str]":
        processes.append(start_stub("requests.stub_model_worker", secrets_directory, endpoint, "model_worker/0"))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("fatal_signal", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_worker_is_an_error_for_whoever_waits_for_it(
    secrets_directory: Path, worker_process: Callable[[str], "subprocess.Popen[str]"], fatal_signal: signal.Signals
) -> None:
    async def run() -> None:
        dead: list[str] = []
        with (
            security_of(secrets_directory, "master_worker", heartbeat_s=0.5) as security,
            RankClient(
                security, address=LOOPBACK, epoch=1, reconnect_grace_s=0.5, on_worker_dead=dead.append
            ) as client,
        ):
            process = worker_process(client.endpoint)
            await client.wait_for_workers(["model_worker/0"], timeout_s=120)
            client.post({"model_worker/0": INITIALIZE}, deadline_s=100)
            pending = client.post({"model_worker/0": train("never")}, deadline_s=100)
            os.kill(process.pid, fatal_signal)
            with pytest.raises(
                PeerDeadError, match=rf"model_worker/0 \(pid {process.pid}\) died before it answered TrainStep"
            ):
                await pending.results()
            with pytest.raises(PeerDeadError):
                await ask(client, "model_worker/0", ClearDataCache(uids=[]), deadline_s=100)
            assert dead == ["model_worker/0"]
            assert client.hello_of("model_worker/0") is None

    asyncio.run(run())


def test_a_stranger_to_the_plan_is_not_welcomed_and_its_end_is_nobodys_death(as_role: AsRole) -> None:
    """It holds a key of the trial all the same."""

    async def run() -> None:
        dead: list[str] = []
        with RankClient(
            as_role("master_worker"),
            address=LOOPBACK,
            epoch=1,
            workers={"model_worker/0"},
            reconnect_grace_s=0.0,
            on_worker_dead=dead.append,
        ) as client:
            security = as_role("model_worker")
            with worker(security, lambda: client.endpoint) as member:
                with worker(security, lambda: client.endpoint, index=7):
                    await until(lambda: client._router.num_malformed > 0, waiting_for="the stranger's hello")
                await initialize(client, member)
                assert client.hello_of("model_worker/7") is None
            await until(lambda: dead != [], waiting_for="the member's end")
            assert dead == ["model_worker/0"]

    asyncio.run(run())


def test_a_restarted_worker_fails_what_its_predecessor_had_not_answered(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        security = as_role("model_worker")
        with worker(security, lambda: client.endpoint, incarnation="first") as first:
            await initialize(client, first)
            pending = client.post({first.worker_id: train()}, deadline_s=100)
            with worker(security, lambda: client.endpoint, incarnation="second") as second:
                with pytest.raises(PeerDeadError, match="TrainStep"):
                    await pending.results()
                await client.wait_for_workers([second.worker_id], timeout_s=120)
                hello = client.hello_of(second.worker_id)
                assert hello is not None and hello.incarnation == "second"

    with_master(run, as_role("master_worker"))


def test_the_end_of_a_predecessors_connection_is_not_taken_for_its_successors(as_role: AsRole) -> None:
    dead: list[str] = []

    async def run() -> None:
        security = as_role("model_worker")
        with (
            RankClient(
                as_role("master_worker"), address=LOOPBACK, epoch=1, reconnect_grace_s=0.0, on_worker_dead=dead.append
            ) as client,
            contextlib.ExitStack() as predecessor,
        ):
            await initialize(
                client, predecessor.enter_context(worker(security, lambda: client.endpoint, incarnation="first"))
            )
            with worker(security, lambda: client.endpoint, incarnation="second") as second:
                await until(lambda: dead == ["model_worker/0"], waiting_for="the successor")
                predecessor.close()
                with worker(security, lambda: client.endpoint, index=1) as other:
                    await client.wait_for_workers([other.worker_id], timeout_s=120)
                # Who is gone is found out in the order in which they came.
                await until(lambda: "model_worker/1" in dead, waiting_for="the end of another worker")
                await initialize(client, second)
                assert dead == ["model_worker/0", "model_worker/1"]

    asyncio.run(run())


def test_a_request_survives_a_broken_connection_and_is_run_once(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        cable = Cable(client.endpoint)
        endpoint = await cable.start()
        with worker(as_role("model_worker"), lambda: endpoint) as stream:
            await initialize(client, stream)
            pending = client.post({stream.worker_id: train()}, deadline_s=20)
            envelope = await take(stream)
            cable.cut()  # the reply is lost, or is given while nobody is connected
            await asyncio.to_thread(stream.reply, envelope, StatsReply(stats={"loss": 1.0}))
            assert await pending.results() == {stream.worker_id: StatsReply(stats={"loss": 1.0})}
            assert cable.num_connections == 2
            assert await asyncio.to_thread(stream.next_blocking, 0.05) is None
        await cable.stop()

    with_master(run, as_role("master_worker"))


def test_requests_posted_while_the_connection_is_broken_arrive_in_order(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        cable = Cable(client.endpoint)
        endpoint = await cable.start()
        with worker(as_role("model_worker"), lambda: endpoint) as stream:
            await initialize(client, stream)
            cable.cut()
            client.post({stream.worker_id: train("a")}, deadline_s=20)
            client.post({stream.worker_id: train("b")}, deadline_s=20)
            assert [(await take(stream)).request for _ in range(2)] == [train("a"), train("b")]
        await cable.stop()

    with_master(run, as_role("master_worker"))


def test_a_repeated_request_gets_the_same_reply_without_being_run_again(as_role: AsRole) -> None:
    """A client below the master's: it repeats on purpose what the master repeats only after a reconnect."""

    async def run() -> None:
        calls: list[NonBlockingRequest] = []

        def count(request: NonBlockingRequest) -> ReplyPayload:
            calls.append(request)
            return StatsReply(stats={"calls": len(calls)})

        codec: MessageCodec[FromWorker] = MessageCodec(FromWorker, trial_uuid=TRIAL)
        server = as_role("master_worker").bind_router(LOOPBACK, roles={"model_worker"}, purpose="requests")
        with WorkerRequestStream(
            as_role("model_worker"),
            lambda: server.endpoint,
            worker_id="model_worker/0",
            incarnation="a",
            non_blocking=count,
        ):
            identity, *frames = await asyncio.to_thread(server.socket.recv_multipart)
            assert isinstance(codec.decode(frames).body, Hello)
            request = codec.encode(
                WorkerRequest(request=Written(role="actor")), epoch=1, request_id="1:1", deadline_s=10
            )
            replies = []
            for _ in range(3):
                server.socket.send_multipart([identity, *request])
                replies.append(await asyncio.to_thread(server.socket.recv_multipart))
            assert [codec.decode(reply[1:]).body for reply in replies] == [StatsReply(stats={"calls": 1})] * 3
            assert calls == [Written(role="actor")]
        server.close()

    asyncio.run(run())


def test_a_request_that_comes_after_a_later_one_is_refused(as_role: AsRole) -> None:
    """However messages are mixed up: workers that run what they share in different orders wait for each other."""

    async def run() -> None:
        codec: MessageCodec[FromWorker] = MessageCodec(FromWorker, trial_uuid=TRIAL)
        server = as_role("master_worker").bind_router(LOOPBACK, roles={"model_worker"}, purpose="requests")
        with worker(as_role("model_worker"), lambda: server.endpoint) as stream:
            identity, *_ = await asyncio.to_thread(server.socket.recv_multipart)
            for number, request in ((1, INITIALIZE), (3, train("later")), (2, train("earlier"))):
                frames = codec.encode(WorkerRequest(request=request), epoch=1, request_id=f"1:{number}", deadline_s=10)
                server.socket.send_multipart([identity, *frames])
            message = codec.decode((await asyncio.to_thread(server.socket.recv_multipart))[1:])
            assert isinstance(message.body, ErrorReply) and message.request_id == "1:2"
            assert message.body.message.startswith("TrainStep 1:2 came after 1:3")
            assert [(await take(stream)).request for _ in range(2)] == [INITIALIZE, train("later")]
            assert stream.next_blocking(timeout_s=0) is None
        server.close()

    asyncio.run(run())


def test_a_worker_finds_a_new_master_and_refuses_the_old_one(as_role: AsRole) -> None:
    async def run() -> None:
        master = as_role("master_worker")
        with (
            RankClient(master, address=LOOPBACK, epoch=1) as old,
            RankClient(master, address=LOOPBACK, epoch=2) as new,
        ):
            addresses = [old.endpoint]
            with worker(as_role("model_worker"), lambda: addresses[-1], silence_s=0.2) as stream:
                await initialize(old, stream)
                addresses.append(new.endpoint)  # the old one is still there, but silent
                await initialize(new, stream)
                assert stream.max_epoch == 2
                addresses.append(old.endpoint)
                await until(lambda: old.hello_of(stream.worker_id) is not None, waiting_for="the worker to come back")
                with pytest.raises(StaleEpochError, match="already follows epoch 2"):
                    await ask(old, stream.worker_id, ClearDataCache(uids=[]), deadline_s=10)

    asyncio.run(run())


def test_a_new_epoch_discards_what_the_old_master_had_queued(as_role: AsRole) -> None:
    async def run() -> None:
        master = as_role("master_worker")
        with (
            RankClient(master, address=LOOPBACK, epoch=1) as old,
            RankClient(master, address=LOOPBACK, epoch=2) as new,
        ):
            addresses = [old.endpoint]
            with worker(as_role("model_worker"), lambda: addresses[-1], silence_s=0.2) as stream:
                await initialize(old, stream)
                old.post({stream.worker_id: train("of the old master")}, deadline_s=100)
                await ask(old, stream.worker_id, ClearDataCache(uids=[]), deadline_s=100)  # it is there, too
                addresses.append(new.endpoint)
                await initialize(new, stream)  # takes the next request, which must be the new master's
                new.post({stream.worker_id: train("new")}, deadline_s=100)
                assert (await take(stream)).request == train("new")

    asyncio.run(run())


def test_only_initialize_raises_the_epoch(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        with worker(as_role("model_worker"), lambda: client.endpoint) as stream:
            await client.wait_for_workers([stream.worker_id], timeout_s=120)
            assert await ask(client, stream.worker_id, ClearDataCache(uids=[]), deadline_s=10) == OkReply()
            with pytest.raises(RemoteError, match="TrainStep 5:2 came before an Initialize"):
                await ask(client, stream.worker_id, train(), deadline_s=10)
            assert stream.max_epoch == 0
            await initialize(client, stream)
            assert stream.max_epoch == 5

    with_master(run, as_role("master_worker"), epoch=5)


def test_closing_the_master_fails_its_waiting_calls(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        with worker(as_role("model_worker"), lambda: client.endpoint) as stream:
            await initialize(client, stream)
            pending = client.post({stream.worker_id: train()}, deadline_s=100)
            client.close()
            with pytest.raises(StreamClosedError):
                await pending.results()

    with_master(run, as_role("master_worker"))


def test_many_calls_at_once_find_their_own_answers(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        security = as_role("model_worker")
        with contextlib.ExitStack() as stack:
            streams = [
                stack.enter_context(worker(security, lambda: client.endpoint, index=index)) for index in range(4)
            ]
            await initialize(client, *streams)

            def serve(stream: WorkerRequestStream) -> None:
                for _ in range(50):
                    envelope = stream.next_blocking(timeout_s=120)
                    assert envelope is not None and isinstance(envelope.request, TrainStep)
                    stream.reply(envelope, StatsReply(stats={"version": float(envelope.request.version)}))

            threads = [threading.Thread(target=serve, args=(stream,)) for stream in streams]
            for thread in threads:
                thread.start()
            pending = [
                client.post(
                    dict.fromkeys([stream.worker_id for stream in streams], train(version=index)), deadline_s=20
                )
                for index in range(50)
            ]
            for index, replies in enumerate(pending):
                for payload in (await replies.results()).values():
                    assert payload == StatsReply(stats={"version": float(index)})
            for thread in threads:
                await asyncio.to_thread(thread.join, 10)

    with_master(run, as_role("master_worker"))
