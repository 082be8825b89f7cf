"""Peers: a version from workers of other hosts that hold it, and else from the shared file system.

    for each file:  source ──GET /weights/DIGEST/FILE──► pieces, hashed on the way ──► the manifest's digest?
                      gone, refuses, silent, other bytes │ the next source; after the last one
                                                         └──► read whole from the shared file system

The other end is `workers/generation/given_weights.py`. What comes is compared with what was published, as from a disk,
so that nothing depends on a source but time.
"""

import http.client
import logging
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

import msgspec

from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.checkpoint.file_threads import for_each_file
from corral.workers.checkpoint.manifest import CorruptCheckpointError, Manifest
from corral.workers.weight_transport.patience import Patience
from corral.workers.weight_transport.transport import Arrived
from corral.workers.weight_transport.verified_copy import check_names, copy_file, copy_verified

logger = logging.getLogger(__name__)

_SILENCE_S: Final = 20.0  # longer than a host that computes leaves a socket alone, shorter than any version takes


class SourceError(Exception):
    """A worker of another host did not give a file; says why."""


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

    def fill(
        self, digest: str, sources: Sequence[str], weights: Path, manifest: Manifest, into: Path, patience: Patience
    ) -> Arrived:
        """Write all files of a version into an empty directory.

        Guarantee: when it returns, every file has the digest that `manifest` names, whoever gave it.

        Args:
            digest: of the manifest.
            sources: control URLs of workers that may hold the version, in the order in which they are asked.
            weights: the version on the shared file system.

        Raises:
            CorruptCheckpointError: what is on the shared file system, where that was asked, is not what was published.
            OSError: a file of it could not be read, or there is no room.
        """
        check_names(weights, manifest)
        fetching = _Fetching(self, digest, sources, manifest, into, patience)
        is_there_by_name = for_each_file(fetching.fetch, manifest.files)
        missing = {name: entry for name, entry in manifest.files.items() if not is_there_by_name[name]}
        if missing:
            logger.warning(
                "%d of %d files of %s are read from the shared file system, since no other host gave them",
                len(missing),
                len(manifest.files),
                weights,
            )
        left = msgspec.structs.replace(manifest, files=missing)
        bytes_read = copy_verified(weights, left, into, on_progress=patience.check)
        size_bytes = sum(entry.size for entry in manifest.files.values())
        return Arrived(
            bytes_read=bytes_read,
            bytes_received=size_bytes - sum(entry.size for entry in missing.values()),
            failed_sources=tuple(sorted(fetching.failed)),
        )


@dataclass(slots=True)
class _Fetching:
    """Of the files of one version; each in a thread of its own."""

    peers: Peers
    digest: str
    sources: Sequence[str]
    manifest: Manifest
    into: Path
    patience: Patience
    failed: set[str] = field(default_factory=set)
    """Sources that are asked for nothing more."""
    _until: float = 0.0

    def __post_init__(self) -> None:
        now = time.monotonic()
        self._until = now + self.peers.share_of_time * (self.patience.deadline - now)

    def fetch(self, name: str) -> bool:
        """Whether a source gave a file."""
        expected, target = self.manifest.files[name], self.into / name
        for source in self.sources:
            if source in self.failed or time.monotonic() > self._until:
                continue
            origin = f"{source}/weights/{self.digest}/{quote(name)}"
            try:
                with _opened(origin, expected, self.peers) as reading:
                    copy_file(reading, target, expected, origin=origin, on_progress=self._check)
                return True
            except (SourceError, CorruptCheckpointError) as error:
                self.failed.add(source)
                target.unlink(missing_ok=True)
                logger.warning("a file of %s comes from elsewhere: %s", self.digest, error)
        return False

    def _check(self) -> None:
        self.patience.check()
        if time.monotonic() > self._until:
            raise SourceError(f"other hosts took {self.peers.share_of_time:.0%} of the time, and had not given all")


@contextmanager
def _opened(url: str, expected: FileEntry, peers: Peers) -> Iterator["_Body"]:
    """Ask for a file; SourceError if the answer is not that long, or none."""
    parts = urlsplit(url)
    connection = http.client.HTTPSConnection(parts.netloc, timeout=peers.silence_s, context=peers.tls)
    try:
        try:
            connection.request("GET", parts.path, headers={"Authorization": f"Bearer {peers.admin_key}"})
            response = connection.getresponse()
            if response.status != 200:
                raise SourceError(f"{url} answered {response.status}: {response.read(200).decode(errors='replace')}")
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(f"{url} did not answer: {error}") from error
        if response.length != expected.size:
            raise SourceError(f"{url}: expected {expected.size} bytes, got {response.length}")
        yield _Body(response, url, remaining=expected.size)
    finally:
        connection.close()


@dataclass(slots=True)
class _Body:
    """What a source gives of one file."""

    response: http.client.HTTPResponse
    url: str
    remaining: int

    def readinto(self, buffer: memoryview, /) -> int:
        """What has come by now, so that who copies can see how long it takes."""
        if self.remaining == 0:
            return 0
        try:
            size = self.response.fp.readinto1(buffer[: self.remaining])
        except OSError as error:
            raise SourceError(f"{self.url} failed with {self.remaining} bytes to come: {error}") from error
        if not size:
            raise SourceError(f"{self.url} ended with {self.remaining} bytes to come")
        self.remaining -= size
        return size
