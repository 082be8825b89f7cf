"""Replies on their way hold nothing once they have come."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from corral.workers.requests.messages import OkReply
from corral.workers.requests.pending_replies import PendingReplies


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What is freed now, is freed because nobody holds it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_payload_that_somebody_was_told_of_is_not_kept(is_late: bool) -> None:
    async def run() -> None:
        pending = PendingReplies(["a"], request_id="1:1", asked="Spec 1:1")
        told: list[tuple[str, object]] = []
        if is_late:
            pending.end("a", OkReply())
        pending.on_each(lambda worker, payload: told.append((worker, payload)))
        pending.end("a", OkReply())
        assert told == [("a", OkReply())] and await pending.results() == {}

    asyncio.run(run())


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("is_late", [False, True])
def test_who_watches_replies_and_knows_them_does_not_keep_them(is_late: bool) -> None:
    told: list[tuple[str, tuple[str, ...]]] = []

    def ask() -> weakref.ref[PendingReplies]:
        pending = PendingReplies(["a", "b"], request_id="1:1", asked="Spec 1:1")
        if not is_late:
            pending.on_each(lambda worker, _: told.append((worker, pending.missing)))
        for worker in ("a", "b"):
            pending.end(worker, OkReply())
        if is_late:
            pending.on_each(lambda worker, _: told.append((worker, pending.missing)))
        return weakref.ref(pending)

    async def run() -> None:
        assert ask()() is None

    asyncio.run(run())
    assert told == ([("a", ()), ("b", ())] if is_late else [("a", ("b",)), ("b", ())])
