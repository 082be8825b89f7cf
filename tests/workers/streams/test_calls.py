"""What a caller waits for and what a responder remembers, without sockets."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.workers.streams.calls import PendingCalls, ReplyCache, error_reply, remote_error
from corral.workers.streams.codec import Buffer
from corral.workers.streams.errors import PeerDeadError, StreamClosedError, StreamTimeoutError

Pending = PendingCalls[int, str]


def with_pending(test: Callable[[Pending], Awaitable[None]]) -> None:
    """Run a test on a loop with a peer that was asked nothing yet."""

    async def run() -> None:
        await test(PendingCalls(lambda: "model_worker/3 (connected)"))

    asyncio.run(run())


def start(pending: Pending, request_id: int, *, deadline_s: float = 100.0) -> asyncio.Future[str]:
    return pending.ask(request_id, [b"%d" % request_id], asked=f"Add {request_id}", deadline_s=deadline_s)


def dead(asked: str) -> PeerDeadError:
    return PeerDeadError(f"died before it answered {asked}")


@given(num_calls=st.integers(0, 6), arrivals=st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=20))
def test_only_the_first_that_comes_for_a_call_counts(num_calls: int, arrivals: list[tuple[int, bool]]) -> None:
    """Replies and errors come in any order, twice, and for calls that nobody made."""

    async def run(pending: Pending) -> None:
        futures = {request_id: start(pending, request_id) for request_id in range(num_calls)}
        first: dict[int, str] = {}
        for position, (request_id, is_reply) in enumerate(arrivals):
            is_expected = request_id in futures and request_id not in first
            if is_reply:
                assert pending.settle(request_id, f"reply {position}") is is_expected
            else:
                assert pending.fail(request_id, dead) is is_expected
            if is_expected:
                first[request_id] = f"reply {position}" if is_reply else f"died before it answered Add {request_id}"
        for request_id, future in futures.items():
            assert future.done() is (request_id in first)
            assert (request_id in pending) is (request_id not in first)
            if future.done():
                assert str(future.exception() or future.result()) == first[request_id]
        unanswered = [[b"%d" % request_id] for request_id in futures if request_id not in first]
        assert pending.frames() == unanswered
        pending.fail_all(dead)

    with_pending(run)


def test_a_call_past_its_deadline_names_the_peer_and_what_was_asked() -> None:
    async def run(pending: Pending) -> None:
        other = start(pending, 1)
        with pytest.raises(
            StreamTimeoutError, match=r"^model_worker/3 \(connected\) did not answer Add 2 within 0\.0 s$"
        ):
            await start(pending, 2, deadline_s=0.0)
        assert not pending.settle(2, "late")
        assert pending.frames() == [[b"1"]]
        assert not other.done()

    with_pending(run)


def test_the_deadline_of_an_answered_call_ends_with_it() -> None:
    async def run(pending: Pending) -> None:
        start(pending, 1, deadline_s=0.0)
        pending.settle(1, "one")
        again = start(pending, 1)
        with pytest.raises(StreamTimeoutError):
            await start(pending, 2, deadline_s=0.0)  # due after the first
        assert not again.done()

    with_pending(run)


def test_what_is_asked_after_others_failed_is_a_call_of_its_own() -> None:
    async def run(pending: Pending) -> None:
        futures = [start(pending, request_id) for request_id in (1, 2)]
        pending.fail_all(lambda asked: StreamClosedError(f"closed before {asked}"))
        assert [str(future.exception()) for future in futures] == ["closed before Add 1", "closed before Add 2"]
        later = start(pending, 3)
        assert pending.settle(3, "three")
        assert await later == "three"

    with_pending(run)


def test_a_call_whose_caller_was_cancelled_is_told_again_until_it_is_forgotten() -> None:
    async def run(pending: Pending) -> None:
        futures = [start(pending, request_id) for request_id in (1, 2)]
        for future in futures:
            future.cancel()
        assert pending.frames() == [[b"1"], [b"2"]]
        pending.forget(1)
        assert pending.frames() == [[b"2"]]
        assert not pending.settle(2, "late")
        assert pending.frames() == []

    with_pending(run)


def test_an_error_that_nobody_awaits_is_not_reported_as_lost() -> None:
    async def run(pending: Pending) -> None:
        reports: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
        future = start(pending, 1)
        pending.fail(1, dead)
        await asyncio.wait({future})
        del future
        gc.collect()
        assert reports == []

    with_pending(run)


def test_an_exception_arrives_as_what_it_was_there() -> None:
    def handle() -> None:
        raise LookupError("the dataset is gone")

    with pytest.raises(LookupError) as raised:
        handle()
    error = remote_error("model_worker/3", error_reply(raised.value))
    assert str(error).startswith("model_worker/3 raised LookupError: the dataset is gone\n")
    assert "in handle" in str(error)


class Responder:
    """Notes what the cache has it do."""

    def __init__(self, capacity: int) -> None:
        self.cache = ReplyCache(capacity)
        self.done: list[str] = []

    def receive(self, request_id: str) -> None:
        self.cache.run_once(
            request_id,
            run=lambda: self.done.append(f"run {request_id}"),
            repeat=lambda frames: self.done.append(f"repeat {bytes(frames[0]).decode()}"),
        )

    def finish(self, request_id: str) -> None:
        frames: list[Buffer] = [f"reply {request_id}".encode()]
        self.cache.finish(request_id, frames)


def test_a_request_runs_once_and_its_reply_is_repeated() -> None:
    responder = Responder(capacity=2)
    responder.receive("a")
    responder.receive("a")  # it is being worked on
    responder.finish("a")
    responder.receive("a")
    assert responder.done == ["run a", "repeat reply a"]


def test_the_oldest_replies_are_given_up() -> None:
    responder = Responder(capacity=2)
    for request_id in ("a", "b", "c"):
        responder.receive(request_id)
        responder.finish(request_id)
    responder.done.clear()
    for request_id in ("c", "b", "a"):
        responder.receive(request_id)
    assert responder.done == ["repeat reply c", "repeat reply b", "run a"]
