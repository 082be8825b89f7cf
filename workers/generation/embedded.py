"""EmbeddedBackend: the embedded engine, served from the worker's own process.

initial weights ──► GenerationEngine (its own thread) ──► EngineServer (HTTP, keys)
new weights ──prepare: read and built beside the old ones──► swap: one command between two decode steps
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import transformers.modeling_utils  # noqa: F401 - what loading a model imports, and is loaded with the other modules
from transformers.utils import logging as transformers_logging

from corral.experiments.worker_specs import GenerationServerSpec
from corral.workers.engine.engine import EngineStoppedError, GenerationEngine, StagedModel
from corral.workers.engine.server import EngineServer
from corral.workers.engine.weights import WeightsRejectedError
from corral.workers.generation.backend import NewWeights, Progress, ServerAccess
from corral.workers.generation.server_client import Fingerprints, ServerError

_CHANGE_TIMEOUT_S = 60.0  # the engine changes over after its present decode step, which takes far less


def load_engine(spec: GenerationServerSpec, *, device: str, seed: int) -> GenerationEngine:
    """The engine that a plan describes, with its initial weights."""
    assert spec.engine.max_total_tokens is not None  # checked before submission
    return GenerationEngine(
        spec.initial_weights,
        device=device,
        dtype=spec.engine.dtype,
        quantization=spec.engine.quantization,
        max_running_requests=spec.engine.max_running_requests,
        max_total_tokens=spec.engine.max_total_tokens,
        seed=seed,
        version=spec.initial_version,
    )


@dataclass(kw_only=True)
class EmbeddedBackend:
    """Loads the engine when it starts; an engine that fails ends the worker, whose process it shares."""

    spec: GenerationServerSpec
    access: ServerAccess
    device: str
    seed: int
    _engine: GenerationEngine = field(init=False)
    _server: EngineServer | None = field(default=None, init=False)
    _prepared: StagedModel | None = field(default=None, init=False)

    async def start(self) -> str:
        """Load the weights and listen."""
        transformers_logging.disable_progress_bar()
        self._engine = load_engine(self.spec, device=self.device, seed=self.seed)
        key, tls = self.access.api_key.reveal(), self.access.trust.server()
        self._server = EngineServer(self._engine, key, self.access.address, tls=tls)
        return await self._server.start()

    def progress(self) -> Progress:
        """Once it has started."""
        engine = self._engine
        return Progress(
            running=engine.num_running,
            queued=engine.num_queued,
            tokens_generated=engine.tokens_generated,
        )

    @property
    def kv_tokens(self) -> int:
        """See `GenerationBackend.kv_tokens`."""
        return self.spec.engine.max_total_tokens or 0

    async def version(self) -> str:
        """See `GenerationBackend.version`."""
        return self._engine.version

    async def fingerprints(self, *, skipped: Sequence[str]) -> list[Fingerprints]:
        """See `GenerationBackend.fingerprints`."""
        held = self._engine.checksums
        return [await asyncio.to_thread(held.of, held.names(skipped=skipped))]

    async def prepare(self, weights: Path) -> None:
        """Read and check them beside those that it generates with; ServerError if they are not its model's."""
        self._prepared = None  # two versions beside the live one would be one too many
        try:
            self._prepared = await asyncio.to_thread(self._engine.stage_weights, weights)
        except WeightsRejectedError as error:
            raise ServerError(str(error)) from error

    async def swap(self, new: NewWeights) -> float:
        """See `GenerationBackend.swap`; seconds are those that the engine was kept from its next step, by itself.

        What the proof looks at is hashed before, and so are the very tensors that are taken over: see `Checksums`.
        """
        engine, staged, looked_at = self._engine, self._prepared, new.held.looked_at
        assert self._server is not None and staged is not None and staged.directory == new.directory
        self._prepared = None
        await asyncio.to_thread(staged.checksums.of, looked_at)  # so that nothing is hashed while it stands still
        changing = self._server.loop.change_over(
            staged,
            version=new.version,
            mode=new.mode,
            check=lambda: new.held.check([engine.checksums.of(looked_at)]),
        )
        try:
            return (await asyncio.wait_for(asyncio.wrap_future(changing), _CHANGE_TIMEOUT_S)).stopped_s
        except EngineStoppedError as error:
            raise ServerError(str(error)) from error
        except TimeoutError as error:
            raise ServerError(
                f"a decode step of {self.access.address} did not end before it had to change over"
            ) from error

    async def wait_ended(self) -> None:
        """Until the engine thread ends; raises what ended it."""
        assert self._server is not None
        await self._server.wait_ended()

    async def stop(self) -> None:
        """Requests end as aborted, and are answered."""
        if self._server is not None:
            await self._server.stop()
