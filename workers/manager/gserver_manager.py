"""The generation-server manager: who may start a prompt, which server answers, and when servers take over new weights.

    loop        consumes                             waits for            produces
    requests    Allocate, Schedule, Finish, Report   rollout workers      Allocation, Route
                Evaluate, Answered                   the same, master     held-out problems, what came out of them
    weights     policy_version record                the master           updates of all servers, the gate's version
    servers     generation_servers/* records         name-resolve         the ServerTable; probes of READY servers
    workers     rollout workers' records             name-resolve         freed places of the dead
    commits     trial log                            the master           consumed samples

asyncio only; nothing is locked across I/O, and every loop and every update is a task of one TaskGroup. What it knows it
can lose: Admission and ServerTable are rebuilt from reports, records and the trial log.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from corral.experiments.trial.worker_record import MASTER
from corral.experiments.worker_specs import GserverManagerSpec
from corral.name_resolve.errors import NameNotFoundError, NameServiceError
from corral.scheduling.policy_version import PolicyVersion
from corral.scheduling.staleness import StalenessGate
from corral.workers.checkpoint.committed_ledger import CommittedLedger
from corral.workers.checkpoint.published_weights import NOTHING_IN_USE, PublishedWeights, Refusal, WeightsInUse
from corral.workers.data.prompts import load_row_ids, uids_of_passes
from corral.workers.generation.control import ControlClient
from corral.workers.generation.server_client import ServerError
from corral.workers.generation.weight_updates import WeightsTornError
from corral.workers.lifecycle.worker import BadConfigurationError, Worker, WorkerContext, run_async
from corral.workers.manager.admission import Admission
from corral.workers.manager.evaluations import Evaluations
from corral.workers.manager.routing import Server, ServerState, ServerTable
from corral.workers.manager.weight_tree import Start, plan_updates
from corral.workers.requests.manager_messages import (
    Allocate,
    Allocation,
    Answered,
    Evaluate,
    Finish,
    ManagerRequest,
    Ok,
    Report,
    Route,
    Schedule,
)
from corral.workers.streams.https import open_session
from corral.workers.streams.rpc import AsyncRequestServer

logger = logging.getLogger(__name__)

_VERSION_POLL_S = 0.1  # a local get costs 0.1 ms; the servers hear of new weights at once
_SERVER_POLL_S = 0.25
_PROBE_INTERVAL_S = 2.0
_COMMIT_POLL_S = 0.2
_WORKER_POLL_S = 1.0
_RETRY_PAUSE_S = 0.5
_LONGEST_TURN_S = 10.0  # then rl-status hears the numbers of the gate anew, through the rollout worker
_MOST_REFUSALS = 2  # of one directory by one server: a network file system may show a new file late, but not for ever


@dataclass(frozen=True, slots=True)
class _Turn:
    """A rollout worker waits for a prompt."""

    knows: str
    """What it was told that prompts wait for."""
    answer: asyncio.Future[Allocation] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, allocation: Allocation) -> None:
        """Unless it has just waited too long; a prompt that it was dealt it then gets the next time that it asks."""
        if not self.answer.done():
            self.answer.set_result(allocation)


class GserverManager(Worker):
    """Wires the gate, the routing table and their sources."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._spec = context.specification(GserverManagerSpec)
        rollout = self._spec.rollout
        row_ids = self._load_row_ids()
        self._committed = CommittedLedger(context.trial, row_ids)
        self._admission = Admission(
            StalenessGate(
                batch_size=self._spec.train_batch_size,
                max_staleness=rollout.max_head_offpolicyness,
                max_concurrent=rollout.max_concurrent_rollouts or self._spec.train_batch_size,
                overtaking=rollout.overtaking,
            ),
            passes=self._passes(row_ids),
            is_committed=lambda uid: self._committed.ledger.consumed(uid),
            trainer=MASTER,
        )
        self._table = ServerTable(policy=rollout.schedule_policy)
        self._version: PolicyVersion | None = None
        self._has_gone_back = False
        """Whether commits were rejected that the gate has counted."""
        self._updates: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Under way, by name and incarnation of the server: what a lost host was told holds up nobody else."""
        self._refusals: Counter[tuple[str, str]] = Counter()
        """Of directories of weights, by name of the server."""
        self._refused: Refusal | None = None
        num_servers = len(context.workers("generation_server"))
        self._standing_still = asyncio.Semaphore(max(1, int(rollout.max_updating_share * num_servers)))
        """Has room for the servers that may take over weights at the same time, of those that generate."""
        self._turns: dict[str, _Turn] = {}
        """By name, of the rollout workers that wait for a prompt."""

    def _load_row_ids(self) -> list[str]:
        try:
            self._evaluations = Evaluations(self._spec.held_out)
            return load_row_ids(self._spec.dataset)
        except (OSError, ValueError) as error:
            raise BadConfigurationError(str(error)) from error

    def _passes(self, row_ids: list[str]) -> Callable[[], Iterator[str]]:
        spec = self._spec
        seed, shuffle = self.context.plan.seed, spec.dataset.config.shuffle
        return lambda: uids_of_passes(row_ids, seed=seed, num_epochs=spec.total_train_epochs, shuffle=shuffle)

    def run(self) -> None:
        run_async(self._main(), self.context.stopping)

    async def _main(self) -> None:
        context = self.context
        self._take_in_commits()
        async with (
            open_session(context.trust.client()) as session,
            AsyncRequestServer[ManagerRequest](
                context.security,
                ManagerRequest,
                self._answer,
                address=context.address,
                roles={"rollout_worker", "master_worker"},
                purpose="manager",
            ) as server,
        ):
            self._client = ControlClient(
                session,
                api_key=context.secrets.http_api_key.reveal(),
                admin_key=context.secrets.http_admin_key.reveal(),
                update_timeout_s=self._spec.weights.update_timeout_s,
            )
            with (
                context.lease(context.keys.weights_in_use(), NOTHING_IN_USE) as in_use,
                context.lease(context.keys.manager(), server.endpoint),
            ):
                self._in_use = WeightsInUse(in_use)
                async with asyncio.TaskGroup() as tasks:
                    self._tasks = tasks
                    tasks.create_task(self.every(_VERSION_POLL_S, self._watch_weights))
                    tasks.create_task(self.every(_SERVER_POLL_S, self._watch_servers))
                    tasks.create_task(self.every(_PROBE_INTERVAL_S, self._probe_servers))
                    tasks.create_task(self.every(_COMMIT_POLL_S, self._watch_commits))
                    tasks.create_task(self.every(_WORKER_POLL_S, self._watch_workers))

    # Requests of rollout workers

    async def _answer(self, role: str, request: ManagerRequest) -> msgspec.Struct:
        match request:
            case Allocate():
                return await self._allocate(request)
            case Schedule():
                return self._route(request)
            case Finish():
                self._table.finished(request.uid)
                self._admission.finish(request.worker, request.uid, order=request.order, outcome=request.outcome)
                self._let_in()
                return Ok()
            case Report():
                self._take_in_commits()
                self._admission.report(
                    request.worker,
                    incarnation=request.incarnation,
                    running=dict(msgspec.structs.astuple(admitted) for admitted in request.running),
                    finished=dict(msgspec.structs.astuple(admitted) for admitted in request.finished),
                    dropped=request.dropped,
                )
                self._let_in()
                return Ok()
            case Answered(problem=problem):
                self._table.finished(problem.uid)
                self._evaluations.answered(request)
                self._let_in()
                return Ok()
            case Evaluate():
                return await self._evaluations.evaluate(request, on_begin=self._let_in, longest_s=_LONGEST_TURN_S)

    async def _allocate(self, request: Allocate) -> Allocation:
        """A prompt as soon as the gate opens, so that nobody asks again and again; or why it does not."""
        worker = request.worker
        self._evaluations.book.has(worker, request.held_out)
        answer = self._admission.ask(worker, incarnation=request.incarnation, last=request.last)
        if answer is not None:
            return answer
        turn = self._turns[worker] = _Turn(request.knows)
        self._let_in()
        try:
            async with asyncio.timeout(_LONGEST_TURN_S):
                return await turn.answer
        except TimeoutError:
            return self._admission.refusal()
        finally:
            if self._turns.get(worker) is turn:
                del self._turns[worker]
                self._admission.leave(worker)

    def _let_in(self) -> None:
        """Something has happened that may have opened the gate: those who wait get what there is, or hear the news."""
        if self._version is not None and self._turns:
            for worker, problem in self._evaluations.deal(self._turns, self._version, self._table):
                self._admission.leave(worker)
                self._turns.pop(worker).end(Allocation(held_out=problem))
        for worker, allocation in self._admission.deal():
            self._turns.pop(worker).end(allocation)
        waiting_for = self._admission.waiting_for()
        for worker in [worker for worker, turn in self._turns.items() if turn.knows != waiting_for]:
            self._admission.leave(worker)
            self._turns.pop(worker).end(self._admission.refusal())

    def _route(self, request: Schedule) -> Route:
        if self._version is None:
            return Route(url=None, reason="the trainer has not published weights yet", waits_for=[MASTER])
        if request.failed_url:
            self._suspect_url(request.failed_url)
        if request.oldest_version:
            least_step = PolicyVersion.parse(request.oldest_version).step
        else:  # of the step after which it is trained on, if no more overtake it than the window lets, less eta
            least_step = self._admission.least_version(request.order)
        server = self._table.route(
            request.uid,
            tokens=request.tokens,
            version=self._version,
            least_step=least_step,
            avoided_url=request.failed_url or request.busy_url,
        )
        if server is None:
            reason = f"no generation server is ready at version {self._version}"
            return Route(url=None, reason=reason, waits_for=list(self.context.workers("generation_server")))
        return Route(url=server.url)

    def _suspect_url(self, url: str) -> None:
        for server in self._table.ready():
            if server.url == url:
                server.suspect()

    # Weights and servers

    async def _watch_weights(self) -> None:
        try:
            record = await asyncio.to_thread(self.context.names.get, self.context.keys.policy_version())
        except NameNotFoundError:
            self.context.presence.enter("wait for weights", waits_for=[MASTER])
            return
        published = PublishedWeights.from_json(record)
        version = published.policy_version
        if version != self._version or self._has_gone_back:
            self._version = version
            workers = await asyncio.to_thread(
                self.context.names.get_subtree, self.context.keys.worker_kind_root("rollout_worker")
            )
            self._take_in_commits()
            self._admission.at_version(
                version,
                consumed=self._committed.ledger.trained_count,
                workers=[name.removeprefix("workers/") for name in workers],
                starts_over=self._has_gone_back,
            )
            self._has_gone_back = False
            self._let_in()
            self.context.presence.beat(version=str(version))
        self._start_updates(published)
        if self._table.serving(version):
            self.context.presence.enter("route")
        else:
            servers = self.context.workers("generation_server")
            reason = f"no server holds version {version} yet" if self._table.ready() else "no server is ready"
            if self._refused is not None and self._refused.weights == published.weights:
                reason, servers = f"{reason}: {self._refused.reason}", (MASTER,)
            self.context.presence.enter("route", waiting_for=reason, waits_for=servers)

    def _start_updates(self, published: PublishedWeights) -> None:
        """Bring servers that need it to the present version: all at the same time, or as hosts can give it to them."""
        self._updates = {key: task for key, task in self._updates.items() if not task.done()}
        needing = [
            server
            for server in self._table.needing(published.policy_version)
            if (server.name, server.incarnation) not in self._updates
            and self._refusals[server.name, published.weights] < _MOST_REFUSALS
        ]
        for start in self._plan(needing, published):
            server = start.server
            server.arrives_from = start.arrives_from
            task = self._tasks.create_task(self._update(start, published))
            self._updates[server.name, server.incarnation] = task

    def _plan(self, needing: list[Server], published: PublishedWeights) -> list[Start]:
        """Without a digest, as with initial weights, nobody stages what others could have."""
        if published.digest is None:
            return [Start(server, None) for server in needing]
        return plan_updates(self._table.servers.values(), needing, version=published.version)

    async def _update(self, start: Start, published: PublishedWeights) -> None:
        server, version = start.server, published.version
        is_serving = server.state is ServerState.READY
        try:
            async with self._in_use.reading(published.directory):
                if published.digest is not None and (server.place or is_serving):
                    await self._stage(start, published)
                async with self._standing_still if is_serving else contextlib.nullcontext():
                    server.loading()
                    await self._client.bring_to(server.control, published, sources=start.sources)
            await self._client.probe(server.url)
        except (ServerError, NameServiceError) as error:
            logger.warning("%s could not be brought to version %s: %s", server.name, version, error)
            if isinstance(error, WeightsTornError):
                await self._note_refusal(server, published, str(error))
            await asyncio.sleep(_RETRY_PAUSE_S)
            if server.state is ServerState.READY:  # nothing has touched it: it generates on with what it holds
                server.arrives_from = None
            else:
                server.suspect()
            return
        if server.version is None:
            logger.info("%s joins at version %s", server.name, version)
        server.ready(published.policy_version)
        self._let_in()

    async def _note_refusal(self, server: Server, published: PublishedWeights, reason: str) -> None:
        """A server that finds the same directory damaged again is not sent there any more, and the trainer hears of it.

        Guarantee: damage that lasts is read twice by each server, and then waits for weights that are published anew.
        """
        self._refusals[server.name, published.weights] += 1
        if self._refusals[server.name, published.weights] < _MOST_REFUSALS:
            return
        is_served = bool(self._table.serving(published.policy_version))
        self._refused = Refusal(weights=published.weights, server=server.name, reason=reason, is_served=is_served)
        await self._in_use.refuse(self._refused)

    async def _stage(self, start: Start, published: PublishedWeights) -> None:
        """Before the server takes the version over, its host has it for others."""
        server = start.server
        staged = await self._client.stage(server.control, published, sources=start.sources)
        for source in staged.failed_sources:
            logger.warning("%s did not get version %s from %s", server.name, published.version, source)
            self._table.gave_not(source, version=published.version)
        self._table.staged(server, version=published.version if staged.is_held else None)

    async def _watch_servers(self) -> None:
        root = self.context.keys.generation_servers_root()
        records = await asyncio.to_thread(self.context.names.get_subtree, root)
        present: set[str] = set()
        for name, text in records.items():
            record = json.loads(text)
            server = f"generation_server/{name.rpartition('/')[2]}"
            present.add(server)
            self._table.appeared(
                server,
                url=record["url"],
                control=record["control"],
                incarnation=record["incarnation"],
                place=record["place"],
            )
        for server in self._table.gone(present):
            logger.warning("%s is gone", server)

    async def _probe_servers(self) -> None:
        for server in self._table.ready():
            try:
                await self._client.probe(server.url)
            except ServerError as error:
                if server.state is ServerState.READY:  # not paused by an update of ours in the meantime
                    logger.warning("%s does not answer its probe: %s", server.name, error)
                    server.suspect()

    # Rollout workers and commits

    async def _watch_workers(self) -> None:
        root = self.context.keys.worker_kind_root("rollout_worker")
        records = await asyncio.to_thread(self.context.names.get_subtree, root)
        alive = {f"rollout_worker/{name.rpartition('/')[2]}" for name in records}
        for worker in self._admission.look(alive, now=time.monotonic()):
            logger.warning("%s is gone; others get its prompts", worker)
            self._evaluations.book.lose(worker)
        self._let_in()

    async def _watch_commits(self) -> None:
        self._take_in_commits()

    def _take_in_commits(self) -> None:
        news = self._committed.poll()
        self._admission.consumed(news.trained, news.dropped)
        self._has_gone_back |= news.has_gone_back
