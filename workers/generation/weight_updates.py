"""WeightUpdates: one server takes over new weights, after they were verified on its own host.

    bring_to(version, weights) ──► holds it already? ──► verify (while it generates) ──► swap ──► holds it
                                                             `──► WeightsTornError: nothing was changed

One update at a time, so that an older version never overtakes a newer one. The trainer waits for none of this.
"""

import asyncio
import logging
import time
from pathlib import Path

from corral.workers.checkpoint.manifest import MANIFEST_NAME, CorruptCheckpointError, verify_manifest
from corral.workers.generation.http_calls import ServerError
from corral.workers.generation.server_client import GenerationServerClient

logger = logging.getLogger(__name__)


class WeightsTornError(ServerError):
    """A weight directory is not what its manifest says; the server was not touched."""


class WeightUpdates:
    """What the manager asks a generation worker for."""

    def __init__(self, client: GenerationServerClient) -> None:
        self._client = client
        self._lock = asyncio.Lock()
        self._is_reading = False
        self.url = ""
        """Where the server is; empty while none runs."""

    def is_reading(self) -> bool:
        """Whether the server stands still to read weights; it may answer nothing else meanwhile, however long it takes.

        Not during the pause before and after, so that a server that hangs is noticed while it is asked for those.
        """
        return self._is_reading

    async def bring_to(self, *, version: str, weights: Path, timeout_s: float) -> None:
        """Load `weights` unless the server holds `version` already; running requests continue on the new weights.

        Raises:
            WeightsTornError: naming the file that differs.
            ServerError: naming the call that failed.
        """
        async with self._lock:
            url = self.url
            if not url:
                raise ServerError("the generation server is being started; ask again")
            if await self._client.version(url) == version:
                return
            started = time.monotonic()
            await asyncio.to_thread(verify_weights, weights)
            verified = time.monotonic()
            async with self._client.paused(url):
                self._is_reading = True
                try:
                    await self._client.load(url, version=version, weights=weights, timeout_s=timeout_s)
                finally:
                    self._is_reading = False
            if (held := await self._client.version(url)) != version:
                raise ServerError(f"{url} holds version {held!r} after an update to {version!r}")
            swap_s = time.monotonic() - verified
            logger.info("holds version %s: verified in %.2f s, swapped in %.2f s", version, verified - started, swap_s)


def verify_weights(directory: Path) -> None:
    """A directory with a manifest must be what its manifest says; one without, a model from elsewhere, is as it is.

    Raises:
        WeightsTornError: at the first file that differs.
    """
    if not (directory / MANIFEST_NAME).exists():
        return
    try:
        verify_manifest(directory, None)
    except CorruptCheckpointError as error:
        raise WeightsTornError(f"weights in {directory} were refused: {error}") from error
