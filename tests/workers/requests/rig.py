"""A master and model workers of the request stream in one process, over real sockets; what a test asks of them."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from corral.workers.requests.client import RankClient
from corral.workers.requests.handler import Envelope, NonBlockingHandler, WorkerRequestStream
from corral.workers.requests.messages import (
    Fetch,
    Initialize,
    NonBlockingRequest,
    OkReply,
    ReplyPayload,
    StatsReply,
    TrainStep,
    Written,
)
from corral.workers.streams.security import StreamSecurity
from tests.workers.stream_helpers import LOOPBACK, until

AsRole = Callable[[str], StreamSecurity]
INITIALIZE = Initialize(weights={"actor": "/weights"}, states={}, step=0)


def answer(request: NonBlockingRequest) -> ReplyPayload:
    """The workers of these tests know what they have written, and cannot fetch."""
    if isinstance(request, Written):
        return StatsReply(stats={"rows": 1000})
    if isinstance(request, Fetch):
        raise LookupError("the dataset is gone")
    return OkReply()


@contextlib.contextmanager
def worker(
    security: StreamSecurity,
    address: Callable[[], str],
    *,
    index: int = 0,
    incarnation: str = "a",
    silence_s: float = 10.0,
    non_blocking: NonBlockingHandler = answer,
) -> Iterator[WorkerRequestStream]:
    with WorkerRequestStream(
        security,
        address,
        worker_id=f"model_worker/{index}",
        incarnation=incarnation,
        non_blocking=non_blocking,
        silence_s=silence_s,
    ) as stream:
        yield stream


def with_master(test: Callable[[RankClient], Awaitable[None]], security: StreamSecurity, *, epoch: int = 1) -> None:
    """Run a test on an asyncio loop with a bound master."""

    async def run() -> None:
        with RankClient(security, address=LOOPBACK, epoch=epoch, reconnect_grace_s=0.5) as client:
            await test(client)

    asyncio.run(run())


def train(mfc: str = "actor_train", version: int = 0) -> TrainStep:
    return TrainStep(mfc=mfc, uids=["0:a"], version=version)


async def take(stream: WorkerRequestStream) -> Envelope:
    """The next blocking request; fails if there is none."""
    envelope = await asyncio.to_thread(stream.next_blocking, 10.0)
    assert envelope is not None, f"{stream.worker_id} got no request"
    return envelope


async def initialize(client: RankClient, *streams: WorkerRequestStream) -> None:
    """Let the workers follow the client's epoch."""
    await client.wait_for_workers([stream.worker_id for stream in streams], timeout_s=120)
    pending = client.post({stream.worker_id: INITIALIZE for stream in streams}, deadline_s=100)
    # What an older master had queued is discarded from here on; before, it would be the next request.
    epoch = client.epoch
    await until(lambda: all(stream.max_epoch == epoch for stream in streams), waiting_for="the workers to follow")
    for stream in streams:
        envelope = await take(stream)
        await asyncio.to_thread(stream.reply, envelope, OkReply())
    await pending.results()
