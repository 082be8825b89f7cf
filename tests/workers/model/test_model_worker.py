"""Which requests a model worker answers, and what it makes of those that it does not know."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.worker_specs import ModelWorkerSpec
from corral.name_resolve.keys import TrialKeys
from corral.scheduling.redistribution import Transfer
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.lifecycle.worker import Worker, WrongDevicesError, run_to_exit_code
from corral.workers.model.model_worker import ModelWorker, RankWaits, SavesBehind, joined_trainer_group, shared_store
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
from tests.name_services import MemoryNameService, NamesAddress, running_names
from tests.workers.backends.trainer_helpers import play
from tests.workers.master.trials import SHAPE, UUID, context_of, trial_of
from tests.workers.stream_helpers import LOOPBACK


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
TRANSFER = Transfer(tag=0, source=0, destinations=(1,), uids=("0:a",), keys=("input_ids",))
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
        (Give(transfers=[TRANSFER]), ("give", [TRANSFER]), OkReply()),
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
    take = DataTransfer(transfers=[TRANSFER], num_tokens={"0:a": [3]})
    with recording_worker(tmp_path) as (worker, parts):
        request = msgspec.structs.replace(INFERENCE, take=take, offloads=True)
        worker._serve(cast(Any, Replies()), blocking(request))
        assert parts.asked == [("take", [TRANSFER], {"0:a": [3]}), ("inference", request), ("offload", "ref_inf")]


def blocking(request: msgspec.Struct) -> Envelope:
    """A request as the stream hands it to the main thread."""
    return Envelope(epoch=1, request=cast(Any, request), deferred=cast(Any, None))


# --- what is written beside requests --------------------------------------------------------------------------------

DONE = WrittenReply(state={"state": FileEntry(digest="0" * 64, size=7)}, weights={})
NOTHING = WrittenReply(state={}, weights={})
_DEADLINE_S = 60.0


@pytest.fixture
def told() -> threading.Event:
    return threading.Event()


@pytest.fixture
def saves(told: threading.Event) -> Iterator[SavesBehind]:
    with SavesBehind() as saves:
        saves.announce_to(told.set)
        yield saves


def at_once(*, on_progress: Callable[[], None]) -> WrittenReply:
    return DONE


def full(*, on_progress: Callable[[], None]) -> WrittenReply:
    raise OSError(28, "No space left on device", "/w/state")


def wrong(*, on_progress: Callable[[], None]) -> WrittenReply:
    raise ValueError("tensor w is of complex64")


def test_a_full_disk_is_an_answer_and_the_next_save_is_made(saves: SavesBehind, told: threading.Event) -> None:
    saves.begin("actor", full)
    assert told.wait(_DEADLINE_S)
    why = "OSError: [Errno 28] No space left on device: '/w/state'"
    assert saves.written("actor") == WrittenReply(state={}, weights={}, failed_because=why, lacks_room=True)
    told.clear()
    saves.begin("actor", at_once)
    assert told.wait(_DEADLINE_S)
    assert saves.written("actor") == DONE


def test_what_no_disk_is_to_blame_for_is_raised(saves: SavesBehind, told: threading.Event) -> None:
    saves.begin("actor", wrong)
    assert told.wait(_DEADLINE_S)
    with pytest.raises(ValueError, match="complex64"):
        saves.written("actor")


def test_roles_are_written_one_after_the_other_and_told_apart(saves: SavesBehind, told: threading.Event) -> None:
    may_end = threading.Event()

    def slow(*, on_progress: Callable[[], None]) -> WrittenReply:
        assert may_end.wait(_DEADLINE_S)
        return NOTHING

    saves.begin("actor", slow)
    saves.begin("critic", at_once)
    assert saves.written("actor") is None and saves.written("critic") is None
    both = threading.Semaphore(0)
    saves.announce_to(both.release)
    may_end.set()
    assert both.acquire(timeout=_DEADLINE_S) and both.acquire(timeout=_DEADLINE_S)
    assert saves.written("actor") == NOTHING and saves.written("critic") == DONE


def test_the_next_epoch_ends_what_the_last_one_was_writing(saves: SavesBehind, told: threading.Event) -> None:
    has_begun, pieces = threading.Event(), 0

    def endless(*, on_progress: Callable[[], None]) -> WrittenReply:
        nonlocal pieces
        while True:
            pieces += 1
            has_begun.set()
            on_progress()

    saves.begin("actor", endless)
    assert has_begun.wait(_DEADLINE_S)
    saves.begin("critic", at_once)  # it waits behind the other, and is not begun any more
    saves.forget()
    before = pieces
    told.clear()
    saves.begin("actor", at_once)
    assert told.wait(_DEADLINE_S)
    assert saves.written("actor") == DONE and pieces == before


def test_what_is_written_first_is_told_when_it_is_asked_for(saves: SavesBehind) -> None:
    beats: list[int] = []

    def write(*, on_progress: Callable[[], None]) -> WrittenReply:
        on_progress()
        assert threading.current_thread() is threading.main_thread()  # it may consist of collectives
        return DONE

    saves.write_now("actor", write, on_progress=lambda: beats.append(1))
    assert saves.written("actor") == DONE and beats == [1]
    saves.write_now("actor", full, on_progress=lambda: None)
    assert saves.written("actor") == WrittenReply(
        state={}, weights={}, failed_because="OSError: [Errno 28] No space left on device: '/w/state'", lacks_room=True
    )


# --- the ranks of one start of the trainer group --------------------------------------------------------------------

DEADLINE_S = 60.0
SETUP_S = 4.0  # of two processes that are there already


def test_the_ranks_of_one_start_share_a_store_whoever_comes_first() -> None:
    names, key = MemoryNameService(), TrialKeys(UUID).trainer_rendezvous("first")
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(shared_store, names, key, rank=1, address=LOOPBACK, timeout_s=DEADLINE_S)
        served = shared_store(names, key, rank=0, address=LOOPBACK, timeout_s=DEADLINE_S)
        served.set("said by", "rank 0")
        assert early.result(DEADLINE_S).get("said by") == b"rank 0"


def test_a_rank_of_another_start_is_not_met() -> None:
    names, keys = MemoryNameService(), TrialKeys(UUID)
    shared_store(names, keys.trainer_rendezvous("first"), rank=0, address=LOOPBACK, timeout_s=DEADLINE_S)
    with pytest.raises(TimeoutError, match="model_worker/0 did not register"):
        shared_store(names, keys.trainer_rendezvous("second"), rank=1, address=LOOPBACK, timeout_s=0.0)


def test_a_rank_that_does_not_see_its_gpus_refuses_to_train_and_one_that_is_planned_without_takes_the_cpu(
    tmp_path: Path,
) -> None:
    if (seen := torch.cuda.device_count()) == 1:
        pytest.skip("the one GPU that a rank is planned for is here")
    wants_one = trial_of(tmp_path / "one", "groups.model_worker.scheduling.gpu=1")
    with context_of(*wants_one, "model_worker") as context:
        with (
            pytest.raises(WrongDevicesError, match=f"model_worker/0 1 GPU, and it sees {seen} on"),
            joined_trainer_group(context, context.specification(ModelWorkerSpec)),
        ):
            pass
    with context_of(*trial_of(tmp_path / "none", "groups.model_worker.scheduling.gpu=0"), "model_worker") as context:
        with joined_trainer_group(context, context.specification(ModelWorkerSpec)) as (parallel, _):
            assert parallel.device.type == "cpu"


@pytest.mark.parametrize("seen", [0, 2])
def test_other_gpus_than_planned_end_a_worker_with_an_exit_of_its_own(tmp_path: Path, seen: int) -> None:
    class Computing(Worker):
        def run(self) -> None:
            self.context.check_gpus(seen)

    with context_of(*trial_of(tmp_path, "groups.model_worker.scheduling.gpu=1"), "model_worker") as context:
        assert run_to_exit_code(Computing, context) is WorkerExit.WRONG_DEVICES


def test_a_rank_that_is_slower_than_setup_may_be_ends_no_gang_that_has_joined_and_is_seen(tmp_path: Path) -> None:
    with running_names() as names:
        play(be_slow, tmp_path, names, world_size=2, directory=tmp_path)


def be_slow(world: ParallelContext, folder: Path, address: NamesAddress) -> None:
    """Rank 1 comes to a collective when all time for setting up is over."""
    world.close()
    own = folder / str(world.rank)
    own.mkdir()
    settings = (f"supervision.setup_timeout_s={SETUP_S}", f"supervision.step_timeout_s={DEADLINE_S}")
    trial = trial_of(own, "groups.model_worker.scheduling.gpu=0", *settings)
    with address.connect() as names, context_of(*trial, "model_worker") as context:
        spec = context.specification(ModelWorkerSpec).model_copy(update={"world_size": 2, "index": world.rank})
        with joined_trainer_group(replace(context, names=names), spec) as (parallel, _):
            context.presence.enter("train step", deadline_s=DEADLINE_S)
            waits: list[float] = []
            with RankWaits(waits.append):
                time.sleep(SETUP_S + 1.0 if world.rank == 1 else 0.0)
                assert parallel.sum_over_ranks({"ranks": 1.0}) == {"ranks": 2.0}
            assert (sum(waits) > 1.0) is (world.rank == 0), "the other rank waits for the slow one"


def test_a_gang_of_one_needs_nobody(tmp_path: Path) -> None:
    with context_of(*trial_of(tmp_path), "model_worker") as context:
        with joined_trainer_group(context, context.specification(ModelWorkerSpec)) as (parallel, rendezvous):
            assert (parallel.rank, parallel.mesh.dims.world_size, parallel.group) == (0, 1, None)
            assert rendezvous is None
