"""The generation server: a backend that answers SGLang's HTTP API, as a worker of the trial.

plan: initial weights ──► GenerationBackend ──url──► record {url, incarnation}
gserver_manager: /update_weights_from_disk ...          rollout workers: /generate
"""

import asyncio
import json
import logging
from typing import Any

from corral.experiments.worker_specs import GenerationServerSpec
from corral.scheduling.policy_version import INITIAL_VERSION
from corral.workers.generation.backend import GenerationBackend
from corral.workers.lifecycle.worker import Worker, WorkerContext, run_async

logger = logging.getLogger(__name__)

_BEAT_S = 0.5


class GenerationServer(Worker):
    """Serves until the trial ends; the manager brings it to the present weights before it gets requests."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._spec = context.specification(GenerationServerSpec)
        self._backend = make_backend(self._spec, context)

    def run(self) -> None:
        run_async(self._main(), self.context.stopping)

    def status(self) -> dict[str, Any]:
        return dict(self._backend.progress())

    async def _main(self) -> None:
        context, backend = self.context, self._backend
        try:
            record = {"url": await backend.start(), "incarnation": context.incarnation}
            with context.lease(context.keys.generation_server(self._spec.index), json.dumps(record)):
                ended = asyncio.ensure_future(backend.wait_ended())
                try:
                    await self._beat_until(ended)
                finally:
                    ended.cancel()
        finally:
            await backend.stop()

    async def _beat_until(self, ended: "asyncio.Future[None]") -> None:
        """Keep the presence record true; raises what the backend died of."""
        while not self.context.stopping.is_set():
            await asyncio.wait([ended], timeout=_BEAT_S)
            if ended.done():
                ended.result()
                return
            progress = self._backend.progress()
            busy = progress["running"] + progress["queued"] > 0
            self.context.presence.enter(
                "generate" if busy else "idle", waiting_for="" if busy else "requests of rollout workers"
            )
            self.context.presence.beat(version=progress["version"])


def make_backend(spec: GenerationServerSpec, context: WorkerContext) -> GenerationBackend:
    """The backend that the plan asks for; nothing is loaded yet."""
    import torch  # a second of import, which only a process that serves has to pay

    from corral.workers.engine.engine import GenerationEngine
    from corral.workers.generation.embedded import EmbeddedBackend

    def load_engine() -> GenerationEngine:
        return GenerationEngine(
            spec.initial_weights,
            device="cuda" if torch.cuda.is_available() else "cpu",
            dtype=spec.engine.dtype,
            max_running_requests=spec.engine.max_running_requests,
            max_total_tokens=spec.engine.max_total_tokens,
            seed=context.plan.seed * 1009 + spec.index,
            version=str(INITIAL_VERSION),
        )

    return EmbeddedBackend(load_engine, api_key=context.secrets.http_api_key.reveal(), address=context.address)
