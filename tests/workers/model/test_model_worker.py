"""Which requests a model worker answers, and what it makes of those that it does not know."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from corral.scheduling.redistribution import Parcel
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.model.model_worker import ModelWorker
from corral.workers.requests.handler import DeferredReply, Envelope
from corral.workers.requests.messages import (
    BlockingRequest,
    ClearDataCache,
    DataTransfer,
    Evaluate,
    Fetch,
    Generate,
    Give,
    Inference,
    Initialize,
    InitializedReply,
    LoadedModel,
    LoadRows,
    MetadataReply,
    NonBlockingRequest,
    OkReply,
    Reallocate,
    Reject,
    ReplyPayload,
    SampleMetadata,
    SaveCheckpoint,
    SaveWeights,
    StatsReply,
    TrainReply,
    TrainStep,
    Written,
    WrittenReply,
)
from tests.workers.master.trials import SHAPE, context_of, trial_of


class Replies:
    """A request stream that keeps what is answered."""

    def __init__(self) -> None:
        self.payloads: list[ReplyPayload] = []
        self.errors: list[str] = []

    def reply(self, envelope: Envelope, payload: ReplyPayload) -> None:
        self.payloads.append(payload)

    def reply_error(self, envelope: Envelope, error: BaseException) -> None:
        self.errors.append(str(error))


def test_a_request_that_fails_halfway_ends_the_rank(tmp_path: Path) -> None:
    replies = Replies()
    with context_of(*trial_of(tmp_path), "model_worker") as context, ExitStack() as stack:
        worker = ModelWorker(context)
        worker._set_up(stack)
        with pytest.raises(KeyError, match="nothing"):
            worker._serve(cast(Any, replies), blocking(Evaluate(mfc="nothing", uids=[])))
    assert len(replies.errors) == 1


class Statistics:
    """Stands for the models of a worker."""

    def evaluate(self, request: Evaluate) -> StatsReply:
        return StatsReply(stats={"accuracy": 0.5})

    def train_step(self, request: TrainStep) -> TrainReply:
        return TrainReply(stats={"loss": 0.5}, num_updates=1, num_nonfinite=0)


def test_one_rank_reports_what_is_equal_on_all(tmp_path: Path) -> None:
    replies = Replies()
    with context_of(*trial_of(tmp_path), "model_worker") as context:
        worker = ModelWorker(context)
        worker._models = cast(Any, Statistics())
        for reports in (True, False):
            worker._serve(cast(Any, replies), blocking(Evaluate(mfc="evaluate", uids=[], reports=reports)))
            request = TrainStep(mfc="actor_train", uids=[], version=1, reports=reports)
            worker._serve(cast(Any, replies), blocking(request))
        assert context.presence.snapshot().version == "2"
    trained = TrainReply(stats={"loss": 0.5}, num_updates=1, num_nonfinite=0)
    assert replies.payloads == [StatsReply(stats={"accuracy": 0.5}), trained, OkReply(), OkReply()]


class Part:
    """Stands for the parts of a worker, and writes down what is asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def forget(self) -> None:
        self.asked.append("forget")

    def begin(self, epoch: int) -> None:
        self.asked.append(f"meet for epoch {epoch}")

    def initialize(self, request: Initialize, **_: object) -> dict[str, LoadedModel]:
        self.asked.append(f"load {request.weights['actor']}")
        return {"actor/0": SHAPE}

    def start_session(self, session: str) -> None:
        self.asked.append(f"session {session}")


def test_a_new_epoch_forgets_the_last_one_then_loads_and_only_then_asks_for_samples(tmp_path: Path) -> None:
    replies, part = Replies(), Part()
    with context_of(*trial_of(tmp_path), "model_worker") as context:
        worker = ModelWorker(context)
        worker._saves = worker._samples = worker._models = worker._plane = worker._kept = cast(Any, part)
        request = Initialize(weights={"actor": "w"}, states={}, step=3)
        worker._serve(cast(Any, replies), blocking(request))
        assert replies.payloads == [InitializedReply(models={"actor/0": SHAPE})]
        begun = ["meet for epoch 1"] * 2  # of the data plane, and of what is kept for people
        assert part.asked == ["forget", "forget", *begun, "load w", f"session 1-{context.incarnation}"]
        assert context.presence.snapshot().version == "3"


