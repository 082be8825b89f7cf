"""What the manager of a large trial costs: real sockets with CURVE, real HTTPS, a real Redis; nothing is computed.

    python benchmarks/manager_load.py [--servers 512] [--workers 512] [--groups 10000] [--life-s 60] [--answers 8]
                                      [--receivers 64] [--seconds 30]

    this process        a request every 20 ms, beside all others: p50, p99
    manager             GserverManager, alone in its process: its CPU is what is measured
    servers             a port with TLS each, which say that they are well, and take any weights over at once
    rollout workers     connections to the manager and to Redis each; they read records and the log as real ones do;
                        a group asks for a server for each of its answers, lasts for a while, and ends

    no server ready     all groups were dealt and wait for a server; every worker waits for a prompt as well
    open                groups end and others begin; half-way all servers take new weights over, and a commit comes
    gate shut           all groups run on; every worker waits for a prompt

A group lasts from none to twice `--life-s`, evenly. Redis values are what names were read as, by manager and workers
together; opens are those of files of the trial directory.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil
from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from corral.experiments.config.rollout import RolloutConfig  # noqa: E402 - found through the line above
from corral.experiments.datasets.dataset import Dataset  # noqa: E402
from corral.experiments.plan import RunPlan  # noqa: E402
from corral.experiments.trial.directory import TrialDirectory  # noqa: E402
from corral.experiments.trial.guarded_listener import GuardedListener  # noqa: E402
from corral.experiments.trial.secrets import TrialSecrets  # noqa: E402
from corral.experiments.trial.trust import Trust  # noqa: E402
from corral.experiments.worker_specs import GserverManagerSpec  # noqa: E402
from corral.launcher.trial.redis_server import REDIS_USERNAME, RedisServer  # noqa: E402
from corral.name_resolve.keys import TrialKeys  # noqa: E402
from corral.name_resolve.redis import RedisNameService  # noqa: E402
from corral.workers.checkpoint.checkpoint import CommittedLedger  # noqa: E402
from corral.workers.checkpoint.published_weights import PublishedWeights  # noqa: E402
from corral.workers.lifecycle.worker import Worker, WorkerContext  # noqa: E402
from corral.workers.manager.gserver_manager import GserverManager  # noqa: E402
from corral.workers.requests.manager_messages import (  # noqa: E402
    Allocate,
    Allocation,
    Finish,
    ManagerReply,
    ManagerRequest,
    Report,
    Route,
    Schedule,
)
from corral.workers.rollout import rollout_worker  # noqa: E402
from corral.workers.streams.https import serve  # noqa: E402
from corral.workers.streams.rpc import ServerClient  # noqa: E402
from corral.workers.streams.security import StreamSecurity  # noqa: E402
from tests.launcher.trials import make_plan  # noqa: E402
from tests.name_services import running  # noqa: E402
from tests.workers.rollout.rollout_rig import prompt_dataset  # noqa: E402
from tests.workers.worker_context import worker_context  # noqa: E402

LOOPBACK = "127.0.0.1"
CLIENTS_PER_CONTEXT = 128  # of ZeroMQ, which has so many sockets
DEADLINE_S = 600.0
PROBE_PAUSE_S = 0.02
SETTLE_S = 15.0  # who has just begun to wait is not who waits
GOAL_CORES, GOAL_P99_MS = 0.5, 50.0

Client = ServerClient[ManagerRequest, ManagerReply]


@dataclass(frozen=True)
class Load:
    """What all processes are told."""

    plan: RunPlan
    host: str
    port: int
    password: str
    servers: int
    workers: int
    answers: int
    life_s: float

    @property
    def trial(self) -> TrialDirectory:
        return TrialDirectory(self.plan.trial.directory)

    @property
    def keys(self) -> TrialKeys:
        return TrialKeys(self.plan.trial.uuid)

    def names(self) -> "CountingNames":
        tls = Trust(self.trial.secrets_path).client()
        return CountingNames(self.host, self.port, self.password, self.keys.prefix, REDIS_USERNAME, tls=tls)

    def security(self) -> StreamSecurity:
        secrets = TrialSecrets.load(self.trial.secrets_path)
        return StreamSecurity(secrets, "rollout_worker", trial_uuid=self.plan.trial.uuid)

    def client(self, security: StreamSecurity, names: RedisNameService) -> Client:
        return Client(security, ManagerReply, lambda: names.get(self.keys.manager()), server="gserver_manager/0")


COUNTS: Counter[str] = Counter()
"""Of this process: "values" that were read of Redis, "opens" in the trial directory, "calls" that were answered."""


class CountingNames(RedisNameService):
    """Counts values that are read."""

    def _fetch(self, name: str, *, patience_s: float | None = None) -> str | None:
        COUNTS["values"] += 1
        return super()._fetch(name, patience_s=patience_s)

    def get_subtree(self, root: str) -> dict[str, str]:
        values = super().get_subtree(root)
        COUNTS["values"] += len(values)
        return values


def count_opens(trial: TrialDirectory) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(str(trial.path)):
            COUNTS["opens"] += 1

    sys.addaudithook(hook)


def tell_counts(pipe: Connection, orders: Mapping[str, Callable[[], None]]) -> None:
    """Answers the parent in a thread: follows an order, or says what was counted."""

    def answer() -> None:
        while True:
            order = pipe.recv()
            orders.get(order, lambda: None)()
            pipe.send(dict(COUNTS))

    threading.Thread(target=answer, daemon=True).start()


# The processes


def run_manager(load: Load, pipe: Connection) -> None:
    logging.disable(logging.WARNING)  # of hundreds of servers that are not ready, again and again
    count_opens(load.trial)
    secrets = TrialSecrets.load(load.trial.secrets_path)
    with load.names() as names, worker_context(load.plan, "gserver_manager", names=names, secrets=secrets) as context:
        tell_counts(pipe, {})
        asyncio.run(GserverManager(context)._main())


def run_servers(load: Load, pipe: Connection) -> None:
    asyncio.run(_serve(load, pipe))


async def _serve(load: Load, pipe: Connection) -> None:
    is_open = False

    def open_up() -> None:
        nonlocal is_open
        is_open = True

    async def well(request: web.Request) -> web.Response:
        return web.Response()

    async def bring_to(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=200 if is_open else 409)

    tls = Trust(load.trial.secrets_path).server()
    with load.names() as names, ExitStack() as stack:
        for index in range(load.servers):
            application = web.Application()
            application.add_routes([web.get("/ready", well), web.post("/bring_to", bring_to)])
            url = await serve(
                web.AppRunner(application, access_log=None), LOOPBACK, tls, GuardedListener(timeout_s=600.0)
            )
            record = json.dumps({"url": url, "control": url, "incarnation": "a", "place": ""})
            lease = names.lease(load.keys.generation_server(index), record, ttl_s=30.0, owner=f"server-{index}")
            stack.enter_context(lease)
        tell_counts(pipe, {"open": open_up})
        await asyncio.Event().wait()


def run_workers(load: Load, pipe: Connection) -> None:
    count_opens(load.trial)
    asyncio.run(_work(load, pipe))


async def _work(load: Load, pipe: Connection) -> None:
    stubs: list[StubWorker] = []
    with load.names() as shared, ExitStack() as stack:
        secrets = TrialSecrets.load(load.trial.secrets_path)
        base = stack.enter_context(worker_context(load.plan, "rollout_worker", names=shared, secrets=secrets))
        async with asyncio.TaskGroup() as tasks:
            for index in range(load.workers):
                if index % CLIENTS_PER_CONTEXT == 0:
                    security = stack.enter_context(load.security())
                names = stack.enter_context(load.names())
                stubs.append(StubWorker(load, index, base, names, load.client(security, names), tasks))
                tasks.create_task(stubs[-1].work())

            def freeze() -> None:
                for stub in stubs:
                    stub.is_frozen = True

            tell_counts(pipe, {"freeze": freeze})


class StubWorker(Worker):
    """A rollout worker as far as the manager, Redis and the trial directory can tell."""

    def __init__(
        self,
        load: Load,
        index: int,
        base: WorkerContext,
        names: RedisNameService,
        client: Client,
        tasks: asyncio.TaskGroup,
    ) -> None:
        super().__init__(replace(base, index=index, names=names))
        row_ids = list(Dataset.planned(load.plan.all_of(GserverManagerSpec)[0].dataset))
        self.is_frozen = False
        self._load = load
        self._client = client
        self._tasks = tasks
        self._committed = CommittedLedger(load.trial, row_ids)
        self._no_server = ""

    def run(self) -> None:
        raise NotImplementedError

    async def work(self) -> None:
        keys, worker = self.context.keys, self.context.worker_id
        looks = {
            keys.trajectory_receivers_root(): self._look_for_receivers,
            keys.trainer_root(): self._look_for_commits,
        }
        self._tasks.create_task(self.follow(looks, at_least_every_s=rollout_worker._LONGEST_BLINDNESS_S))
        last, knows = None, ""
        while True:
            answer = await self._ask(Allocate(worker=worker, incarnation="a", last=last, knows=knows))  # type: ignore[arg-type]
            assert isinstance(answer, Allocation)
            if answer.must_report:
                await self._ask(Report(worker=worker, incarnation="a", running=[], finished=[], dropped=[]))
            elif answer.order is None:
                knows = answer.waiting_for
            else:
                last, knows = answer.order, ""
                COUNTS["dealt"] += 1
                self._tasks.create_task(self._group(answer.uid, answer.order, answer.due_step))

    async def _group(self, uid: str, order: int, due_step: int) -> None:
        asked = Schedule(uid=uid, tokens=1024, order=order, due_step=due_step)
        await asyncio.gather(*(self._find_server(asked) for _ in range(self._load.answers)))
        COUNTS["served"] += 1
        await asyncio.sleep(random.uniform(0.0, 2 * self._load.life_s))
        while self.is_frozen:
            await asyncio.sleep(3600.0)
        await self._ask(Finish(worker=self.context.worker_id, uid=uid, order=order, outcome="finished"))

    async def _find_server(self, asked: Schedule) -> None:
        while True:
            route = await self._ask(msgspec.structs.replace(asked, knows=self._no_server))
            assert isinstance(route, Route)
            self._no_server = route.reason
            if route.url is not None:
                return

    async def _ask(self, request: ManagerRequest) -> ManagerReply:
        answer = await self._client.request(request, deadline_s=DEADLINE_S)
        COUNTS["calls"] += 1
        return answer

    async def _look_for_receivers(self) -> None:
        await asyncio.to_thread(self.context.names.get_subtree, self.context.keys.trajectory_receivers_root())

    async def _look_for_commits(self) -> None:
        await self._committed.look()


# Measuring


@dataclass(frozen=True)
class Phase:
    title: str
    calls: float
    values: float
    opens: float
    cores: float
    p50_ms: float
    p99_ms: float
    memory_mb: float
    """Resident, of the manager's process."""


