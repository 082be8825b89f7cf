"""GenerationBackend: the interface between a generation server and the engine that generates its tokens.

start ──► url ──► rollout workers and the manager speak SGLang's HTTP API to it ──► stop
            ├──► progress (heartbeats), wait_ended (what it died of)
            └──► prepare (new weights, it generates on) ──► swap (it stands still, as shortly as it can)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict

from corral.experiments.config.rollout import UpdateMode
from corral.experiments.trial.secrets import Secret
from corral.experiments.trial.trust import Trust
from corral.workers.generation.held_weights import HeldWeights
from corral.workers.generation.server_client import Fingerprints


class BackendLostError(RuntimeError):
    """The server died, or hangs; a new start may serve again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """A server's address, the keys that it requires of clients, and its certificate."""

    address: str
    """The interface."""
    api_key: Secret
    """The bearer token of clients."""
    admin_key: Secret
    """The key that clients must send to change a server over HTTP."""
    trust: Trust
    """Settings with these keys lie in the same private folder while a server of another process reads them."""


class Progress(TypedDict):
    """The part of a heartbeat about a server."""

    running: int
    """Requests that are being decoded."""
    queued: int
    """Requests that wait for a place."""
    tokens_generated: int
    """Since the server started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWeights:
    """The weights that a server is to take over."""

    version: str
    """Its tag."""
    directory: Path
    """Where its files are, which were prepared."""
    mode: UpdateMode
    """The treatment of unfinished requests."""
    timeout_s: float
    """Longest time that reading them may take, where that is done while the server stands still."""
    held: HeldWeights
    """What the server holds until then; expects them."""


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
        """Serve the initial weights; returns where, "https://host:port", once requests are answered there."""

    def progress(self) -> Progress:
        """Numbers for heartbeats; any thread may ask, at any time."""

    @property
    def kv_tokens(self) -> int:
        """That its KV cache has room for, once it has started; 0 if it does not say."""

    async def version(self) -> str:
        """The tag of the weights that it says it holds.

        Raises:
            ServerError: it does not say.
        """

    async def fingerprints(self, *, skipped: Sequence[str]) -> list[Fingerprints]:
        """What each rank of it computes from its tensors, but for those whose names contain one of `skipped`.

        Raises:
            ServerError: it cannot be asked.
        """

    async def prepare(self, weights: Path) -> None:
        """Do ahead, while it generates, what an update from this directory can have done before; perhaps nothing.

        Raises:
            ServerError: the weights cannot be used; those that it has serve on.
        """

    async def swap(self, new: NewWeights) -> float:
        """Stop, change over, have `HeldWeights` look, go on.

        Guarantee: no token carries the new version that a server made which was found not to hold it: its requests end
        with the tokens that they had.

        Returns:
            Seconds that it stood still.

        Raises:
            StaleServerError: it says that it has taken over the weights, and has not.
            ServerError: it refused them, and goes on with those from before; or nobody knows what it holds, it makes no
                token any more, and `wait_ended` says so.
        """

    async def wait_ended(self) -> None:
        """Until it serves no more; raises what it died of: a `BackendLostError` where a new start may help."""

    async def stop(self) -> None:
        """End the requests in flight and serve no more; does nothing if it does not run."""