class Recorder:
    """Stands for any part, and writes down what is asked of it, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def note(*arguments: Any, **_: Any) -> Any:
            self.asked.append((name, *arguments))
            return ANSWERS.get(name)

        return note


SAMPLES = [SampleMetadata(uid="0:a", keys=("input_ids",), num_tokens=[3])]
FILES = {"model.safetensors": FileEntry(digest="0" * 64, size=7)}
ANSWERS: dict[str, Any] = {
    "fetch": SAMPLES,
    "load_rows": SAMPLES,
    "generate": SAMPLES,
    "save_weights": FILES,
}
PARCEL = Parcel(tag=0, source=0, destinations=(1,), uids=("0:a",), keys=("input_ids",))
GENERATE = Generate(mfc="actor_gen", uids=["0:a"], orders=[4], tries=[0], version="1.2")
INFERENCE = Inference(mfc="ref_inf", uids=["0:a"])
REALLOCATE = Reallocate(source="actor/0", target="ref/0", eta=0.5)


@contextmanager
def recording_worker(folder: Path) -> Iterator[tuple[ModelWorker, Recorder]]:
    with context_of(*trial_of(folder), "model_worker") as context:
        worker, parts = ModelWorker(context), Recorder()
        worker._samples = worker._models = worker._plane = cast(Any, parts)
        yield worker, parts


@pytest.mark.parametrize(
    ("request_", "asked", "answer"),
    [
        (Fetch(max_samples=3, wait_s=0.0), ("fetch", 3), MetadataReply.of(SAMPLES)),
        (LoadRows(uids=["0:a"]), ("load_rows", ["0:a"]), MetadataReply.of(SAMPLES)),
        (Reject(uids=["0:a"], rejection="duplicate"), ("reject", ["0:a"], "duplicate"), OkReply()),
        (Give(parcels=[PARCEL]), ("give", [PARCEL]), OkReply()),
        (ClearDataCache(uids=["0:a"]), ("clear", ["0:a"]), OkReply()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_answered_at_once_is_done_by_its_part(
    request_: NonBlockingRequest, asked: tuple[Any, ...], answer: ReplyPayload, tmp_path: Path
) -> None:
    with recording_worker(tmp_path) as (worker, parts):
        assert worker._answer_now(request_) == answer
        assert parts.asked == [asked]


@pytest.mark.parametrize(
    ("request_", "asked", "answer"),
    [
        (GENERATE, ("generate", GENERATE), MetadataReply.of(SAMPLES)),
        (INFERENCE, ("inference", INFERENCE), OkReply()),
        (REALLOCATE, ("reallocate", REALLOCATE), OkReply()),
        (SaveWeights(role="ref", directory="/w"), ("save_weights", "ref", Path("/w")), WrittenReply(weights=FILES)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_waits_for_its_turn_is_done_by_the_models(
    request_: BlockingRequest, asked: tuple[Any, ...], answer: ReplyPayload, tmp_path: Path
) -> None:
    replies = Replies()
    with recording_worker(tmp_path) as (worker, parts):
        worker._serve(cast(Any, replies), blocking(request_))
        assert (parts.asked, replies.payloads, replies.errors) == ([asked], [answer], [])


class Save:
    """Stands for the models of a worker and for what a commit has of a role: on disk as soon as `is_there` is set."""

    def __init__(self, is_there: threading.Event) -> None:
        self._is_there = is_there
        self.asked: list[str] = []

    def role_save(self, role: str, *, with_weights: bool) -> "Save":
        self.asked.append(f"{role}, with weights" if with_weights else role)
        return self

    def copied(self) -> "Save":
        self.asked.append("copied")
        return self

    def write(self, request: SaveCheckpoint, *, on_progress: Callable[[], None]) -> WrittenReply:
        assert self._is_there.wait(60)
        self.asked.append(f"{request.state} {request.weights}")
        return WRITTEN


WRITTEN = WrittenReply(state=FILES)


def test_what_is_copied_for_a_commit_is_written_while_other_requests_run(tmp_path: Path) -> None:
    replies, is_there, told = Replies(), threading.Event(), threading.Event()
    save = Save(is_there)
    with context_of(*trial_of(tmp_path), "model_worker") as context:
        worker = ModelWorker(context)
        worker._models = cast(Any, save)
        with worker._saves as saves:
            saves.announce_to(told.set)
            request = SaveCheckpoint(role="ref", state="/s", weights="/w", copies=True)
            worker._serve(cast(Any, replies), blocking(request))
            worker._models = cast(Any, Statistics())
            worker._serve(cast(Any, replies), blocking(TrainStep(mfc="train", uids=[], version=1, reports=False)))
            assert replies.payloads == [OkReply(), OkReply()]
            assert worker._answer_now(Written(role="ref")) == DeferredReply(math.inf, OkReply())
            assert save.asked == ["ref, with weights", "copied"]
            is_there.set()
            assert told.wait(60)
            assert worker._answer_now(Written(role="ref")) == WRITTEN
            assert save.asked == ["ref, with weights", "copied", "/s /w"]


def test_without_a_copy_all_is_on_disk_before_the_next_request(tmp_path: Path) -> None:
    replies, is_there = Replies(), threading.Event()
    is_there.set()
    save = Save(is_there)
    with context_of(*trial_of(tmp_path), "model_worker") as context:
        worker = ModelWorker(context)
        worker._models = cast(Any, save)
        request = SaveCheckpoint(role="ref", state="/s", weights="", copies=False)
        worker._serve(cast(Any, replies), blocking(request))
        assert save.asked == ["ref", "/s "]
        assert worker._answer_now(Written(role="ref")) == WRITTEN


def test_inputs_are_taken_before_a_call_and_its_model_is_moved_away_after_it(tmp_path: Path) -> None:
    take = DataTransfer(parcels=[PARCEL], num_tokens={"0:a": [3]})
    with recording_worker(tmp_path) as (worker, parts):
        request = msgspec.structs.replace(INFERENCE, take=take, offloads=True)
        worker._serve(cast(Any, Replies()), blocking(request))
        assert parts.asked == [("take", [PARCEL], {"0:a": [3]}), ("inference", request), ("offload", "ref_inf")]


def blocking(request: msgspec.Struct) -> Envelope:
    """A request as the stream hands it to the main thread."""
    return Envelope(epoch=1, request=cast(Any, request), deferred=cast(Any, None))
