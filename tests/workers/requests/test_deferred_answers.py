"""What waits is answered once there is something to say, whatever breaks; riders are done with what carries them."""

import asyncio

import pytest

from corral.workers.requests.client import RankClient
from corral.workers.requests.handler import DeferredReply
from corral.workers.requests.messages import (
    ClearDataCache,
    Fetch,
    MetadataReply,
    NonBlockingRequest,
    OkReply,
    ReplyPayload,
    SampleMetadata,
    TrainStep,
    Written,
)
from corral.workers.streams.errors import RemoteError
from tests.workers.requests.rig import AsRole, initialize, take, train, with_master, worker
from tests.workers.stream_helpers import LOOPBACK, Cable, ask, until

NOTHING = MetadataReply.of([])


class Inbox:
    """Hands over what the test puts into it, once; a Fetch that finds nothing waits."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self.num_looks = 0
        self.is_broken = False

    def answer(self, request: NonBlockingRequest) -> ReplyPayload | DeferredReply:
        if not isinstance(request, Fetch):
            return OkReply()
        self.num_looks += 1
        if self.is_broken:
            raise OSError("the inbox is gone")
        taken, self.arrived = self.arrived, []
        return announced(*taken) if taken else DeferredReply(request.wait_s, NOTHING)


def announced(*uids: str) -> MetadataReply:
    return MetadataReply.of([SampleMetadata(uid=uid, keys=("input_ids",), num_tokens=[3]) for uid in uids])


WAITS = Fetch(max_samples=9, wait_s=100.0)


def test_a_waiting_request_is_answered_when_something_arrives_while_others_are_answered_at_once(
    as_role: AsRole,
) -> None:
    async def run(client: RankClient) -> None:
        inbox = Inbox()
        with worker(as_role("model_worker"), lambda: client.endpoint, non_blocking=inbox.answer) as stream:
            await initialize(client, stream)
            step = client.post({stream.worker_id: train()}, deadline_s=100)
            waiting = asyncio.create_task(ask(client, stream.worker_id, WAITS, deadline_s=100))
            await until(lambda: inbox.num_looks == 1, waiting_for="the first look")
            envelope = await take(stream)  # and now the main thread "computes"
            assert await ask(client, stream.worker_id, ClearDataCache(uids=[]), deadline_s=100) == OkReply()
            stream.look_again()  # there was nothing yet, after all
            await until(lambda: inbox.num_looks == 2, waiting_for="the second look")
            assert not waiting.done()
            inbox.arrived = ["0:a"]
            stream.look_again()
            assert await waiting == announced("0:a")
            await asyncio.to_thread(stream.reply, envelope, OkReply())
            await step.results()

    with_master(run, as_role("master_worker"))


def test_a_waiting_request_without_news_is_answered_when_its_time_is_over(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        inbox = Inbox()
        with worker(as_role("model_worker"), lambda: client.endpoint, non_blocking=inbox.answer) as stream:
            await initialize(client, stream)
            assert await ask(client, stream.worker_id, Fetch(max_samples=9, wait_s=0.01), deadline_s=100) == NOTHING
            inbox.arrived = ["0:a"]
            stream.look_again()
            assert await ask(client, stream.worker_id, WAITS, deadline_s=100) == announced("0:a")

    with_master(run, as_role("master_worker"))


def test_what_was_said_into_a_broken_connection_is_said_again_and_nothing_twice(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        inbox = Inbox()
        cable = Cable(client.endpoint)
        endpoint = await cable.start()
        with worker(as_role("model_worker"), lambda: endpoint, non_blocking=inbox.answer) as stream:
            await initialize(client, stream)
            waiting = asyncio.create_task(ask(client, stream.worker_id, WAITS, deadline_s=100))
            await until(lambda: inbox.num_looks == 1, waiting_for="the first look")
            cable.cut()
            inbox.arrived = ["0:a"]
            stream.look_again()  # the answer is lost, or is given while nobody is connected
            assert await waiting == announced("0:a")
            inbox.arrived = ["0:b"]
            assert await ask(client, stream.worker_id, WAITS, deadline_s=100) == announced("0:b")
        await cable.stop()

    with_master(run, as_role("master_worker"))


def test_a_waiting_request_outlives_a_break_during_which_nothing_came(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        inbox = Inbox()
        cable = Cable(client.endpoint)
        endpoint = await cable.start()
        with worker(as_role("model_worker"), lambda: endpoint, non_blocking=inbox.answer) as stream:
            await initialize(client, stream)
            waiting = asyncio.create_task(ask(client, stream.worker_id, WAITS, deadline_s=100))
            await until(lambda: inbox.num_looks == 1, waiting_for="the first look")
            cable.cut()
            await until(lambda: cable.num_connections == 2, waiting_for="the second connection")
            assert (
                await ask(client, stream.worker_id, ClearDataCache(uids=[]), deadline_s=100) == OkReply()
            )  # and the repeated Fetch
            inbox.arrived = ["0:a"]
            stream.look_again()
            assert await waiting == announced("0:a")
            assert inbox.num_looks == 2  # it waited for one answer all the time
        await cable.stop()

    with_master(run, as_role("master_worker"))


def test_a_look_that_fails_is_the_answer(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        inbox = Inbox()
        with worker(as_role("model_worker"), lambda: client.endpoint, non_blocking=inbox.answer) as stream:
            await initialize(client, stream)
            waiting = asyncio.create_task(ask(client, stream.worker_id, WAITS, deadline_s=100))
            await until(lambda: inbox.num_looks == 1, waiting_for="the first look")
            inbox.is_broken = True
            stream.look_again()
            with pytest.raises(RemoteError, match="the inbox is gone"):
                await waiting

    with_master(run, as_role("master_worker"))


def test_riders_are_done_before_what_carries_them_in_order_and_once(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        done: list[NonBlockingRequest] = []

        def answer(request: NonBlockingRequest) -> ReplyPayload:
            done.append(request)
            return OkReply()

        clears = [ClearDataCache(uids=[f"0:{number}"]) for number in range(3)]
        security = as_role("model_worker")
        with (
            worker(security, lambda: client.endpoint, non_blocking=answer) as stream,
            worker(security, lambda: client.endpoint, index=1) as other,
        ):
            await initialize(client, stream, other)
            client.attach({stream.worker_id: clears[0], "model_worker/9": clears[2]})
            client.attach({stream.worker_id: clears[1]})
            await ask(client, other.worker_id, ClearDataCache(uids=[]), deadline_s=100)
            assert done == []  # they ride with the next message to their own worker
            await ask(client, stream.worker_id, ClearDataCache(uids=[]), deadline_s=100)
            assert done == [clears[0], clears[1], ClearDataCache(uids=[])]
            client.attach({stream.worker_id: clears[2]})
            client.post({stream.worker_id: train()}, deadline_s=100)
            assert (await take(stream)).request == train()
            assert done[3:] == [clears[2]]

    with_master(run, as_role("master_worker"))


@pytest.mark.parametrize("carrier", [Written(role="actor"), train()])
def test_a_rider_that_fails_fails_what_carries_it(as_role: AsRole, carrier: Written | TrainStep) -> None:
    def answer(request: NonBlockingRequest) -> ReplyPayload:
        if isinstance(request, ClearDataCache):
            raise KeyError("0:a")
        return OkReply()

    async def run(client: RankClient) -> None:
        with worker(as_role("model_worker"), lambda: client.endpoint, non_blocking=answer) as stream:
            await initialize(client, stream)
            client.attach({stream.worker_id: ClearDataCache(uids=["0:a"])})
            failing = client.post({stream.worker_id: carrier}, deadline_s=100)
            with pytest.raises(RemoteError, match="KeyError: '0:a'"):
                await failing.results()
            client.post({stream.worker_id: train("next")}, deadline_s=100)
            assert (await take(stream)).request == train("next")

    with_master(run, as_role("master_worker"))


def test_arrivals_of_a_new_epoch_are_not_spent_on_the_old_master(as_role: AsRole) -> None:
    async def run() -> None:
        master, inbox = as_role("master_worker"), Inbox()
        with (
            RankClient(master, address=LOOPBACK, epoch=1) as old,
            RankClient(master, address=LOOPBACK, epoch=2) as new,
        ):
            addresses = [old.endpoint]
            with worker(
                as_role("model_worker"), lambda: addresses[-1], silence_s=0.2, non_blocking=inbox.answer
            ) as stream:
                await initialize(old, stream)
                old.post({stream.worker_id: WAITS}, deadline_s=100)
                await until(lambda: inbox.num_looks == 1, waiting_for="the first look")
                addresses.append(new.endpoint)
                await initialize(new, stream)
                inbox.arrived = ["0:a"]
                stream.look_again()
                assert await ask(new, stream.worker_id, WAITS, deadline_s=100) == announced("0:a")

    asyncio.run(run())
