"""TrainerGang: what the master asks of all model workers together, in the words of one train step.

    run_step(batch) ──► level by level of the dataflow graph: post every call, await ──► amend ──► statistics
                              │
                              └─ for each call: balance the batch over data-parallel ranks, plan who gives what to whom

One gang serves one trainer epoch: it binds the epoch's request stream, and dies with the first model worker that does.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.dataflow import CallType, DataflowGraph, ModelFunctionCall
from corral.scheduling.packing import TYPICAL_SHAPE, forward_flops, partition_near_owners
from corral.scheduling.policy_version import PolicyVersion
from corral.scheduling.redistribution import Demand
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.lifecycle.worker import WorkerContext
from corral.workers.master.arrivals import Arrivals
from corral.workers.master.sequence_buffer import BufferedSample, SequenceBuffer
from corral.workers.master.transfers import TransferPlanner, Transfers
from corral.workers.requests.client import PendingReplies, RequestClient
from corral.workers.requests.messages import (
    ClearDataCache,
    Evaluate,
    FilesReply,
    Inference,
    Initialize,
    LoadRows,
    MetadataReply,
    Reject,
    Rejection,
    ReplyPayload,
    Request,
    SampleMetadata,
    SaveCheckpoint,
    SaveWeights,
    StatsReply,
    TrainReply,
    TrainStep,
)
from corral.workers.streams.errors import PeerDeadError, RemoteError, StreamTimeoutError

logger = logging.getLogger(__name__)

_CONTROL_DEADLINE_S = 60.0
_REPORTING_RANK = 0  # statistics are those of the global batch on every rank, so that one says them for all
_TRAINING_FORWARDS = 3  # a backward pass takes as much as two forward passes
_DEATH_NOTICE_S = 4.0  # longer than the stream gives a worker that has disconnected to come back


class GangLostError(RuntimeError):
    """A model worker is gone, or cannot be worked with: the epoch is over, the next one starts from the last commit."""


class TrainerGang:
    """The model workers during one trainer epoch."""

    def __init__(self, context: WorkerContext, spec: MasterWorkerSpec, graph: DataflowGraph, *, epoch: int) -> None:
        self.graph = graph
        self._context = context
        self._spec = spec
        self._epoch = epoch
        self._workers = [f"model_worker/{rank}" for rank in range(spec.num_model_workers)]
        self._step_timeout_s = context.plan.supervision.step_timeout_s
        self.news = asyncio.Event()
        """Set when samples have arrived, and when a worker has died; who looks at either clears it first."""
        self._lost_because = ""

    async def __aenter__(self) -> Self:
        """Publish where the master listens, and wait until all model workers of one start of the gang are connected."""
        context = self._context
        with ExitStack() as stack:
            self._client = stack.enter_context(
                RequestClient(
                    context.security,
                    address=context.address,
                    epoch=self._epoch,
                    workers=frozenset(self._workers),
                    on_worker_dead=self._note_dead,
                )
            )
            self._arrivals = Arrivals(self._client, self._workers, wake=self.news.set)
            owner = f"epoch {self._epoch} {context.incarnation}"
            stack.enter_context(context.lease(context.keys.master_stream(), self._client.endpoint, owner=owner))
            await self._wait_for_workers()
            self._transfers = TransferPlanner(self._host_by_rank())
            self._opened = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._opened.close()

    def check_alive(self) -> None:
        """Raise GangLostError if a model worker has died since the epoch began."""
        if self._lost_because:
            raise GangLostError(self._lost_because)

    # Requests, in the order of an epoch's life

    async def initialize(self, *, step: int, weights: Mapping[str, Path], states: Mapping[str, Path]) -> None:
        """Let every rank load its roles' weights and, where there is a commit, state; whatever it held is forgotten.

        How long that takes depends on the size of the model and on the file system. Each rank watches its own progress
        and leaves when there is none, so this waits for as long as all of them live.
        """
        request = Initialize(
            weights={role: str(directory) for role, directory in weights.items()},
            states={role: str(directory) for role, directory in states.items()},
            step=step,
            seed=self._context.plan.seed,
        )
        await self._all(request, deadline_s=math.inf)

    async def fetch(self) -> list[BufferedSample]:
        """What has arrived since the last call, at once; `news` is set when there is more."""
        self._arrivals.ask()
        if self._arrivals.failed is not None:
            await self._guard(self._arrivals.failed)
        return [_buffered(metadata, owner=rank) for rank, metadata in self._arrivals.take()]

    async def load_rows(self, uids: Sequence[str]) -> list[BufferedSample]:
        """Deal rows of the dataset over the ranks, which read them."""
        shares = {rank: list(uids[rank :: len(self._workers)]) for rank in range(len(self._workers))}
        return self._samples(await self._tell({rank: LoadRows(uids=share) for rank, share in shares.items() if share}))

    async def reject(self, uids_by_rank: Mapping[int, Sequence[str]], rejection: Rejection) -> None:
        """Let each rank throw its samples away, and tell who sent them."""
        await self._tell({rank: Reject(uids=list(uids), rejection=rejection) for rank, uids in uids_by_rank.items()})

    async def clear(self, uids_by_rank: Mapping[int, Sequence[str]]) -> None:
        """Free the tensors of samples that were trained on, where they are."""
        await self._tell({rank: ClearDataCache(uids=list(uids)) for rank, uids in uids_by_rank.items()})

    async def run_step(self, batch: Sequence[str], buffer: SequenceBuffer, *, step: int) -> TrainReply:
        """Run the dataflow graph on a batch; returns what its train steps did, with their statistics."""
        partition = self._balance([buffer.samples[uid] for uid in batch])
        done: list[TrainReply] = []
        moved_bytes = 0
        for level in self.graph.levels:
            calls = [self.graph.call(name) for name in level]
            # Planned one after the other: what one call brings to a rank, the next one finds there.
            transfers = [self._transfers.plan(_demands(call, partition), buffer) for call in calls]
            moved_bytes += sum(of_call.size_bytes for of_call in transfers)
            given = [self._post_gives(of_call) for of_call in transfers]
            pending = [
                self._post_call(call, partition, of_call, step=step)
                for call, of_call in zip(calls, transfers, strict=True)
            ]
            for gives in given:  # a rank that lacks what it is to give says so, and nobody waits for it in vain
                await self._guard(gives)
            for call, replies in zip(calls, pending, strict=True):
                done += self._absorb(call, await self._guard(replies), partition, buffer)
        return TrainReply(
            stats={name: value for reply in done for name, value in reply.stats.items()}
            | {"data/transfer_bytes": float(moved_bytes)},
            num_updates=sum(reply.num_updates for reply in done),
            num_nonfinite=sum(reply.num_nonfinite for reply in done),
            is_damaged=any(reply.is_damaged for reply in done),
        )

    async def evaluate(self, *, step: int) -> dict[str, float]:
        """Answer the held-out problems with the present weights."""
        requests: dict[str, Request] = dict.fromkeys(self._workers, Evaluate(version=step, reports=False))
        requests[self._workers[_REPORTING_RANK]] = Evaluate(version=step)
        return _stats(await self._run(requests, deadline_s=self._step_timeout_s))

    async def save_weights(self, role: str, directory: Path) -> dict[str, FileEntry]:
        """Write a role's weights in Hugging Face format; the files, which are on disk then."""
        return _files(
            await self._all(SaveWeights(role=role, directory=str(directory)), deadline_s=self._step_timeout_s)
        )

    async def save_state(self, role: str, directory: Path) -> dict[str, FileEntry]:
        """Write what a role's training resumes from; the files of all ranks, which are on disk then."""
        return _files(
            await self._all(SaveCheckpoint(role=role, directory=str(directory)), deadline_s=self._step_timeout_s)
        )

    # Parts

    def _post_call(
        self,
        call: ModelFunctionCall,
        partition: list[list[str]],
        transfers: Transfers,
        *,
        step: int,
    ) -> PendingReplies:
        """Send every rank its own share of a call, and what it has to take for it."""
        requests: dict[str, Request] = {}
        for rank, (worker, uids) in enumerate(zip(self._workers, partition, strict=True)):
            if call.call_type is CallType.TRAIN_STEP:
                reports = rank == _REPORTING_RANK
                requests[worker] = TrainStep(mfc=call.name, uids=uids, version=step, reports=reports)
            else:
                requests[worker] = Inference(mfc=call.name, uids=uids, version=step)
        return self._client.post(
            requests,
            deadline_s=self._step_timeout_s,
            pre_hooks={self._workers[rank]: [hook] for rank, hook in transfers.takes.items()},
            flush=True,
        )

    def _post_gives(self, transfers: Transfers) -> PendingReplies:
        """Let every rank send what others take from it for a call, whatever it computes at present."""
        requests = {self._workers[rank]: give for rank, give in transfers.gives.items()}
        return self._client.post(requests, deadline_s=_CONTROL_DEADLINE_S)

    def _absorb(
        self,
        call: ModelFunctionCall,
        replies: Mapping[str, ReplyPayload],
        partition: list[list[str]],
        buffer: SequenceBuffer,
    ) -> list[TrainReply]:
        if call.call_type is CallType.TRAIN_STEP:
            return [reply for reply in replies.values() if isinstance(reply, TrainReply)]
        buffer.amend(call.output_keys, {uid: rank for rank, uids in enumerate(partition) for uid in uids})
        return []

    def _balance(self, samples: Sequence[BufferedSample]) -> list[list[str]]:
        """The uids of each data-parallel rank, such that all have the same work, and little has to move for that."""
        if len(self._workers) == 1:
            return [[sample.uid for sample in samples]]
        shapes = [
            self._spec.shape_by_role.get(call.role, TYPICAL_SHAPE)
            for call in self.graph.calls
            for _ in range(_TRAINING_FORWARDS if call.call_type is CallType.TRAIN_STEP else 1)
        ]
        costs = forward_flops((sample.num_tokens for sample in samples), shapes)
        parts = partition_near_owners(costs, [sample.owner for sample in samples], num_parts=len(self._workers))
        return [[samples[index].uid for index in part] for part in parts]

    def _samples(self, replies: Mapping[str, ReplyPayload]) -> list[BufferedSample]:
        samples: list[BufferedSample] = []
        for rank, worker in enumerate(self._workers):
            reply = replies.get(worker)
            if isinstance(reply, MetadataReply):
                samples.extend(_buffered(metadata, owner=rank) for metadata in reply.samples)
        return samples

    async def _all(self, request: Request, *, deadline_s: float) -> dict[str, ReplyPayload]:
        """A blocking request to every rank."""
        return await self._run(dict.fromkeys(self._workers, request), deadline_s=deadline_s)

    async def _run(self, requests: Mapping[str, Request], *, deadline_s: float) -> dict[str, ReplyPayload]:
        """Blocking requests to some ranks, which start at once."""
        return await self._guard(self._client.post(requests, deadline_s=deadline_s, flush=True))

    async def _tell(self, requests: Mapping[int, Request]) -> dict[str, ReplyPayload]:
        """Non-blocking requests to some ranks."""
        by_worker = {self._workers[rank]: request for rank, request in requests.items()}
        return await self._guard(self._client.post(by_worker, deadline_s=_CONTROL_DEADLINE_S))

    async def _guard(self, pending: PendingReplies) -> dict[str, ReplyPayload]:
        try:
            return await pending.results()
        except (PeerDeadError, StreamTimeoutError) as error:
            raise GangLostError(str(error)) from error
        except RemoteError:
            # A rank whose collective failed because another rank died may say so before that death is noticed here.
            await asyncio.sleep(_DEATH_NOTICE_S)
            self.check_alive()
            raise

    @property
    def workers(self) -> Sequence[str]:
        """The model workers, by rank."""
        return self._workers

    def _host_by_rank(self) -> dict[int, str]:
        hellos = {rank: self._client.hello_of(worker) for rank, worker in enumerate(self._workers)}
        return {rank: hello.host if hello is not None else "" for rank, hello in hellos.items()}

    async def _wait_for_workers(self) -> None:
        timeout_s = self._context.plan.supervision.setup_timeout_s
        with self._context.presence.during("connect", waits_for=self._workers, deadline_s=None):
            await self._client.wait_for_workers(self._workers, timeout_s=timeout_s)

    def _note_dead(self, worker: str) -> None:
        self._lost_because = f"{worker} died"
        self.news.set()


def _demands(call: ModelFunctionCall, partition: list[list[str]]) -> list[Demand]:
    """Each rank needs the call's inputs for its share of the batch."""
    return [Demand(ranks=(rank,), uids=uids, keys=call.input_keys) for rank, uids in enumerate(partition)]


def _buffered(metadata: SampleMetadata, *, owner: int) -> BufferedSample:
    return BufferedSample(
        uid=metadata.uid,
        order=metadata.order,
        owner=owner,
        num_tokens=metadata.num_tokens,
        versions=frozenset(PolicyVersion.parse(tag) for tag in metadata.versions),
        keys=frozenset(metadata.keys),
        dropped_because=metadata.dropped_because,
    )


def _files(replies: Mapping[str, ReplyPayload]) -> dict[str, FileEntry]:
    """What all ranks have written together; each file is one rank's."""
    return {
        name: entry
        for reply in replies.values()
        if isinstance(reply, FilesReply)
        for name, entry in reply.files.items()
    }


def _stats(replies: Mapping[str, ReplyPayload]) -> dict[str, float]:
    """Of the rank that reports."""
    return next((dict(reply.stats) for reply in replies.values() if isinstance(reply, StatsReply)), {})
