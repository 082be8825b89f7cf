"""The model worker: one training rank. Requests of the master in, outputs and statistics out; tensors stay here.

              in the I/O thread, at once                        in the main thread, in the master's order, after a flush
    samples   Fetch  Reject  ClearDataCache                     Initialize: forgets the last epoch's
              LoadRows, deferred until all are read
    models                                                      Initialize  Generate  Inference  TrainStep  Evaluate
                                                                Reallocate  SaveWeights
    saves     Written, deferred until all is on disk            SaveCheckpoint: copies, and SavesBehind writes
    data plane  Give                                            before a call, to take its inputs
    models                                                      after a call, to move its model away

    joined_trainer_group ► ParallelContext ──► models.py ◄──► data_store.py ◄── samples.py
                          └────────────────────────► data_plane.py ◄──► the other ranks' stores

The ranks of a mesh run the same requests of the right column in the same order, so that their collectives meet.

What a commit asked for is written by a thread of its own, while this rank goes on with other requests.

    main thread   SaveCheckpoint ──► copies in host memory ──begin──► "copied"    TrainStep, Inference, ... at once
                                                              │
    this thread                                               └──► write, hash, fsync ──► WrittenReply ──► look again
    I/O thread    Written ──► deferred ─────────────────────────────────────────────────────────────────┴──► reply

Guarantee: what is written is not changed by any later call, since it is a copy; that it counts only when it is whole is
the commit's doing, which names no file that was not reported here.
"""

import logging
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from inspect import getfile
from pathlib import Path
from typing import Final, Protocol, assert_never

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # re-exported by torch.distributed, but not for type checkers
from transformers.utils import logging as transformers_logging

from corral.experiments.config.rollout import reported_parts
from corral.experiments.worker_specs import ModelWorkerSpec
from corral.name_resolve.base import NameService
from corral.scheduling.dataflow import build_dataflow
from corral.scheduling.keys import merge_keys
from corral.workers.backends.parallel_context import (
    ParallelContext,
    connect_store,
    host_store,
    init_parallel,
    mesh_contexts,
)
from corral.workers.lifecycle.worker import PeersFailedError, Worker, WorkerContext, is_no_room
from corral.workers.model.data_plane import DataPlane
from corral.workers.model.data_store import DataStore
from corral.workers.model.host_memory import host_identity
from corral.workers.model.kept_samples import KeptSamples
from corral.workers.model.models import Models
from corral.workers.model.network import TransferError
from corral.workers.model.reallocation import reallocation_meshes
from corral.workers.model.samples import open_samples
from corral.workers.requests.handler import DeferredReply, Envelope, WorkerRequestStream
from corral.workers.requests.messages import (
    CallRequest,
    ClearDataCache,
    Evaluate,
    Fetch,
    Generate,
    Give,
    HeldOutReply,
    Inference,
    Initialize,
    InitializedReply,
    LoadRows,
    MetadataReply,
    NonBlockingRequest,
    OkReply,
    Reallocate,
    Reject,
    ReplyPayload,
    SaveCheckpoint,
    SaveWeights,
    TrainStep,
    Written,
    WrittenReply,
)
from corral.workers.streams.closing import Closing

logger = logging.getLogger(__name__)

_POLL_S = 0.5


class Write(Protocol):
    """Writes files."""

    def __call__(self, *, on_progress: Callable[[], None]) -> WrittenReply:
        """What it has written, which is on disk; `on_progress` is called every few megabytes, and may raise."""


