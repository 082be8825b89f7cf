"""The generation-server manager: admits prompts, chooses their servers, and brings servers to new weights.

    loop        consumes                             waits for            produces
    requests    Allocate, Schedule, Finish, Report   rollout workers      Allocation, Route
                EvaluateVersion, Answered            the same, master     held-out problems, what came out of them
    trainer     policy_version, commits, trial log   the master           the gate's version, consumed samples
    records     generation_servers/* records         name-resolve         the ServerTable
    fleet       all of these                         servers              updates and probes, see fleet.py
    workers     connections of rollout workers       rollout workers      freed places of the dead

asyncio only; nothing is locked across I/O, and every loop and every update is a task of one TaskGroup. What it knows it
can lose: Admission and ServerTable are rebuilt from reports, records and the trial log.

Nobody polls: a worker that waits for a prompt or a server is answered when there is one, and the trainer that publishes
a record wakes those who read it. That this news comes is an optimisation; every loop also looks by itself now and then.
"""

import asyncio
import heapq
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from corral.experiments.datasets.dataset import Dataset
from corral.experiments.trial.worker_record import MASTER
from corral.experiments.worker_specs import GserverManagerSpec
from corral.name_resolve.base import NameNotFoundError
from corral.scheduling.policy_version import PolicyVersion
from corral.scheduling.staleness import StalenessGate
from corral.workers.checkpoint.checkpoint import CommittedLedger
from corral.workers.checkpoint.published_weights import NOTHING_IN_USE, PublishedWeights, WeightsInUse
from corral.workers.data.prompts import PlannedPrompts
from corral.workers.generation.control import ControlClient
from corral.workers.lifecycle.worker import Worker, WorkerContext, run_async
from corral.workers.manager.admission import Admission
from corral.workers.manager.evaluations import HeldOutBook
from corral.workers.manager.fleet import Fleet
from corral.workers.manager.routing import ServerTable
from corral.workers.requests.manager_messages import (
    LONGEST_TURN_S,
    LONGEST_WAIT_FOR_SERVER_S,
    Allocate,
    Allocation,
    Answered,
    EvaluateVersion,
    Finish,
    ManagerRequest,
    Ok,
    Report,
    Route,
    Schedule,
    WaitingFor,
)
from corral.workers.streams.https import open_session
from corral.workers.streams.router import Peer
from corral.workers.streams.rpc import RequestServer

logger = logging.getLogger(__name__)

_RECORDS_LOOK_S = 5.0  # besides the news; that a record expired is no news
_FLEET_LOOK_S = 0.5  # at what it knows already
_WORKER_LOOK_S = 1.0
_MOST_NAMED = 16  # of the servers that one may come from, to each of those who wait
_MOST_SERVED_AT_ONCE = 64
_SERVED_PAUSE_S = 0.01
_NO_ROOM = "no generation server has room in its KV cache"
_WAITING_LOOK_S = 5.0


class Waiting(NamedTuple):
    """A waiting request."""

    answer: asyncio.Future[Route]
    request: Schedule
    until: float
    """When the worker gets an answer at the latest, on the caller's clock."""


