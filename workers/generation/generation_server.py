"""The generation server: a backend that answers SGLang's HTTP API, as a worker of the trial.

plan: initial weights ──► GenerationBackend ──url──► record {url, control, incarnation, place}
rollout workers: /generate ──► url          gserver_manager: /bring_to ──► control ──► WeightUpdates ──► url

A backend that is lost is started again within a budget; its record is gone meanwhile, and then names a new incarnation,
so that the manager brings it to the present weights before it gets requests. A spent budget ends the worker.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import aiohttp

from corral.experiments.worker_specs import GenerationServerSpec
from corral.scheduling.restarts import RestartBudget
from corral.workers.generation.backend import BackendLostError, GenerationBackend, ServerAccess
from corral.workers.generation.control import ControlServer
from corral.workers.generation.held_weights import HeldWeights
from corral.workers.generation.weight_updates import WeightUpdates
from corral.workers.lifecycle.worker import Worker, WorkerContext, run_async
from corral.workers.modules import loading_modules
from corral.workers.streams.https import open_session
from corral.workers.weight_transport.staging import make_staging

logger = logging.getLogger(__name__)


MAX_RESTARTS = 3
"""Restarts of a server that died or hung before its worker ends, which the supervisor then starts again."""
_BEAT_S = 0.5
_SETUP_MARGIN_S = 30.0  # the backend gives up first, and says why


class GenerationServer(Worker):
    """Serves until the trial ends; the manager brings it to the present weights before it gets requests."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._spec = context.specification(GenerationServerSpec)

    def run(self) -> None:
        run_async(self._main(), self.context.stopping)

    async def _main(self) -> None:
        context, spec, secrets, trust = self.context, self._spec, self.context.secrets, self.context.trust
        admin_key = secrets.http_admin_key.reveal()
        staging = make_staging(
            spec.weights,
            trial_uuid=context.plan.trial.uuid,
            worker=context.worker_id,
            admin_key=admin_key,
            tls=trust.client(),
        )
        access = ServerAccess(
            address=context.address, api_key=secrets.http_api_key, admin_key=secrets.http_admin_key, trust=trust
        )
        async with open_session(trust.client()) as session:
            with closing(staging):
                updates = WeightUpdates(staging, mode=spec.weights.update_mode, record=context.presence.record)
                backend = make_backend(
                    spec,
                    access,
                    session=session,
                    seed=context.plan.seed * 1009 + spec.index,
                    log_path=context.trial.worker_log(context.attempt, "sglang", spec.index),
                    start_timeout_s=context.plan.supervision.setup_timeout_s,
                    check_gpus=context.check_gpus,
                )
                control = ControlServer(updates, admin_key=admin_key, address=context.address, tls=trust.server())
                try:
                    await self._keep_serving(backend, updates, await control.start())
                finally:
                    await control.stop()

    async def _keep_serving(self, backend: GenerationBackend, updates: WeightUpdates, control: str) -> None:
        """Start the backend again and again, as far as the budget goes."""
        supervision, presence = self.context.plan.supervision, self.context.presence
        budget = RestartBudget(max_restarts=MAX_RESTARTS, healthy_after_s=supervision.healthy_after_s)
        num_starts, lost_because = 0, ""
        deadline_s = supervision.setup_timeout_s + _SETUP_MARGIN_S
        while not self.context.stopping.is_set():
            presence.enter("start", waiting_for=lost_because, is_setting_up=True, deadline_s=deadline_s)
            started = time.monotonic()
            try:
                url = await backend.start()
                held = HeldWeights(
                    backend.fingerprints, url, version=self._spec.initial_version, directory=self._spec.initial_weights
                )
                updates.serves(backend, held)
                num_starts += 1
                await self._serve(
                    backend, held, updates, control, incarnation=f"{self.context.incarnation}.{num_starts}"
                )
            except BackendLostError as error:
                if not budget.take(ran_s=time.monotonic() - started):
                    raise BackendLostError(
                        f"{error}\nits server is not started again: its {budget.max_restarts} restarts are spent"
                    ) from error
                logger.error("starts its server again, %d of %d: %s", budget.in_a_row, budget.max_restarts, error)
                lost_because = str(error).partition("\n")[0]
                presence.note_restart()
            finally:
                updates.ended()
                await backend.stop()

    async def _serve(
        self, backend: GenerationBackend, held: HeldWeights, updates: WeightUpdates, control: str, *, incarnation: str
    ) -> None:
        """Publish the server, and keep the presence record true while it runs; raises what it died of."""
        record: dict[str, object] = {"url": held.url, "control": control, "incarnation": incarnation}
        record |= {"place": updates.staging.place, "kv_tokens": backend.kv_tokens}
        keys, index, presence = self.context.keys, self._spec.index, self.context.presence
        key = keys.judge(index) if self._spec.is_judge else keys.generation_server(index)  # which the manager knows not
        with self.context.lease(key, json.dumps(record), owner=incarnation):
            ended = asyncio.ensure_future(backend.wait_ended())
            try:
                while not self.context.stopping.is_set():
                    await asyncio.wait([ended], timeout=_BEAT_S)
                    if ended.done():
                        return ended.result()
                    progress = backend.progress()
                    if progress["running"] + progress["queued"] > 0:
                        presence.enter("generate")
                    else:
                        presence.enter("idle", waiting_for="requests of rollout workers")
                    presence.beat(version=held.version, weight_update=updates.last)
            finally:
                ended.cancel()


def make_backend(
    spec: GenerationServerSpec,
    access: ServerAccess,
    *,
    session: aiohttp.ClientSession,
    seed: int,
    log_path: Path,
    start_timeout_s: float,
    check_gpus: Callable[[int], int],
) -> GenerationBackend:
    """
    Args:
        session: of the requests by which a server in another process takes over weights.
        log_path: of a server in another process.
        check_gpus: given how many are visible, how many a server of this process has to use.
    """
    if spec.backend == "sglang":
        from corral.workers.generation.sglang import SglangBackend

        return SglangBackend(
            spec=spec, access=access, session=session, log_path=log_path, seed=seed, start_timeout_s=start_timeout_s
        )
    with loading_modules():  # which takes seconds
        import torch

        from corral.workers.generation.embedded import EmbeddedBackend

    device = "cuda" if check_gpus(torch.cuda.device_count()) else "cpu"
    return EmbeddedBackend(spec=spec, access=access, device=device, seed=seed)