class SavesBehind(Closing):
    """One thread that writes what roles of this rank have copied, in the order in which they did.

    Example:
        saves.begin("actor", partial(save.copied().write, request))
        saves.written("actor")      # None until all of it is on disk
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saves")
        self._by_role: dict[str, Future[WrittenReply]] = {}
        self._given_up = threading.Event()
        self._on_written: Callable[[], None] = lambda: None

    def announce_to(self, on_written: Callable[[], None]) -> None:
        """Call this, in any thread, whenever a role's files are there or will not be."""
        self._on_written = on_written

    def begin(self, role: str, write: Write) -> None:
        """Write a role's files; what it wrote before is forgotten."""
        given_up = self._given_up

        def on_progress() -> None:
            if given_up.is_set():
                raise CancelledError("nobody wants what is being written any more")

        self._by_role[role] = self._executor.submit(_outcome, write, on_progress)
        self._by_role[role].add_done_callback(lambda _: self._on_written())

    def written(self, role: str) -> WrittenReply | None:
        """What `begin` was last given for this role, once it has ended; None before.

        Raises: what the writing raised, except an error of the file system, which the reply tells.
        """
        future = self._by_role[role]
        return future.result() if future.done() else None

    def write_now(self, role: str, write: Write, *, on_progress: Callable[[], None]) -> None:
        """Write a role's files in this thread, before anything else."""
        future: Future[WrittenReply] = Future()
        future.set_result(_outcome(write, on_progress))
        self._by_role[role] = future

    def forget(self) -> None:
        """An epoch is over, or the worker leaves: nobody reads what is being written, and its memory is wanted back.

        It waits for a write(2) or an fsync that is under way; the deadline is that of the caller's phase.
        """
        self._given_up.set()
        for future in self._by_role.values():
            future.cancel()
        wait(self._by_role.values())
        self._by_role.clear()
        self._given_up = threading.Event()

    def close(self) -> None:
        self.forget()
        self._executor.shutdown()


def _outcome(write: Write, on_progress: Callable[[], None]) -> WrittenReply:
    try:
        return write(on_progress=on_progress)
    except OSError as error:
        # A full disk ends this save and not the rank, whose weights are ahead of every commit.
        return WrittenReply(failed_because=f"{type(error).__name__}: {error}", lacks_room=is_no_room(error))


