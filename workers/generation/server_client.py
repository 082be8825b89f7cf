"""The manager's side of a generation server's HTTP API: bring it to a version, ask whether it is well.

    bring_to:  get_model_info ──other version──► pause (retract) ──► update_weights_from_disk ──► continue ──► verify
                     └──────── same version ─────────────────────────────────────────────────────────────► READY

`retract` drops the KV cache of running requests, so that their next tokens come wholly from the new weights.
"""

from pathlib import Path
from typing import Any

import aiohttp

_PROBE_TIMEOUT_S = 5.0


class ServerError(RuntimeError):
    """A generation server refused, or did not answer in time."""


class GenerationServerClient:
    """Calls of the manager; the session carries the API key."""

    def __init__(self, session: aiohttp.ClientSession, *, update_timeout_s: float) -> None:
        self._session = session
        self._update_timeout_s = update_timeout_s

    async def bring_to(self, url: str, *, version: str, weights: Path) -> None:
        """Load `weights` unless the server holds `version` already; running requests continue on the new weights.

        Raises:
            ServerError: naming the call that failed; the server then still serves its old weights, or none.
        """
        if await self.version(url) != version:
            await self._post(url, "/pause_generation", {"mode": "retract"})
            try:
                await self._post(
                    url,
                    "/update_weights_from_disk",
                    {"model_path": str(weights), "weight_version": version, "flush_cache": True},
                )
            finally:
                await self._post(url, "/continue_generation", {})
            if (held := await self.version(url)) != version:
                raise ServerError(f"{url} holds version {held!r} after an update to {version!r}")
        await self.probe(url)

    async def version(self, url: str) -> str:
        """The tag of the weights that the server holds."""
        info = await self._get(url, "/get_model_info")
        if "weight_version" not in info:
            raise ServerError(f"{url}/get_model_info names no weight_version")
        return str(info["weight_version"])

    async def probe(self, url: str) -> None:
        """ServerError unless the server says that it is ready."""
        await self._get(url, "/ready")

    async def _get(self, url: str, path: str) -> dict[str, Any]:
        return await self._call("GET", url, path, None, _PROBE_TIMEOUT_S)

    async def _post(self, url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._call("POST", url, path, body, self._update_timeout_s)

    async def _call(
        self, method: str, url: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, url + path, json=body, timeout=timeout) as response:
                text = await response.text()
                if response.status != 200:
                    raise ServerError(f"{url}{path} answered {response.status}: {text[:300]}")
                return dict(await response.json()) if "json" in response.content_type and text.strip() else {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, TypeError) as error:
            reason = str(error) or f"no answer within {timeout_s:.0f} s"
            raise ServerError(f"{url}{path} failed: {reason}") from error
