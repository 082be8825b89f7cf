"""Which requests a model worker answers, and what it makes of those that it does not know."""

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from corral.workers.model.model_worker import ModelWorker
from corral.workers.requests.handler import Envelope
from corral.workers.requests.messages import Evaluate, OkReply, Ping, Shutdown
from corral.workers.streams.calls import RequestId
from tests.workers.master.trials import context_of, trial_of


class UnknownRequest(msgspec.Struct):
    """Stands for a request that a later version of the protocol adds."""


def test_only_a_shutdown_shuts_a_model_worker_down(tmp_path: Path) -> None:
    with context_of(*trial_of(tmp_path), "model_worker") as context:
        worker = ModelWorker(context)
        assert worker._answer_now(Ping(), {}) == OkReply()
        with pytest.raises(ValueError, match="UnknownRequest is not served"):
            worker._answer_now(cast(Any, UnknownRequest()), {})
        assert not context.stopping.is_set()
        worker._answer_now(Shutdown(reason="test"), {})
        assert context.stopping.is_set()


class Replies:
    """A request stream that keeps what is answered."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def reply_error(self, envelope: Envelope, error: BaseException) -> None:
        self.errors.append(str(error))


def test_a_rank_refuses_a_blocking_request_that_it_does_not_know_and_lives(tmp_path: Path) -> None:
    replies = Replies()
    with context_of(*trial_of(tmp_path), "model_worker") as context:
        worker = ModelWorker(context)
        worker._serve(cast(Any, replies), blocking(UnknownRequest()))
        assert replies.errors == ["request UnknownRequest is not served by this model worker"]
        assert not context.stopping.is_set()


def test_a_request_that_fails_halfway_ends_the_rank(tmp_path: Path) -> None:
    replies = Replies()
    with context_of(*trial_of(tmp_path), "model_worker") as context:
        with pytest.raises(ValueError, match="no held-out problems"):
            ModelWorker(context)._serve(cast(Any, replies), blocking(Evaluate(version=1)))
    assert len(replies.errors) == 1


def blocking(request: msgspec.Struct) -> Envelope:
    """A request as the stream hands it to the main thread."""
    return Envelope(
        request_id=RequestId(1, 1),
        request=cast(Any, request),
        pre_hooks=[],
        post_hooks=[],
        tensors={},
        deadline_s=60.0,
        received_s=0.0,
    )
