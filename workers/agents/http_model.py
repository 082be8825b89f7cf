"""HttpModel: the model as an agent's session asks for it, over the rollout worker's model endpoint.

token ids ──POST /inference/v1/generate, a key for this episode──► endpoint ──► EpisodeSession ──► token ids, logprobs
"""

from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from corral.workers.agents.contract import EpisodeEndedError, RefusedError
from corral.workers.agents.session import Reply

_BASE = "http://endpoint"  # a Unix socket has no host; the name is not looked up
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)  # the worker has deadlines for servers; it may have to wait for them


def open_http(socket_path: str) -> aiohttp.ClientSession:
    """Connections to the endpoint of this Unix socket."""
    return aiohttp.ClientSession(_BASE, connector=aiohttp.UnixConnector(socket_path, limit=0), timeout=_NO_TIMEOUT)


class HttpModel:
    """A `Model` for one episode."""

    def __init__(self, http: aiohttp.ClientSession, key: str) -> None:
        """
        Args:
            key: of the episode.
        """
        self._http, self._headers = http, {"Authorization": f"Bearer {key}"}

    async def __call__(self, ids: Sequence[int], sampling: Mapping[str, Any]) -> Reply:
        body = {"token_ids": list(ids), "sampling_params": dict(sampling)}
        async with self._http.post("/inference/v1/generate", json=body, headers=self._headers) as response:
            answer = await response.json()
        if response.status != 200:
            raise _error(answer["error"])
        [choice] = answer["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        versions = [tuple(span) for span in answer["versions"]]
        return Reply(answer["turn"], choice["token_ids"], logprobs, choice["finish_reason"], versions)


def _error(error: dict[str, Any]) -> Exception:
    if reason := error.get("reason"):
        return EpisodeEndedError(reason, error["message"])
    return RefusedError(error["message"])
