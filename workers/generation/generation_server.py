"""The generation server: the embedded engine behind its HTTP API, as a worker of the trial.

plan: initial weights ──► GenerationEngine ──► EngineServer (HTTP, API key) ──► record {url, incarnation}
gserver_manager: /update_weights_from_disk ...          rollout workers: /generate
"""

import asyncio
import json
import logging
from typing import Any

from transformers.utils import logging as transformers_logging

from corral.experiments.worker_specs import GenerationServerSpec
from corral.scheduling.policy_version import INITIAL_VERSION
from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.http_api import EngineServer
from corral.workers.lifecycle.worker import Worker, WorkerContext, run_async

logger = logging.getLogger(__name__)

_BEAT_S = 0.5


class GenerationServer(Worker):
    """Serves until the trial ends; the manager brings it to the present weights before it gets requests."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._spec = context.specification(GenerationServerSpec)
        self._server: EngineServer | None = None

    def run(self) -> None:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        run_async(self._main(), self.context.stopping)

    def status(self) -> dict[str, Any]:
        return dict(self._server.progress()) if self._server is not None else {}

    async def _main(self) -> None:
        context, spec = self.context, self._spec
        engine = GenerationEngine(
            spec.initial_weights,
            device=_device(),
            dtype=spec.engine.dtype,
            max_running_requests=spec.engine.max_running_requests,
            max_total_tokens=spec.engine.max_total_tokens,
            seed=context.plan.seed * 1009 + spec.index,
            version=str(INITIAL_VERSION),
        )
        server = self._server = EngineServer(engine, context.secrets.http_api_key.reveal(), context.address)
        port = await server.start()
        try:
            record = {"url": f"http://{context.address}:{port}", "incarnation": context.incarnation}
            with context.lease(context.keys.generation_server(spec.index), json.dumps(record)):
                ended = asyncio.ensure_future(server.wait_ended())
                try:
                    await self._beat_until(ended, server)
                finally:
                    ended.cancel()
        finally:
            await server.stop()

    async def _beat_until(self, ended: "asyncio.Future[None]", server: EngineServer) -> None:
        """Keep the presence record true; raises what the engine died of."""
        while not self.context.stopping.is_set():
            await asyncio.wait([ended], timeout=_BEAT_S)
            if ended.done():
                ended.result()
                return
            progress = server.progress()
            busy = progress["running"] + progress["queued"] > 0
            self.context.presence.enter(
                "generate" if busy else "idle", waiting_for="" if busy else "requests of rollout workers"
            )
            self.context.presence.beat(version=progress["version"])


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