class Bench:
    """The processes, and what they count."""

    def __init__(self, load: Load, stack: ExitStack, *, receivers: int) -> None:
        self._load = load
        self._names = stack.enter_context(load.names())
        self._security = stack.enter_context(load.security())
        keys = load.keys
        for index in range(receivers):
            self._names.add(keys.trajectory_receiver(index), f"tcp://127.0.0.1:{index + 1}")
        self.publish(0)
        spawn = multiprocessing.get_context("spawn")
        self.pipes: dict[str, Connection] = {}
        for name, target in (("servers", run_servers), ("manager", run_manager), ("workers", run_workers)):
            self.pipes[name], theirs = spawn.Pipe()
            process = spawn.Process(target=target, args=(load, theirs), daemon=True)
            process.start()
            stack.callback(process.kill)
            self.order(name, "")
            if name == "manager":
                self._manager = psutil.Process(process.pid)

    def publish(self, step: int) -> None:
        published = PublishedWeights(version=f"0.{step}", weights=str(self._load.trial.path), digest=None)
        self._names.add(self._load.keys.policy_version(), published.to_json())

    def commit(self, slot: int) -> None:
        self._names.add(self._load.keys.committed(), str(slot))

    def order(self, process: str, order: str) -> Counter[str]:
        self.pipes[process].send(order)
        if not self.pipes[process].poll(DEADLINE_S):
            raise TimeoutError(f"the {process} process said nothing for {DEADLINE_S:.0f} s")
        return Counter(self.pipes[process].recv())

    def wait_for(self, what: str, number: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while (count := self.order("workers", "")[what]) < number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} of {number} groups were {what} within {DEADLINE_S:.0f} s")
            time.sleep(0.5)

    async def measure(self, title: str, *, seconds: float, half_way: Callable[[], None] = lambda: None) -> Phase:
        latencies: list[float] = []
        async with self._load.client(self._security, self._names) as client:
            request = Finish(worker="rollout_worker/0", uid="0:nobody", order=0, outcome="again")
            await client.request(request, deadline_s=DEADLINE_S)
            before, cpu, started = self._counts(), self._cpu_s(), time.monotonic()
            is_second_half = False
            while (passed_s := time.monotonic() - started) < seconds:
                if passed_s > seconds / 2 and not is_second_half:
                    is_second_half = True
                    half_way()
                asked = time.monotonic()
                await client.request(request, deadline_s=DEADLINE_S)
                latencies.append(1000 * (time.monotonic() - asked))
                await asyncio.sleep(PROBE_PAUSE_S)
            after, used_s, passed_s = self._counts(), self._cpu_s() - cpu, time.monotonic() - started
        percentiles = statistics.quantiles(latencies, n=100)
        rates = {key: (after[key] - before[key]) / passed_s for key in ("calls", "values", "opens")}
        rates["calls"] += len(latencies) / passed_s
        return Phase(
            title,
            **rates,
            cores=used_s / passed_s,
            p50_ms=percentiles[49],
            p99_ms=percentiles[98],
            memory_mb=self._manager.memory_info().rss / 1e6,
        )

    def _counts(self) -> Counter[str]:
        return self.order("manager", "") + self.order("workers", "")

    def _cpu_s(self) -> float:
        times = self._manager.cpu_times()
        return float(times.user + times.system)


