"""A rollout worker with everything around it, in one process: real manager, spool, streams and log; no model.

    FakeGenerationServer ◄─HTTP─ RolloutWorker ──stream──► TrajectoryReceiver     RolloutRig.received
            ▲                         │  ▲
            └── GserverManager ◄──────┘  └── trial log

Everything but the worker runs in threads of its own, so that a worker that ends is seen to end.
"""

import asyncio
import json
import os
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from aiohttp import web

from corral.experiments.config.data import DatasetConfig
from corral.experiments.config.rollout import RolloutConfig
from corral.experiments.datasets.dataset import dataset_spec
from corral.experiments.plan import RunPlan
from corral.experiments.prompts.row_prompts import Prompt
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.guarded_listener import GuardedListener
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.trust import Trust
from corral.experiments.trial.worker_record import WorkerRecord
from corral.experiments.worker_specs import DatasetSpec, GserverManagerSpec, RolloutWorkerSpec
from corral.name_resolve.keys import TrialKeys
from corral.workers.checkpoint.published_weights import PublishedWeights
from corral.workers.delivery.messages import TrajectoryHeader
from corral.workers.delivery.receiver import TrajectoryReceiver
from corral.workers.lifecycle.worker import WorkerContext, run_to_exit_code
from corral.workers.manager.gserver_manager import GserverManager
from corral.workers.requests.manager_messages import Route, Schedule
from corral.workers.rollout.rollout_worker import RolloutWorker
from corral.workers.streams.https import serve
from corral.workers.streams.security import StreamSecurity
from tests.launcher.trials import make_plan
from tests.name_services import MemoryNameService, MemoryStore
from tests.workers.data.tiny_tokenizer import EOS, ids_of, write_tokenizer
from tests.workers.loop_thread import loop_thread
from tests.workers.worker_context import worker_context

LOOPBACK = "127.0.0.1"
DEADLINE_S = 120.0


