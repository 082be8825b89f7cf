"""What a responder remembers, and what errors become, without sockets."""

import pytest

from corral.workers.streams.calls import ReplyCache, error_reply, remote_error
from corral.workers.streams.codec import Buffer


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
