"""EmbeddedBackend: the embedded engine, served from the worker's own process.

initial weights ──► GenerationEngine (its own thread) ──► EngineServer (HTTP, keys)
new weights ──prepare: read and built beside the old ones──► swap: one command between two decode steps
"""

import ssl
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from transformers.utils import logging as transformers_logging

from corral.experiments.worker_specs import GenerationServerSpec
from corral.workers.engine.engine import GenerationEngine, PauseMode
from corral.workers.engine.loop import EngineStoppedError
from corral.workers.engine.server import EngineServer
from corral.workers.engine.weights import WeightsRejectedError
from corral.workers.generation.backend import NewWeights, Progress
from corral.workers.generation.server_client import ServerError


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


@dataclass
class EmbeddedBackend:
    """Loads the engine when it starts; an engine that fails ends the worker, whose process it shares."""

    load_engine: Callable[[], GenerationEngine]
    """Reads the initial weights."""
    _: KW_ONLY
    api_key: str
    """What clients must send as bearer token."""
    admin_key: str
    """What those must send who change the server."""
    address: str
    """The interface to listen on."""
    tls: ssl.SSLContext
    """How the server proves itself."""
    _server: EngineServer | None = field(default=None, init=False)

    async def start(self) -> str:
        """Load the weights and listen."""
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._server = EngineServer(
            self.load_engine(), self.api_key, self.address, tls=self.tls, admin_key=self.admin_key
        )
        return await self._server.start()

    def progress(self) -> Progress:
        """Zeros until it has started."""
        if self._server is None:
            return Progress(running=0, queued=0, tokens_generated=0, version="")
        engine = self._server.engine
        return Progress(
            running=engine.num_running,
            queued=engine.num_queued,
            tokens_generated=engine.tokens_generated,
            version=engine.version,
        )

    async def prepare(self, weights: Path) -> None:
        """Read and check them beside those that it generates with; ServerError if they are not its model's."""
        assert self._server is not None
        try:
            await self._server.prepare_weights(weights)
        except WeightsRejectedError as error:
            raise ServerError(str(error)) from error

    async def swap(self, new: NewWeights) -> float:
        """See `GenerationBackend.swap`; seconds are those that the engine was kept from its next step, by itself.

        What the proof looks at is hashed before, and so are the very tensors that are taken over: see `Checksums`.
        """
        assert self._server is not None
        proof = new.proof
        try:
            return await self._server.change_over(
                new.directory,
                version=new.version,
                mode=PauseMode(new.mode),
                looked_at=proof.looked_at,
                check=lambda held: proof.check([held]),
            )
        except (WeightsRejectedError, EngineStoppedError) as error:
            raise ServerError(str(error)) from error
        except TimeoutError as error:
            raise ServerError(f"a decode step of {self.address} did not end before it had to change over") from error

    async def wait_ended(self) -> None:
        """Until the engine thread ends; raises what ended it."""
        assert self._server is not None
        await self._server.wait_ended()

    async def stop(self) -> None:
        """Requests end as aborted, and are answered."""
        if self._server is not None:
            await self._server.stop()
