"""Replies on their way hold nothing once they have come."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from corral.workers.requests.client import PendingReplies
from corral.workers.requests.messages import OkReply, Written


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What is freed now, is freed because nobody holds it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_who_waits_for_replies_and_knows_them_does_not_keep_them() -> None:
    told: list[tuple[str, ...]] = []

    async def ask() -> weakref.ref[PendingReplies]:
        request = Written(role="actor")
        pending = PendingReplies({"a": request, "b": request}, "1:1", deadline_s=60, listed={})
        pending.when_settled(lambda: told.append(pending.missing))
        for worker in ("a", "b"):
            pending.end(worker, OkReply())
        assert await pending.results() == dict.fromkeys(("a", "b"), OkReply())
        return weakref.ref(pending)

    async def run() -> None:
        kept = await ask()
        await asyncio.sleep(0)
        assert kept() is None

    asyncio.run(run())
    assert told == [()]
