"""The master hears of arrivals when there are some; it asks each rank once, and again only when it has answered."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.policy_version import PolicyVersion
from corral.workers.master.sample_source import buffered
from corral.workers.master.trainer_group import Arrivals
from corral.workers.requests.client import RankClient
from corral.workers.requests.handler import DeferredReply, WorkerRequestStream
from corral.workers.requests.messages import (
    Fetch,
    MetadataReply,
    NonBlockingRequest,
    OkReply,
    ReplyPayload,
    SampleMetadata,
)
from corral.workers.streams.errors import PeerDeadError
from tests.workers.requests.rig import AsRole, initialize, with_master, worker
from tests.workers.stream_helpers import until


class Rank:
    """A rank's inbox, and how often it was asked."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self.asked: list[Fetch] = []

    def answer(self, request: NonBlockingRequest) -> ReplyPayload | DeferredReply:
        if not isinstance(request, Fetch):
            return OkReply()
        if not any(known is request for known in self.asked):  # else it is looked at again
            self.asked.append(request)
        taken, self.arrived = self.arrived, []
        reply = MetadataReply.of([SampleMetadata(uid=uid, keys=(), num_tokens=[]) for uid in taken])
        return reply if taken else DeferredReply(request.wait_s, reply)

    def receive(self, stream: WorkerRequestStream, *uids: str) -> None:
        self.arrived += uids
        stream.look_again()


async def names(arrivals: Arrivals) -> list[tuple[int, str]]:
    return [(sample.owner, sample.uid) for sample in await arrivals.take()]


def test_each_arrival_wakes_the_master_and_only_who_answered_is_asked_again(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        ranks, security = [Rank(), Rank()], as_role("model_worker")
        with (
            worker(security, lambda: client.endpoint, non_blocking=ranks[0].answer) as first,
            worker(security, lambda: client.endpoint, index=1, non_blocking=ranks[1].answer) as second,
        ):
            await initialize(client, first, second)
            news = asyncio.Event()
            arrivals = Arrivals(client, {0: first.worker_id, 1: second.worker_id}, wake=news.set)
            assert await names(arrivals) == await names(arrivals) == []  # nobody is asked twice
            await until(lambda: len(ranks[0].asked) + len(ranks[1].asked) == 2, waiting_for="two requests")
            assert not news.is_set()
            ranks[1].receive(second, "0:a", "0:b")
            await asyncio.wait_for(news.wait(), 60)
            news.clear()
            assert await names(arrivals) == [(1, "0:a"), (1, "0:b")] and await names(arrivals) == []
            await until(lambda: len(ranks[1].asked) == 2, waiting_for="the second request")
            assert len(ranks[0].asked) == 1
            ranks[0].receive(first, "0:c")
            await asyncio.wait_for(news.wait(), 60)
            assert await names(arrivals) == [(0, "0:c")]

    with_master(run, as_role("master_worker"))


KEYS = st.sampled_from([(), ("input_ids",), ("input_ids", "rewards")])
VERSIONS = st.sampled_from([(), ("1.4",), ("1.4", "1.5")])
SAMPLES = st.lists(
    st.builds(
        SampleMetadata,
        uid=st.uuids().map(str),
        keys=KEYS,
        num_tokens=st.lists(st.integers(0, 2**31), max_size=3),
        versions=VERSIONS,
        order=st.integers(0, 9),
        dropped_because=st.sampled_from(["", "reward_error"]),
    )
)


@given(SAMPLES)
def test_what_a_rank_says_of_each_sample_is_what_the_master_keeps(told: list[SampleMetadata]) -> None:
    kept = {sample.uid: sample for sample in buffered(MetadataReply.of(told), owner=3)}
    assert kept.keys() == {metadata.uid for metadata in told}
    for metadata in told:
        sample = kept[metadata.uid]
        assert (sample.order, sample.owner, sample.dropped_because) == (metadata.order, 3, metadata.dropped_because)
        assert (list(sample.num_tokens), sample.keys) == (metadata.num_tokens, set(metadata.keys))
        assert sample.versions == {PolicyVersion.parse(tag) for tag in metadata.versions}


def test_the_death_of_a_rank_wakes_the_master_too(as_role: AsRole) -> None:
    async def run(client: RankClient) -> None:
        rank = Rank()
        news = asyncio.Event()
        with worker(as_role("model_worker"), lambda: client.endpoint, non_blocking=rank.answer) as stream:
            await initialize(client, stream)
            arrivals = Arrivals(client, {0: stream.worker_id}, wake=news.set)
            assert await arrivals.take() == []
            await until(lambda: len(rank.asked) == 1, waiting_for="the request")
        await asyncio.wait_for(news.wait(), 60)
        with pytest.raises(PeerDeadError, match=r"model_worker/0 .* died before it answered Fetch"):
            await arrivals.take()

    with_master(run, as_role("master_worker"))
