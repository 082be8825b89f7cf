"""The worker's side of its server's HTTP API: how the server takes over weights, and which it holds.

    paused: pause_generation (retract) ──► load: update_weights_from_disk ──► continue_generation ──► version

`retract` drops the KV cache of running requests, so that their next tokens come wholly from the new weights; a cache
that is kept (`in_place`) could not be flushed, which SGLang reports as an error after the weights have changed.
The embedded engine and SGLang are spoken to alike. The version is what `/get_model_info` says: SGLang's server info
keeps the one that it was started with.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from corral.workers.generation.http_calls import ServerError, get_json, post

_ANSWER_TIMEOUT_S = 5.0
_PAUSE_TIMEOUT_S = 60.0  # a pause waits for the decode step under way


class GenerationServerClient:
    """Calls of the worker that the server belongs to."""

    def __init__(self, session: aiohttp.ClientSession, *, api_key: str, admin_key: str) -> None:
        """
        Args:
            api_key: of those who generate.
            admin_key: for what changes the server.
        """
        self._session = session
        self._api_key = api_key
        self._admin_key = admin_key

    @asynccontextmanager
    async def paused(self, url: str) -> AsyncIterator[None]:
        """While the block runs the server makes no token; afterwards running requests go on, without a cache.

        Raises:
            ServerError: naming the call that failed.
        """
        await self._post(url, "/pause_generation", {"mode": "retract"}, _PAUSE_TIMEOUT_S)
        try:
            yield
        finally:
            await self._post(url, "/continue_generation", {}, _PAUSE_TIMEOUT_S)

    async def load(self, url: str, *, version: str, weights: Path, timeout_s: float) -> None:
        """Read other weights; ServerError if they are refused, the server then still has its old ones."""
        body = {"model_path": str(weights), "weight_version": version, "flush_cache": True}
        await self._post(url, "/update_weights_from_disk", body, timeout_s)

    async def version(self, url: str) -> str:
        """The tag of the weights that the server holds."""
        info = await get_json(self._session, f"{url}/get_model_info", key=self._api_key, timeout_s=_ANSWER_TIMEOUT_S)
        if "weight_version" not in info:
            raise ServerError(f"{url}/get_model_info names no weight_version")
        return str(info["weight_version"])

    async def _post(self, url: str, path: str, body: dict[str, object], timeout_s: float) -> None:
        await post(self._session, url + path, body, key=self._admin_key, timeout_s=timeout_s)
