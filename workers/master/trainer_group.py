"""TrainerGroup: the model workers during one trainer epoch, and the master's requests to them by rank.

    tell(requests by rank)  ──► answered at once, whatever the rank computes       samples, gives
    start(requests by rank) ──► run in the order of the rank's requests            calls, weights, checkpoints

What rollout workers have delivered to any rank comes as soon as the rank says so (`Arrivals`):

    take() ──one Fetch that waits──► each rank that has none ──something arrived, or nothing for a while──► reply
       ▲                                                                                                      │
       └────────────────────────────────────────────────────────────────────────────────────── wake() ◄───────┘

Nobody polls: a rank holds its Fetch until it has something to say. What it then says is repeated by the request stream
until it is here, and if it cannot be, the rank counts as dead and the epoch ends: so nothing that a rank has taken in
is forgotten while the epoch lasts, and the next one's session asks for it again.

It binds the epoch's request stream, and dies with the first model worker that does. Which calls are started when is
decided in step.py, what a call consists of in calls.py.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.model_function_call import ModelName
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.lifecycle.worker import WorkerContext
from corral.workers.master.sample_source import BufferedSample, buffered
from corral.workers.requests.client import RankClient
from corral.workers.requests.messages import (
    ClearDataCache,
    Fetch,
    Initialize,
    InitializedReply,
    LoadedModel,
    LoadRows,
    MetadataReply,
    PiggybackedRequest,
    Reject,
    Rejection,
    ReplyPayload,
    Request,
    SaveCheckpoint,
    SaveWeights,
    Written,
    WrittenReply,
)
from corral.workers.streams.errors import PeerDeadError, RemoteError, StreamTimeoutError
from corral.workers.streams.rpc import PendingReplies

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CONTROL_DEADLINE_S = 60.0
_FETCH_AT_MOST = 1024  # samples in one reply
_FETCH_WAIT_S = 60.0  # a rank without arrivals costs a message a minute, and a link that is dead is noticed otherwise
_FETCH_DEADLINE_S = _FETCH_WAIT_S + 60.0
_DEATH_NOTICE_S = 4.0  # longer than the stream gives a worker that has disconnected to come back


class TrainerGroupLostError(RuntimeError):
    """A model worker is gone, or cannot be worked with: the epoch is over, the next one starts from the last commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFiles:
    """The files that all ranks of a role have written together, or the errors."""

    state: Mapping[str, FileEntry]
    weights: Mapping[str, FileEntry]
    problems: Mapping[str, str]
    """The errors of the file system, by worker; empty if all files are on disk."""
    lacks_room: bool = False
    """Whether a disk is full."""


class Arrivals:
    """What rollout workers have delivered to some ranks, as soon as a rank says so. Belongs to the client's loop.

    Example:
        arrivals = Arrivals(client, {0: "model_worker/0", 1: "model_worker/1"}, wake=event.set)
        await arrivals.take()   # []
        await event.wait()
        await arrivals.take()   # [BufferedSample(owner=1, ...), ...]
    """

    def __init__(self, client: RankClient, worker_by_rank: Mapping[int, str], *, wake: Callable[[], None]) -> None:
        """
        Args:
            worker_by_rank: ids of those that receive.
            wake: called whenever there is something to take, be it an error.
        """
        self._client = client
        self._worker_by_rank = worker_by_rank
        self._wake = wake
        self._asked: dict[int, PendingReplies[ReplyPayload]] = {}

    async def take(self) -> list[BufferedSample]:
        """What has arrived since the last call, each with the rank that holds it; who has answered is asked again.

        Raises: what `PendingReplies.results` does.
        """
        arrived: list[BufferedSample] = []
        for rank, worker in self._worker_by_rank.items():
            asked = self._asked.get(rank)
            if asked is not None:
                if asked.missing:
                    continue
                arrived += _samples({rank: (await asked.results())[worker]})
            request = Fetch(max_samples=_FETCH_AT_MOST, wait_s=_FETCH_WAIT_S)
            self._asked[rank] = self._client.post({worker: request}, deadline_s=_FETCH_DEADLINE_S)
            self._asked[rank].when_settled(self._wake)
        return arrived