class FakeGenerationServer:
    """Speaks what rollout workers and the manager need of SGLang's API; answers every prompt with "7" and its end."""

    def __init__(self) -> None:
        self.version = "0.0"
        self.refuse: Callable[[list[int]], int] = lambda prompt: 200
        """Gives the status of a request for this prompt, a partial answer included."""
        self.num_requests = 0
        self.seeds: list[int] = []
        """Of each request that it answered,"""
        self.temperatures: list[float] = []
        """and what it was to be sampled at."""
        self.most_tokens = 2
        """Of one request."""
        self.broken_updates: list[int] = []
        """What its worker answers to the manager, one after the other, before it does what it is told."""

    async def start(self, tls: ssl.SSLContext) -> str:
        """Listen; returns the URL."""
        application = web.Application()
        application.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/bring_to", self._bring_to),
                web.get("/ready", self._ok),
            ]
        )
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        return await serve(self._runner, LOOPBACK, tls, GuardedListener(timeout_s=600.0))

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _bring_to(self, request: web.Request) -> web.Response:
        if self.broken_updates:
            return web.Response(status=self.broken_updates.pop())
        self.version = (await request.json())["version"]
        return web.Response()

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.num_requests += 1
        status = self.refuse(body["input_ids"])
        if status != 200:
            return web.json_response({"error": {"message": f"status {status}"}}, status=status)
        sampling = body["sampling_params"]
        self.seeds.append(sampling["sampling_seed"])
        self.temperatures.append(sampling["temperature"])
        event = self._event(body["input_ids"], min(int(sampling["max_new_tokens"]), self.most_tokens))
        return web.Response(text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    def _event(self, ids: list[int], wanted: int) -> dict[str, Any]:
        rest = [EOS] if ids[-1] == ids_of("7")[0] else [*ids_of("7"), EOS]
        output = rest[:wanted]
        reason = "stop" if output[-1] == EOS else "length"
        return {
            "output_ids": output,
            "meta_info": {
                "output_token_logprobs": [[-0.5, token, None] for token in output],
                "weight_versions": [{"version": self.version, "start": 0, "end": len(output)}],
                "finish_reason": {"type": reason},
                "completion_tokens": len(output),
            },
        }


class RolloutRig:
    """A trial of one rollout worker, whose prompts are `prompts` and whose ids are their numbers."""

    def __init__(
        self,
        folder: Path,
        prompts: Sequence[Prompt],
        *,
        rollout: Mapping[str, Any],
        group_size: int = 2,
        max_prompt_tokens: int = 16,
        train_batch_size: int = 256,
        server: FakeGenerationServer | None = None,
        fields: Sequence[Mapping[str, Any]] = (),
        dataset: Mapping[str, Any] = MappingProxyType({}),
        teacher_prompt_tokens: int = 0,
    ) -> None:
        """
        Args:
            fields: what the rows say besides; nothing where there are none.
            dataset: further settings of it.
        """
        self.server = server or FakeGenerationServer()
        self.received: list[TrajectoryHeader] = []
        """Everything that was delivered,"""
        self.tensors: list[Mapping[str, Any]] = []
        """and the values of each."""
        self.trial = TrialDirectory(folder / "exp" / "trial")
        self.trial.create()
        self.record: Callable[[], WorkerRecord] = lambda: WorkerRecord(phase="")
        """What the worker of `run_until` says that it does."""
        self._prompts, self._fields, self._dataset = prompts, fields, dataset
        self._folder = folder
        self._rollout = RolloutConfig.model_validate(
            {"sampling": {"max_new_tokens": 4}, "reward": "tests.workers.rollout.some_rewards:judge", **rollout}
        )
        self._group_size = group_size
        self._teacher_prompt_tokens = teacher_prompt_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._train_batch_size = train_batch_size
        self._num_retried = 0
        self._store = MemoryStore()
        self._stack = ExitStack()
        self.plan = self._make_plan()
        self._keys = TrialKeys(self.plan.trial.uuid)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            TrialSecrets.create(self.trial.secrets_path)
            self._loop = stack.enter_context(loop_thread(deadline_s=DEADLINE_S))
            names = MemoryNameService(self._store)
            url = self._loop.run(self.server.start(Trust(self.trial.secrets_path).server()))
            stack.callback(lambda: self._loop.run(self.server.stop()))
            record = {"url": url, "control": url, "incarnation": "a", "place": ""}
            names.add(self._keys.generation_server(0), json.dumps(record))
            self.publish("0.0")
            stack.enter_context(self._running_manager())
            security = stack.enter_context(self._security("model_worker"))
            self.receiver = stack.enter_context(TrajectoryReceiver(security, address=LOOPBACK))
            self.receiver.start_session("one")
            names.add(self._keys.trajectory_receiver(0), self.receiver.endpoint)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def run_until(self, condition: Callable[[], bool], what: str) -> None:
        """Run the worker until something holds; raises what it fails with before."""

        async def run(worker: RolloutWorker) -> None:
            task = asyncio.create_task(worker._main())
            try:
                deadline = time.monotonic() + DEADLINE_S
                while not (self._drain() or condition()):
                    if task.done():
                        task.result()
                        raise AssertionError("the worker ended by itself")
                    assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s for {what}: {self.received}"
                    await asyncio.sleep(0.02)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        with self.worker() as worker:
            self.record = worker.context.presence.snapshot
            asyncio.run(run(worker))

    def run_to_its_end(self) -> int:
        """Run the worker until it ends by itself, and its exit code; DONE if it does not, and was asked to."""
        deadline = threading.Timer(DEADLINE_S, os.kill, (os.getpid(), signal.SIGTERM))
        deadline.start()
        try:
            with self.worker() as worker:
                return run_to_exit_code(lambda _: worker, worker.context)
        finally:
            deadline.cancel()

    def publish(self, version: str) -> None:
        """The trainer stands at this version of the weights."""
        published = PublishedWeights(version=version, weights=str(self._folder), digest=None)
        MemoryNameService(self._store).add(self._keys.policy_version(), published.to_json())

    def outcomes(self) -> dict[str, str]:
        """By row id: "finished", or why it was dropped."""
        return {
            header.uid.removeprefix("0:").partition("#")[0]: header.reason or header.status for header in self.received
        }

    def num_retried(self) -> int:
        """How often the manager was told that a server failed."""
        return self._num_retried

    @contextmanager
    def worker(self) -> Iterator[RolloutWorker]:
        """One start of the worker; whoever asks for it runs it."""
        with ExitStack() as stack:
            yield RolloutWorker(self.context(stack, "rollout_worker"))

    def _drain(self) -> None:
        for header, tensors in self.receiver.drain(max_records=64):
            self.received.append(header)
            self.tensors.append(tensors)

    def _running_manager(self) -> ExitStack:
        stack = ExitStack()
        self.manager = GserverManager(self.context(stack, "gserver_manager"))
        choose = self.manager._choose

        def count(request: Schedule, *, is_first: bool = False) -> Route:
            self._num_retried += bool(request.failed_url)
            return choose(request, is_first=is_first)

        self.manager._choose = count  # type: ignore[method-assign]
        task = self._loop.start(self.manager._main())

        def stop() -> None:
            task.cancel()
            self._loop.run(asyncio.sleep(0.05))  # its sockets close before their factory does

        stack.callback(stop)
        return stack

    def context(self, stack: ExitStack, kind: str) -> WorkerContext:
        """What a worker of this trial is given; ends with `stack`."""
        secrets = TrialSecrets.load(self.trial.secrets_path)
        context = worker_context(self.plan, kind, names=MemoryNameService(self._store), secrets=secrets)
        return stack.enter_context(context)

    def _security(self, kind: str) -> StreamSecurity:
        secrets = TrialSecrets.load(self.trial.secrets_path)
        return StreamSecurity(secrets, kind, trial_uuid=self.plan.trial.uuid)

    def _make_plan(self) -> RunPlan:
        dataset = prompt_dataset(
            self._folder, self._prompts, fields=self._fields, max_prompt_tokens=self._max_prompt_tokens, **self._dataset
        )
        manager = GserverManagerSpec(
            dataset=dataset,
            train_batch_size=self._train_batch_size,
            total_train_epochs=1,
            rollout=self._rollout,
        )
        worker = RolloutWorkerSpec(
            index=0,
            num_rollout_workers=1,
            dataset=dataset,
            tokenizer=write_tokenizer(self._folder / "model"),
            group_size=self._group_size,
            teacher_prompt_tokens=self._teacher_prompt_tokens,
            rollout=self._rollout,
        )
        return make_plan(self.trial.path, model_workers=1).model_copy(update={"workers": [manager, worker]})


def prompt_dataset(
    folder: Path,
    prompts: Sequence[Prompt],
    *,
    max_prompt_tokens: int = 16,
    fields: Sequence[Mapping[str, Any]] = (),
    **settings: Any,
) -> DatasetSpec:
    """Prompts whose ids are their numbers, in this order."""
    path = folder / "rows.jsonl"
    rows = [{"id": str(number), "prompt": prompt} for number, prompt in enumerate(prompts)]
    rows = [{**row, **more} for row, more in zip_longest(rows, fields, fillvalue={})]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DatasetConfig(path=path, max_prompt_tokens=max_prompt_tokens, shuffle=False, **settings)
    return dataset_spec(config, kind="prompts")