def plan_of(folder: Path, arguments: argparse.Namespace) -> RunPlan:
    trial = TrialDirectory(folder / "exp" / "trial")
    trial.create()
    TrialSecrets.create(trial.secrets_path)
    spec = GserverManagerSpec(
        dataset=prompt_dataset(folder, ["1+1="] * 1000),
        train_batch_size=1_000_000,
        total_train_epochs=1000,
        rollout=RolloutConfig.model_validate(
            {"reward": "tests.workers.rollout.rollout_rig:judge", "max_concurrent_rollouts": arguments.groups}
        ),
    )
    plan = make_plan(trial.path, servers=arguments.servers)
    others = [worker for worker in plan.workers if worker.kind != spec.kind]
    return plan.model_copy(update={"workers": [*others, spec]})


def show(phase: Phase) -> None:
    print(
        f"{phase.title:<18}{phase.calls:>9.0f}{phase.p50_ms:>7.1f} ms{phase.p99_ms:>7.1f} ms{phase.cores:>8.2f}"
        f"{phase.values:>16.0f}{phase.opens:>9.1f}{phase.memory_mb:>8.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--servers", type=int, default=512)
    parser.add_argument("--workers", type=int, default=512)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--life-s", type=float, default=60.0)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--receivers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory(prefix="corral-manager-") as name, ExitStack() as stack:
        folder = Path(name)
        plan = plan_of(folder, arguments)
        keys, password = TrialKeys(plan.trial.uuid), "a" * 32
        trust = Trust(TrialDirectory(plan.trial.directory).secrets_path)
        redis = RedisServer(password=password, trust=trust, key_prefix=keys.prefix, log_path=folder / "redis.log")
        stack.enter_context(running(redis))
        load = Load(
            plan=plan,
            host=redis.address[0],
            port=redis.address[1],
            password=password,
            servers=arguments.servers,
            workers=arguments.workers,
            answers=arguments.answers,
            life_s=arguments.life_s,
        )
        bench = Bench(load, stack, receivers=arguments.receivers)
        bench.wait_for("dealt", arguments.groups)
        time.sleep(SETTLE_S)
        print(
            f"{'':<18}{'CALLS/s':>9}{'P50':>10}{'P99':>10}{'CORES':>8}{'REDIS VALUES/s':>16}{'OPENS/s':>9}{'MB':>8}",
            flush=True,
        )
        show(asyncio.run(bench.measure("no server ready", seconds=arguments.seconds)))
        bench.order("servers", "open")
        bench.wait_for("served", arguments.groups)
        time.sleep(SETTLE_S)

        def step() -> None:
            bench.publish(1)
            bench.commit(1)

        show(asyncio.run(bench.measure("open", seconds=arguments.seconds, half_way=step)))
        bench.order("workers", "freeze")
        time.sleep(SETTLE_S)
        show(asyncio.run(bench.measure("gate shut", seconds=arguments.seconds)))
        print(f"{'goal':<18}{'':>9}{'':>10}{GOAL_P99_MS:>7.1f} ms{GOAL_CORES:>8.2f}")


if __name__ == "__main__":
    main()