class WaitingLine:
    """Requests for a server that wait for the same thing, those of the oldest prompts first. Pure.

    add ──► waiting ──take, when it is its turn──► answered
               └──────let_go, for another reason─────┘

    A hundred thousand answers may wait, so each of them is an entry here, and neither a task nor a timer.

    Example:
        line.add(Waiting(answer, Schedule(uid="0:b", order=2, ...), 45.0))
        line.add(Waiting(answer, Schedule(uid="0:a", order=1, ...), 46.0))
        line.first()            # that of 0:a
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Waiting]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, waiting: Waiting) -> None:
        """Of two answers to one prompt the one that came first is first."""
        self._count += 1
        heapq.heappush(self._heap, (waiting.request.order, self._count, waiting))

    def first(self) -> Waiting | None:
        """Whose turn it is; None if nobody waits."""
        return self._heap[0][2] if self._heap else None

    def take(self) -> Waiting:
        """Let the first one go."""
        return heapq.heappop(self._heap)[2]

    def let_go(self, is_one: Callable[[Waiting], bool]) -> list[Waiting]:
        """Let all these go, in order."""
        gone = sorted(entry for entry in self._heap if is_one(entry[2]))
        if gone:
            left = {count for _, count, _ in gone}
            self._heap = [entry for entry in self._heap if entry[1] not in left]
            heapq.heapify(self._heap)
        return [waiting for *_, waiting in gone]


class GserverManager(Worker):
    """Wires the gate, the routing table and their sources."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._spec = context.specification(GserverManagerSpec)
        rollout = self._spec.rollout
        held_out = self._spec.held_out
        datasets = {} if held_out is None else held_out.datasets
        self._held_out = HeldOutBook(
            {name: list(Dataset.planned(dataset)) for name, dataset in datasets.items()},
            most_out=0 if held_out is None else held_out.config.batch_size,
        )
        prompts = PlannedPrompts.load(self._spec.dataset)
        self._committed = CommittedLedger(context.trial, prompts.row_ids)
        self._drawn: dict[str, None] | None = None if self._spec.dataset.config.sampler is None else {}
        """The prompts that the trainer has drawn, in order; None where their order is known from the start."""
        in_order = partial(prompts.uids, seed=context.plan.seed, num_epochs=self._spec.total_train_epochs)
        self._admission = Admission(
            StalenessGate(
                batch_size=self._spec.train_batch_size,
                max_staleness=rollout.max_head_offpolicyness,
                max_concurrent=rollout.max_concurrent_rollouts or self._spec.train_batch_size,
                overtaking=rollout.overtaking,
            ),
            passes=lambda: in_order() if self._drawn is None else list(self._drawn),
            is_committed=lambda uid: self._committed.ledger.consumed(uid),
            is_issued=lambda uid: self._drawn is None or uid in self._drawn,
            trainer=MASTER,
        )
        self._table = ServerTable()
        self._published: PublishedWeights | None = None
        self._version: PolicyVersion | None = None
        self._has_gone_back = False
        """Whether commits were rejected that the gate has counted."""
        self._servers = list(context.workers("generation_server"))
        """As they were planned."""
        self._news = asyncio.Event()
        """Servers may need an update, or there are other weights."""
        self._workers: dict[Peer, str] = {}
        """Rollout workers by connection."""
        self._incarnations: dict[str, str] = {}
        """The process of each that has reported last."""
        self._turns: dict[str, asyncio.Future[Allocation]] = {}
        """By name, of the rollout workers that wait for a prompt."""
        self._announced: WaitingFor | Literal[""] = ""
        """What prompts wait for, as those rollout workers know it."""
        self._without_server = WaitingLine()
        """The requests that wait because no server is ready."""
        self._without_room = WaitingLine()
        """The requests that wait because no ready server has room."""
        self._serves = asyncio.Event()
        """There is a server, or a version, that was not there when they looked."""

    def run(self) -> None:
        run_async(self._main(), self.context.stopping)

    async def _main(self) -> None:
        context = self.context
        await self._take_in_commits()
        async with (
            open_session(context.trust.client(), max_connections=0) as session,  # two of each server at most
            RequestServer[ManagerRequest](
                context.security,
                ManagerRequest,
                self._answer,
                address=context.address,
                roles={"rollout_worker", "master_worker"},
                purpose="manager",
            ) as server,
        ):
            self._server = server
            client = ControlClient(
                session,
                api_key=context.secrets.http_api_key.reveal(),
                admin_key=context.secrets.http_admin_key.reveal(),
                update_timeout_s=self._spec.weights.update_timeout_s,
            )
            with (
                context.lease(context.keys.weights_in_use(), NOTHING_IN_USE) as in_use,
                context.lease(context.keys.manager(), server.endpoint),
            ):
                async with asyncio.TaskGroup() as tasks:
                    self._fleet = Fleet(
                        self._table,
                        client,
                        WeightsInUse(in_use),
                        tasks,
                        on_serving=self._serves.set,
                        on_news=self._news.set,
                    )
                    actions = {
                        context.keys.trainer_root(): self._look_at_trainer,
                        context.keys.generation_servers_root(): self._look_at_records,
                    }
                    tasks.create_task(self.follow(actions, at_least_every_s=_RECORDS_LOOK_S))
                    tasks.create_task(self.every(_FLEET_LOOK_S, self._look_at_fleet, sooner=self._news))
                    tasks.create_task(self.every(math.inf, self._serve_waiting, sooner=self._serves))
                    tasks.create_task(self.every(_WORKER_LOOK_S, self._look_at_workers))
                    tasks.create_task(self.every(_WAITING_LOOK_S, self._look_at_waiting))

    # Requests of rollout workers

    def _answer(self, peer: Peer, request: ManagerRequest) -> msgspec.Struct | Awaitable[msgspec.Struct]:
        if isinstance(request, Allocate | Finish | Report):
            self._workers[peer] = request.worker
        match request:
            case Allocate():
                return self._allocate(request)
            case Schedule():
                return self._route(request)
            case Finish():
                self._table.ended(request.uid, is_answered=request.outcome == "finished")
                self._admission.finish(request.worker, request.uid, order=request.order, outcome=request.outcome)
                self._let_in()
                return Ok()
            case Report():
                return self._note_report(request)
            case Answered(problem=problem):
                self._table.ended(problem.uid, is_answered=bool(request.versions))
                self._held_out.answered(request)
                self._let_in()
                return Ok()
            case EvaluateVersion():
                return self._held_out.evaluate(request, on_begin=self._let_in, longest_s=LONGEST_TURN_S)

    async def _note_report(self, request: Report) -> Ok:
        await self._take_in_commits()
        self._admission.report(
            request.worker,
            incarnation=request.incarnation,
            running={prompt.uid: prompt.order for prompt in request.running},
            finished={prompt.uid: prompt.order for prompt in request.finished},
            dropped=request.dropped,
        )
        if self._incarnations.get(request.worker) != request.incarnation:
            self._incarnations[request.worker] = request.incarnation
            self._has_only(request.worker, {admitted.uid for admitted in request.running})
        self._let_in()
        return Ok()

    async def _allocate(self, request: Allocate) -> Allocation:
        """A prompt as soon as the gate opens, so that nobody asks again and again; or why it does not."""
        worker = request.worker
        self._held_out.has(worker, request.held_out)
        answer = self._admission.ask(worker, incarnation=request.incarnation, last=request.last)
        if answer is not None:
            return answer
        turn: asyncio.Future[Allocation] = asyncio.get_running_loop().create_future()
        self._turns[worker] = turn
        try:
            self._let_in()
            if request.knows == self._announced or turn.done():
                async with asyncio.timeout(LONGEST_TURN_S):
                    return await turn
        except TimeoutError:
            pass  # if a prompt was dealt at this very moment, the worker's next Allocate returns it
        finally:
            if self._turns.get(worker) is turn:
                del self._turns[worker]
                self._admission.leave(worker)
        return self._admission.refusal()

    def _let_in(self) -> None:
        """The gate may have opened: waiting workers get prompts, or the new reason for waiting."""
        self._give_room()
        if self._version is not None and self._turns:
            for worker, problem in self._held_out.deal_to(self._turns, self._version, self._table):
                self._admission.leave(worker)
                self._end_turn(worker, Allocation(held_out=problem))
        for worker, allocation in self._admission.deal():
            self._end_turn(worker, allocation)
        waiting_for = self._admission.waiting_for()
        if waiting_for != self._announced:
            self._announced, refusal = waiting_for, self._admission.refusal()
            for worker in list(self._turns):
                self._admission.leave(worker)
                self._end_turn(worker, refusal)

    def _end_turn(self, worker: str, allocation: Allocation) -> None:
        turn = self._turns.pop(worker)
        if not turn.done():
            turn.set_result(allocation)

    def _route(self, request: Schedule) -> Route | asyncio.Future[Route]:
        """A server as soon as one may make what is asked for; or why none may, if the caller does not know it."""
        route = self._choose(request)
        if route.url is not None or route.reason != request.knows:
            return route
        answer: asyncio.Future[Route] = asyncio.get_running_loop().create_future()
        request = msgspec.structs.replace(request, failed_url="", lost_url="", busy_url="")  # it may have come back
        self._let_wait(Waiting(answer, request, time.monotonic() + LONGEST_WAIT_FOR_SERVER_S), route)
        return answer

    def _let_wait(self, waiting: Waiting, refusal: Route) -> None:
        line = self._without_room if refusal.lacks_room else self._without_server
        line.add(waiting)

    async def _serve_waiting(self) -> None:
        """Requests that wait for a server look again, some at a time: the first ready server must not get them all."""
        self._let_in()  # what is held out waits for a version
        for number, waiting in enumerate(self._without_server.let_go(lambda _: True)):
            if (refusal := self._refusal_of(waiting)) is not None:
                self._let_wait(waiting, refusal)
            if number % _MOST_SERVED_AT_ONCE == _MOST_SERVED_AT_ONCE - 1:
                await asyncio.sleep(_SERVED_PAUSE_S)

    def _give_room(self) -> None:
        """Groups may have ended: requests that wait for room get it."""
        while (first := self._without_room.first()) is not None and self._refusal_of(first) is None:
            self._without_room.take()

    def _refusal_of(self, waiting: Waiting) -> Route | None:
        """None once who waits is answered: if there is something to tell it, that is now."""
        request = waiting.request
        if not waiting.answer.done():
            route = self._choose(request, is_first=True)
            if route.url is None and route.reason == request.knows:
                return route
            waiting.answer.set_result(route)
        return None

    async def _look_at_waiting(self) -> None:
        now = time.monotonic()
        self._send_back(lambda waiting: waiting.until <= now)

    def _send_back(self, is_one: Callable[[Waiting], bool]) -> None:
        """These wait no more: who is still there asks again."""
        for waiting in (*self._without_server.let_go(is_one), *self._without_room.let_go(is_one)):
            if not waiting.answer.done():
                waiting.answer.set_result(self._no_route(waiting.request.knows))

    def _has_only(self, worker: str, uids: Collection[str]) -> None:
        """A rollout worker has these groups only: what it had besides waits for no server and is on none."""
        self._send_back(lambda waiting: waiting.request.worker == worker and waiting.request.uid not in uids)
        self._table.has_only(worker, uids)

    def _no_route(self, reason: str, *, lacks_room: bool = False) -> Route:
        return Route(url=None, reason=reason, lacks_room=lacks_room, waits_for=self._servers[:_MOST_NAMED])

    def _choose(self, request: Schedule, *, is_first: bool = False) -> Route:
        """
        Args:
            is_first: whether it is its turn; else it does not overtake those who wait for room.
        """
        if self._version is None:
            return Route(url=None, reason="the trainer has not published weights yet", waits_for=[MASTER])
        has_left = request.failed_url or request.lost_url or request.busy_url
        is_new = not (has_left or self._table.is_placed(request.uid))
        if self._without_room and is_new and not is_first:
            return self._no_route(_NO_ROOM, lacks_room=True)
        if request.oldest_version:
            least_step = PolicyVersion.parse(request.oldest_version).step
        else:
            least_step = self._admission.least_version(request.due_step)
        server = self._table.route(
            request.uid,
            tokens=request.tokens,
            version=self._version,
            least_step=least_step,
            worker=request.worker,
            failed_url=request.failed_url,
            lost_url=request.lost_url,
            busy_url=request.busy_url,
        )
        if server is not None:
            groups = len(server.tokens_by_uid)
            return Route(url=server.url, server=server.name, groups=groups, kv_share=server.kv_share)
        if any(self._table.serving(self._version, least_step=least_step)):
            return self._no_route(_NO_ROOM, lacks_room=True)
        return self._no_route(f"no generation server is ready at version {self._version}")

    # The trainer, the servers, the rollout workers

    async def _look_at_trainer(self) -> None:
        await self._take_in_commits()
        await self._look_at_prompts()
        try:
            record = await asyncio.to_thread(self.context.names.get, self.context.keys.policy_version())
        except NameNotFoundError:
            if self._published is None:
                self.context.presence.enter("wait for weights", waits_for=[MASTER])
            return
        self._published = PublishedWeights.from_json(record)
        version = self._published.policy_version
        if version != self._version or self._has_gone_back:
            self._version = version
            workers = await asyncio.to_thread(
                self.context.names.get_subtree, self.context.keys.worker_kind_root("rollout_worker")
            )
            await self._take_in_commits()
            self._admission.at_version(
                version,
                consumed=self._committed.ledger.trained_count,
                workers=[name.removeprefix("workers/") for name in workers],
                starts_over=self._has_gone_back,
            )
            self._has_gone_back = False
            self.context.presence.beat(version=str(version))
            self._serves.set()
        self._let_in()
        self._news.set()

    async def _look_at_prompts(self) -> None:
        """Where a sampler decides which prompts come next."""
        if self._drawn is None:
            return
        try:
            record = await asyncio.to_thread(self.context.names.get, self.context.keys.prompts())
        except NameNotFoundError:
            return
        drawn = dict.fromkeys(msgspec.json.decode(record, type=list[str]))
        if list(drawn) != list(self._drawn):
            self._drawn = drawn
            self._admission.prompts_have_changed()

    async def _look_at_records(self) -> None:
        root = self.context.keys.generation_servers_root()
        self._fleet.take_in(await asyncio.to_thread(self.context.names.get_subtree, root))
        self._news.set()

    async def _look_at_fleet(self) -> None:
        """All servers are on their way to the present weights, and the requests that wait for one are answered."""
        if self._published is None:
            return
        await self._fleet.bring_up(self._published)
        self.context.presence.beat(troubles=self._table.troubles())
        version = self._published.policy_version
        if any(self._table.serving(version)):
            self.context.presence.enter("route")
        else:
            servers: Sequence[str] = self._servers
            reason = f"no server holds version {version} yet" if self._table.has_ready else "no server is ready"
            if refusal := self._fleet.refusal_of(self._published):
                reason, servers = f"{reason}: {refusal}", (MASTER,)
            self.context.presence.enter("route", waiting_for=reason, waits_for=servers)

    async def _look_at_workers(self) -> None:
        self._workers = {peer: worker for peer, worker in self._workers.items() if self._server.is_connected(peer)}
        for worker in self._admission.look(set(self._workers.values()), now=time.monotonic()):
            logger.warning("%s is gone; others get its prompts", worker)
            self._has_only(worker, ())
            self._held_out.lose(worker)
        self._let_in()

    async def _take_in_commits(self) -> None:
        news = await self._committed.look()
        self._admission.note_commit(news.trained, news.dropped)
        self._has_gone_back |= news.has_gone_back