class TrainerGroup:
    """The model workers during one trainer epoch."""

    def __init__(self, context: WorkerContext, spec: MasterWorkerSpec, *, epoch: int) -> None:
        self._context = context
        self._spec = spec
        self._epoch = epoch
        self.workers: Sequence[str] = [f"model_worker/{rank}" for rank in range(spec.num_model_workers)]
        """By rank."""
        self._step_timeout_s = context.plan.supervision.step_timeout_s
        self.news = asyncio.Event()
        """Set when samples have arrived, and when a worker has died; who looks at either clears it first."""
        self._lost_because = ""
        self._unwritten: list[PendingReplies[ReplyPayload]] = []

    async def __aenter__(self) -> Self:
        """Publish where the master listens, and wait until all model workers of one start are connected."""
        context = self._context
        with ExitStack() as stack:
            self._client = stack.enter_context(
                RankClient(
                    context.security,
                    address=context.address,
                    epoch=self._epoch,
                    workers=frozenset(self.workers),
                    on_worker_dead=self._note_dead,
                )
            )
            self._arrivals = Arrivals(
                self._client,
                {rank: self.workers[rank] for rank in self._spec.sample_ranks},
                wake=self.news.set,
            )
            owner = f"epoch {self._epoch} {context.incarnation}"
            stack.enter_context(context.lease(context.keys.master_stream(), self._client.endpoint, owner=owner))
            with context.presence.during("connect", waits_for=self.workers, deadline_s=None):
                timeout_s = context.plan.supervision.setup_timeout_s
                await self._client.wait_for_workers(self.workers, timeout_s=timeout_s)
            self._opened = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._opened.close()

    def check_alive(self) -> None:
        """Raise TrainerGroupLostError if a model worker has died since the epoch began."""
        if self._lost_because:
            raise TrainerGroupLostError(self._lost_because)

    # Requests, in the order of an epoch's life

    async def initialize(
        self, *, step: int, weights: Mapping[str, Path], states: Mapping[str, Path]
    ) -> dict[str, LoadedModel]:
        """Let every rank load its roles' weights and, where there is a commit, state; whatever it held is forgotten.

        How long that takes depends on the size of the model and on the file system. Each rank watches its own progress
        and leaves when there is none, so this waits for as long as all of them live.

        Returns:
            What each model has become, by its name.
        """
        request = Initialize(
            weights={role: str(directory) for role, directory in weights.items()},
            states={role: str(directory) for role, directory in states.items()},
            step=step,
        )
        replies = await self.start(dict.fromkeys(range(len(self.workers)), request), deadline_s=math.inf)
        loaded = [reply.models for reply in replies.values() if isinstance(reply, InitializedReply)]
        return {name: model for models in loaded for name, model in models.items()}

    async def fetch(self) -> list[BufferedSample]:
        """What has arrived since the last call, at once; `news` is set when there is more."""
        return await self._guard(self._arrivals.take())

    async def load_rows(self, uids: Sequence[str]) -> list[BufferedSample]:
        """Deal rows of the dataset over the ranks that read them."""
        ranks = self._spec.sample_ranks
        shards = {rank: list(uids[number :: len(ranks)]) for number, rank in enumerate(ranks)}
        return _samples(await self.start({rank: LoadRows(uids=shard) for rank, shard in shards.items() if shard}))

    async def reject(self, uids_by_rank: Mapping[int, Sequence[str]], rejection: Rejection) -> None:
        """Let each rank throw its samples away, and tell who sent them."""
        await self.tell({rank: Reject(uids=list(uids), rejection=rejection) for rank, uids in uids_by_rank.items()})

    def clear(self, uids_by_rank: Mapping[int, list[str]]) -> None:
        """Free the tensors of samples that were trained on, where they are, with the next message to each rank."""
        self.attach({rank: ClearDataCache(uids=uids) for rank, uids in uids_by_rank.items()})

    async def save_weights(self, role: str, directory: Path, *, base: Path | None = None) -> Mapping[str, FileEntry]:
        """Write a role's weights in Hugging Face format, with deltas from `base`; the files, which are on disk then."""
        request = SaveWeights(role=role, directory=str(directory), base="" if base is None else str(base))
        replies = await self.start(dict.fromkeys(self._spec.mesh(ModelName(role)).ranks, request))
        return _joined({self.workers[rank]: reply for rank, reply in replies.items()}).weights

    async def begin_save(self, role: str, state: Path, weights: Path | None, *, copies: bool) -> None:
        """Let every rank copy what a commit has of the role, and begin to write it; steps may follow then.

        Args:
            state: directory for what training resumes from.
            weights: directory for the weights; None writes none.
            copies: False lets them write first.
        """
        request = SaveCheckpoint(
            role=role, state=str(state), weights="" if weights is None else str(weights), copies=copies
        )
        await self.start(dict.fromkeys(self._spec.mesh(ModelName(role)).ranks, request))

    async def written(self, role: str) -> WrittenFiles:
        """What `begin_save` has begun to write, when every rank has ended; they have as long as a step."""
        ranks = self._spec.mesh(ModelName(role)).ranks
        pending = self._client.post(
            {self.workers[rank]: Written(role=role) for rank in ranks}, deadline_s=self._step_timeout_s
        )
        self._unwritten.append(pending)
        try:
            return _joined(await self._guard(pending.results()))
        finally:
            self._unwritten.remove(pending)

    def still_writing(self) -> list[str]:
        """The workers whose copies are not on disk yet."""
        return sorted({worker for pending in self._unwritten for worker in pending.missing})

    def host_by_rank(self) -> dict[int, str]:
        """Which ranks share a host, and with it memory."""
        hellos = {rank: self._client.hello_of(worker) for rank, worker in enumerate(self.workers)}
        return {rank: hello.host if hello is not None else "" for rank, hello in hellos.items()}

    # Any request

    def attach(self, requests: Mapping[int, PiggybackedRequest]) -> None:
        """Requests that ride with the next message to their ranks, whose answer is theirs, too."""
        self._client.attach({self.workers[rank]: request for rank, request in requests.items()})

    async def tell(self, requests: Mapping[int, Request]) -> dict[int, ReplyPayload]:
        """Non-blocking requests to some ranks."""
        return await self.start(requests, deadline_s=_CONTROL_DEADLINE_S)

    async def start(
        self, requests: Mapping[int, Request], *, deadline_s: float | None = None
    ) -> dict[int, ReplyPayload]:
        """Requests that may take as long as a step; blocking ones run after those started there before."""
        by_worker = {self.workers[rank]: request for rank, request in requests.items()}
        deadline_s = self._step_timeout_s if deadline_s is None else deadline_s
        replies = await self._guard(self._client.post(by_worker, deadline_s=deadline_s).results())
        return {rank: replies[self.workers[rank]] for rank in requests}

    # Parts

    async def _guard(self, results: Awaitable[T]) -> T:
        try:
            return await results
        except (PeerDeadError, StreamTimeoutError) as error:
            raise TrainerGroupLostError(str(error)) from error
        except RemoteError:
            # A rank whose collective failed because another rank died may say so before that death is noticed here.
            await asyncio.sleep(_DEATH_NOTICE_S)
            self.check_alive()
            raise

    def _note_dead(self, worker: str) -> None:
        self._lost_because = f"{worker} died"
        self.news.set()


def _samples(replies: Mapping[int, ReplyPayload]) -> list[BufferedSample]:
    return [
        sample
        for rank, reply in sorted(replies.items())
        if isinstance(reply, MetadataReply)
        for sample in buffered(reply, owner=rank)
    ]


def _joined(replies: Mapping[str, ReplyPayload]) -> WrittenFiles:
    """What all ranks have written together, given their replies by worker; each file is one rank's."""
    written = {worker: reply for worker, reply in replies.items() if isinstance(reply, WrittenReply)}
    return WrittenFiles(
        state={name: entry for reply in written.values() for name, entry in reply.state.items()},
        weights={name: entry for reply in written.values() for name, entry in reply.weights.items()},
        problems={worker: reply.failed_because for worker, reply in written.items() if reply.failed_because},
        lacks_room=any(reply.lacks_room for reply in written.values()),
    )