class ModelWorker(Worker):
    """Takes the master's requests, brings their inputs here, has them run, and answers."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._spec = context.specification(ModelWorkerSpec)
        self._store = DataStore(merge_keys(self._spec.declared_keys))
        self._saves = SavesBehind()

    def run(self) -> None:
        transformers_logging.disable_progress_bar()
        with ExitStack() as stack:
            self._set_up(stack)
            stream = stack.enter_context(
                WorkerRequestStream(
                    self.context.security,
                    lambda: self.context.names.get(self.context.keys.master_stream()),
                    worker_id=self.context.worker_id,
                    incarnation=self.context.incarnation,
                    host=host_identity(),
                    non_blocking=self._answer_now,
                )
            )
            self._samples.announce_to(stream.look_again)
            self._saves.announce_to(stream.look_again)
            stack.enter_context(self._saves)  # it ends before the stream does, which it tells
            if self._spec.world_size > 1:
                stack.enter_context(RankWaits(self.context.presence.note_among_ranks))
            while not self.context.stopping.is_set():
                self.context.presence.enter("idle", waiting_for="requests of the master")
                envelope = stream.next_blocking(_POLL_S)
                if envelope is not None:
                    self._serve(stream, envelope)

    def _set_up(self, stack: ExitStack) -> None:
        """The parts that answer; nothing is asked of them before all are there."""
        context, spec = self.context, self._spec
        parallel, rendezvous = stack.enter_context(joined_trainer_group(context, spec))
        plane = DataPlane(
            self._store,
            rendezvous,
            rank=spec.index,
            world_size=spec.world_size,
            address=context.address,
            host=host_identity(),
            timeout_s=context.plan.supervision.step_timeout_s,
        )
        self._plane = stack.enter_context(closing(plane))
        meshes = context.plan.master.meshes
        graph = build_dataflow(spec.calls)
        contexts = mesh_contexts(parallel, meshes | reallocation_meshes(graph, meshes))
        self._kept = stack.enter_context(
            KeptSamples(
                context.trial.samples_path,
                prompts_per_step=spec.samples_per_step,
                tokenizer=spec.tokenizer,
                rank=spec.index,
                num_ranks=len(context.plan.master.sample_ranks),
                parts=reported_parts(spec.reward.reward),
            )
        )
        models = Models(
            spec,
            self._store,
            contexts,
            seed=context.plan.seed,
            secrets=[context.trial.secrets_path],
            kept=self._kept,
            record=context.presence.record,
        )
        self._models = stack.enter_context(closing(models))
        self._samples = stack.enter_context(open_samples(context, spec, self._store))

    # Requests that are answered at once, in the stream's thread

    def _answer_now(self, request: NonBlockingRequest) -> ReplyPayload | DeferredReply:
        match request:
            case Fetch():
                arrived = MetadataReply.of(self._samples.fetch(request.max_samples))
                return arrived if arrived.groups or not request.wait_s else DeferredReply(request.wait_s, arrived)
            case LoadRows():
                rows = self._samples.load_rows(request.uids)
                return DeferredReply(math.inf, OkReply()) if rows is None else MetadataReply.of(rows)
            case Written():
                return self._saves.written(request.role) or DeferredReply(math.inf, OkReply())
            case Reject():
                self._samples.reject(request.uids, request.rejection)
            case Give():
                self._plane.give(request.transfers)
            case ClearDataCache():
                self._samples.clear(request.uids)
            case _:
                assert_never(request)
        return OkReply()

    # Requests that the main thread runs, in the order of the master

    def _serve(self, stream: WorkerRequestStream, envelope: Envelope) -> None:
        """Take a call's inputs from other ranks, run the request, move the call's model away if it is to go, reply."""
        request, presence, models = envelope.request, self.context.presence, self._models
        name, timeout_s = _words(type(request).__name__), self.context.plan.supervision.step_timeout_s
        presence.enter(name, deadline_s=timeout_s)
        started = time.monotonic()
        payload: ReplyPayload = OkReply()
        try:
            if isinstance(request, CallRequest) and (take := request.take) is not None:
                sources = sorted({one.source for one in take.transfers if self._spec.index in one.destinations})
                waits_for = [f"model_worker/{rank}" for rank in sources]
                with presence.during("take samples", waits_for=waits_for, deadline_s=timeout_s):
                    self._plane.take(take.transfers, take.num_tokens)
            match request:
                case Initialize():
                    payload = self._initialize(request, epoch=envelope.epoch)
                case Generate():
                    payload = MetadataReply.of(models.generate(request))
                case Inference():
                    models.inference(request)
                case TrainStep():
                    reply = models.train_step(request)
                    presence.beat(version=str(request.version + (not reply.is_skipped)))
                    payload = reply if request.reports else payload
                case Evaluate():
                    found = models.evaluate(request)
                    payload = found if request.reports or isinstance(found, HeldOutReply) else payload
                case Reallocate():
                    models.reallocate(request)
                case SaveWeights():
                    base = Path(request.base) if request.base else None
                    directory = Path(request.directory)
                    files = models.save_weights(request.role, directory, base=base, on_progress=presence.beat)
                    payload = WrittenReply(weights=files)
                case SaveCheckpoint():
                    save = models.role_save(request.role, with_weights=bool(request.weights))
                    if request.copies:
                        self._saves.begin(request.role, partial(save.copied().write, request))
                    else:
                        self._saves.write_now(request.role, partial(save.write, request), on_progress=presence.beat)
                case _:
                    assert_never(request)
            if isinstance(request, CallRequest) and request.offloads:
                models.offload(request.mfc)
        except (TransferError, torch.distributed.DistError) as error:
            stream.reply_error(envelope, error)
            raise PeersFailedError(f"{name} failed because another rank is gone: {error}") from error
        except Exception as error:
            stream.reply_error(envelope, error)
            raise
        stream.reply(envelope, payload)
        logger.debug("%s took %.3f s", name, time.monotonic() - started)

    def _initialize(self, request: Initialize, *, epoch: int) -> InitializedReply:
        """A new epoch: what an earlier one left here is forgotten, and freed before anything is loaded."""
        self._saves.forget()
        self._samples.forget()
        self._plane.begin(epoch)
        self._kept.begin(epoch)
        models = self._models.initialize(request, on_progress=self.context.presence.beat)
        self._samples.start_session(f"{epoch}-{self.context.incarnation}")
        self.context.presence.beat(version=str(request.step))
        return InitializedReply(models=models)


def _words(name: str) -> str:
    """TrainStep -> train step"""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()


_LOOK_S: Final = 0.05
_OF_RANKS: Final = str(Path(getfile(dist)).parent)


class RankWaits(Closing):
    """How long this training rank is held up by the others: looks at the thread that makes it, until it is closed.

    main thread ──twenty times a second: where is it?──► in torch.distributed ──► note(seconds since the look before)

    All ranks of a mesh end a call at the same time, since each layer of it needs all of them; the slow one is the one
    that never waits. Where collectives run on a GPU the host does not wait in them, and this sees only what holds up a
    host.
    """

    def __init__(self, note: Callable[[float], None]) -> None:
        """note: has the seconds that were spent in a call of torch.distributed, as far as looks tell."""
        self._note = note
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="rank waits", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _look_on(self) -> None:
        looked = time.monotonic()
        while not self._closed.wait(_LOOK_S):
            frame, now = sys._current_frames().get(self._watched), time.monotonic()
            if frame is not None and frame.f_code.co_filename.startswith(_OF_RANKS):
                self._note(min(now - looked, 2 * _LOOK_S))  # a process that was stopped has waited for nobody
            looked = now


@contextmanager
def joined_trainer_group(
    context: WorkerContext, spec: ModelWorkerSpec
) -> Iterator[tuple[ParallelContext, Store | None]]:
    """This rank's place among the others, and the store in which all of them meet, for as long as the block runs.

    rank 0:       host_store ──► its address ──► name-resolve, under the trainer group's incarnation
    other ranks:  name-resolve ──wait──► the address ──► connect_store
    every rank:   init_parallel ──► ParallelContext of all ranks; left again when the worker leaves
                  mesh_contexts ──► one of each model, and of the ranks that a model's weights travel between
                  the store, in which the data plane meets, too

    The incarnation in the name keeps two starts of the trainer group apart: a rank of an earlier start, which may still
    be on its way out, looks under another name. A trainer group of one has no store.

    Guarantee: once all have joined, a rank waits for another one as long as a phase may last, and no less: one that
    loads or writes slowly ends nothing before its own deadline does.

    Raises:
        WrongDevicesError: if this rank does not see the GPUs that the plan gives it.
        TimeoutError: if the other ranks do not come within `supervision.setup_timeout_s`.
    """
    device = torch.device("cuda", 0) if context.check_gpus(torch.cuda.device_count()) else torch.device("cpu")
    if spec.world_size == 1:
        yield init_parallel(device=device), None
        return
    timeout_s = context.plan.supervision.setup_timeout_s
    peers = [worker for worker in context.workers("model_worker") if worker != context.worker_id]
    context.presence.enter("join the trainer group", waits_for=peers, is_setting_up=True, deadline_s=timeout_s)
    key = context.keys.trainer_rendezvous(context.incarnation)
    store = shared_store(context.names, key, rank=spec.index, address=context.address, timeout_s=timeout_s)
    parallel = init_parallel(
        rank=spec.index,
        world_size=spec.world_size,
        store=store,
        device=device,
        timeout_s=context.plan.supervision.step_timeout_s,
        join_timeout_s=timeout_s,
    )
    try:
        yield parallel, store
    finally:
        parallel.close()


def shared_store(names: NameService, key: str, *, rank: int, address: str, timeout_s: float) -> Store:
    """The store that all ranks of a trainer group share: rank 0 listens on `address` and says where under `key`.

    Raises:
        TimeoutError: if rank 0 does not show up, or does not answer.
    """
    if rank == 0:
        store, serves_at = host_store(address, timeout_s=timeout_s)
        names.add(key, serves_at)
        return store
    served_at = names.wait(key, timeout_s=timeout_s, waiting_for="model_worker/0")
    return connect_store(served_at, timeout_s=timeout_s)
