"""Ways by which files of a version come from workers of other hosts that hold it.

    source ──GET /weights/DIGEST/FILE──► pieces      gone, refuses, silent, other bytes: it is asked for nothing more

The other end is `workers/generation/control.py`.
"""

import http.client
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from urllib.parse import quote, urlsplit

from corral.workers.checkpoint.durable_file import CACHED_BYTES, FileEntry
from corral.workers.weight_transport.filling import FindWay, NoWayError, Patience, Pieces, Way

_SILENCE_S: Final = 20.0  # longer than a host that computes leaves a socket alone, shorter than any version takes


@dataclass(frozen=True, slots=True)
class Peers:
    """The workers of other hosts, for those who know the key."""

    admin_key: str = field(repr=False)
    tls: ssl.SSLContext
    """By which a source proves itself before it is told the key."""
    silence_s: float = _SILENCE_S
    """Longest time without a byte of a source."""
    share_of_time: float = 0.5
    """Of what there is, that all sources together may take; the shared file system has the rest."""


class PeerFiles:
    """The files of one version, as other hosts give them; each may be asked for in a thread of its own."""

    def __init__(self, peers: Peers, digest: str, sources: Sequence[str], patience: Patience) -> None:
        """
        Args:
            digest: of the manifest.
            sources: control URLs of workers that may hold the version, in the order in which they are asked.
        """
        self.failed: set[str] = set()
        """Sources that are asked for nothing more."""
        self.ways: list[FindWay] = [partial(self._find_way, source) for source in sources]
        self._peers = peers
        self._digest = digest
        now = time.monotonic()
        self._until = now + peers.share_of_time * (patience.deadline - now)

    def _find_way(self, source: str, name: str, expected: FileEntry) -> Way | None:
        if source in self.failed or time.monotonic() > self._until:
            return None
        url = f"{source}/weights/{self._digest}/{quote(name)}"
        pieces = self._pieces(url, expected.size)
        return Way(origin=url, pieces=pieces, bytes_received=expected.size, failed=partial(self.failed.add, source))

    def _pieces(self, url: str, size_bytes: int) -> Pieces:
        """Each is what has come by then, so that who copies can see how long it takes."""
        parts, state = urlsplit(url), "did not answer"
        connection = http.client.HTTPSConnection(parts.netloc, timeout=self._peers.silence_s, context=self._peers.tls)
        try:
            connection.request("GET", parts.path, headers={"Authorization": f"Bearer {self._peers.admin_key}"})
            response = connection.getresponse()
            if response.status != 200:
                raise NoWayError(f"{url} answered {response.status}: {response.read(200).decode(errors='replace')}")
            if response.length != size_bytes:
                raise NoWayError(f"{url}: expected {size_bytes} bytes, got {response.length}")
            buffer, remaining = memoryview(bytearray(CACHED_BYTES)), size_bytes
            while remaining:
                state = f"failed with {remaining} bytes to come"
                size = response.fp.readinto1(buffer[:remaining])
                if not size:
                    raise NoWayError(f"{url} ended with {remaining} bytes to come")
                if time.monotonic() > self._until:
                    share = self._peers.share_of_time
                    raise NoWayError(f"other hosts took {share:.0%} of the time, and had not given all")
                remaining -= size
                yield buffer[:size]
        except (OSError, http.client.HTTPException) as error:
            raise NoWayError(f"{url} {state}: {error}") from error
        finally:
            connection.close()
