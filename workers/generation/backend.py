"""GenerationBackend: what a generation server needs of whatever makes its tokens.

start ──► url ──► rollout workers and the manager speak SGLang's HTTP API to it ──► stop
            └──► progress (heartbeats), wait_ended (what it died of), prepare (before an update)
"""

from pathlib import Path
from typing import Protocol

from corral.workers.engine.progress import Progress


class BackendLostError(RuntimeError):
    """The server died, or hangs; a new start may serve again."""


class GenerationBackend(Protocol):
    """One server of SGLang's HTTP API, in this process (`EmbeddedBackend`) or in another one.

    Example:
        url = await backend.start()
        try:
            await backend.wait_ended()
        finally:
            await backend.stop()
    """

    async def start(self) -> str:
        """Serve the initial weights; returns where, "http://host:port", once requests are answered there."""

    def progress(self) -> Progress:
        """Numbers for heartbeats; any thread may ask, at any time."""

    async def prepare(self, weights: Path) -> None:
        """Do ahead, while it generates, what an update from this directory can have done before; perhaps nothing.

        Raises:
            ServerError: the weights cannot be used; those that it has serve on.
        """

    async def wait_ended(self) -> None:
        """Until it serves no more; raises what it died of: a `BackendLostError` where a new start may help."""

    async def stop(self) -> None:
        """End the requests in flight and serve no more; does nothing if it does not run."""
