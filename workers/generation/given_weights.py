"""The files of the version that a worker holds, for workers of other hosts.

    another host ──GET /weights/DIGEST/FILE──► is DIGEST held? is FILE in its manifest? ──sendfile──► its bytes
                                                    `──► 404, whatever else it names

Only what a manifest lists has a name here, and only while its version is held: a path is never made from what was asked
for before that was found among those names. The asking end is `workers/weight_transport/peers.py`.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from corral.workers.checkpoint.manifest import CorruptCheckpointError, read_manifest

_SLOWEST_BYTES_PER_S: Final = 10e6  # who takes less is faster with the shared file system
_LONGEST_PAUSE_S: Final = 30.0

Held = Callable[[str], Path | None]
"""The directory of a version by the digest of its manifest, or None if it is not held."""


class GivenWeights:
    """Answers on the running loop, behind whoever checks keys."""

    def __init__(
        self,
        held: Held,
        *,
        slowest_bytes_per_s: float = _SLOWEST_BYTES_PER_S,
        longest_pause_s: float = _LONGEST_PAUSE_S,
    ) -> None:
        """
        Args:
            slowest_bytes_per_s: by which a receiver has to take a file.
            longest_pause_s: what it may take besides.
        """
        self._held = held
        self._slowest_bytes_per_s = slowest_bytes_per_s
        self._longest_pause_s = longest_pause_s

    def routes(self) -> list[web.RouteDef]:
        """For an application."""
        return [web.get("/weights/{digest}/{name:.+}", self._give)]

    async def _give(self, request: web.Request) -> web.StreamResponse:
        digest, name = request.match_info["digest"], request.match_info["name"]
        directory = self._held(digest)
        if directory is None:
            return web.Response(status=404, text=f"this worker does not hold {digest}")
        try:
            manifest = await asyncio.to_thread(read_manifest, directory, digest)
        except CorruptCheckpointError as error:
            return web.Response(status=404, text=str(error))
        if (entry := manifest.files.get(name)) is None:
            return web.Response(status=404, text=f"{digest} has no file {name!r}")
        return _TimedFile(directory / name, timeout_s=self._longest_pause_s + entry.size / self._slowest_bytes_per_s)


class _TimedFile(web.FileResponse):
    """A host that vanished would hold the file, and with it memory of this host, until TCP gives up."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        super().__init__(path)
        self._timeout_s = timeout_s

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send it; TimeoutError ends the connection."""
        async with asyncio.timeout(self._timeout_s):
            return await super().prepare(request)
