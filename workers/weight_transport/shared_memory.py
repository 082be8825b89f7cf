"""SharedMemoryTransport: the shared file system is read once per host and version, and while servers generate.

shared file system ──one worker of the host, hashing──► HostWeights ──► every server of the host
         │                     ▲                            └── with `Peers`: workers of other hosts
         │                     └── with `Peers`: other hosts first
         └── no room, or no manifest ──► DiskTransport
"""

import errno
import logging
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from corral.workers.checkpoint.manifest import Manifest, read_manifest
from corral.workers.weight_transport.disk import DiskTransport, has_manifest, manifest_digest
from corral.workers.weight_transport.host_weights import HostWeights, NoRoomError
from corral.workers.weight_transport.patience import Patience
from corral.workers.weight_transport.peers import Peers
from corral.workers.weight_transport.transport import Arrived, StagedVersion, StagingError
from corral.workers.weight_transport.verified_copy import copy_verified

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0  # for a staging under way; if its file system hangs, the end of the process lets go instead


class FillVersion(Protocol):
    """How the files of a version get from the shared file system into the host directory."""

    def __call__(
        self, weights: Path, manifest: Manifest, into: Path, held: Sequence[Path], patience: Patience
    ) -> Arrived:
        """Write the files that servers read, each compared with its digest in the manifest, into an empty directory.

        Args:
            weights: the version on the shared file system.
            held: versions in the host directory, each under the digest of its manifest, newest first.

        Raises:
            CorruptCheckpointError: what is there is not what the manifest says.
            OSError: a file could not be read, or there is no room.
        """


def fill_with_copies(
    weights: Path, manifest: Manifest, into: Path, held: Sequence[Path], patience: Patience
) -> Arrived:
    """Read all of it."""
    return Arrived(bytes_read=copy_verified(weights, manifest, into, on_progress=patience.check))


class SharedMemoryTransport:
    """Stages into the directory of this host."""

    def __init__(self, host: HostWeights, *, fill: FillVersion = fill_with_copies, peers: Peers | None = None) -> None:
        """
        Args:
            fill: how files get here where no other host gives them.
            peers: other hosts, which are asked first, and given what is held here.
        """
        self.place = f"{socket.gethostname()}:{host.path}" if peers is not None else ""
        self._host = host
        self._fill = fill
        self._peers = peers
        self._disk = DiskTransport()
        self._given_up = threading.Event()
        self._lock = threading.Lock()

    def stage(
        self, version: str, weights: Path, digest: str | None, *, timeout_s: float, sources: Sequence[str] = ()
    ) -> StagedVersion:
        """Copy the version, unless another worker of this host has; without room it stays where it is."""
        started = time.monotonic()
        if not has_manifest(weights, digest):
            return self._disk.stage(version, weights, digest, timeout_s=timeout_s)
        patience = Patience.of(f"version {version}", timeout_s=timeout_s, given_up=self._given_up)
        try:
            with self._lock:
                path, arrived = self._obtain(weights, digest or manifest_digest(weights), sources, patience)
        except NoRoomError as error:
            logger.warning("version %s is read from %s by each server of this host: %s", version, weights, error)
            return self._disk.stage(version, weights, digest, timeout_s=timeout_s)
        except OSError as error:
            raise StagingError(f"version {version} could not be staged from {weights}: {error}") from error
        return StagedVersion(
            path=path,
            bytes_read=arrived.bytes_read,
            bytes_received=arrived.bytes_received,
            failed_sources=arrived.failed_sources,
            seconds=time.monotonic() - started,
        )

    def held(self, digest: str) -> Path | None:
        """Nothing where other hosts are none of its business."""
        return self._host.held(digest) if self._peers is not None else None

    def close(self) -> None:
        """Let go of the host directory; the last worker of the host removes it."""
        self._given_up.set()
        self._disk.close()
        if self._lock.acquire(timeout=_CLOSE_TIMEOUT_S):
            self._host.close()

    def _obtain(self, weights: Path, digest: str, sources: Sequence[str], patience: Patience) -> tuple[Path, Arrived]:
        patience.check()
        manifest = read_manifest(weights, digest)

        def write(into: Path, held: Sequence[Path]) -> Arrived:
            try:
                if self._peers is not None and sources:
                    return self._peers.fill(digest, sources, weights, manifest, into, patience)
                return self._fill(weights, manifest, into, held, patience)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise NoRoomError(f"{into} ran full: {error}") from error
                raise

        size_bytes = sum(entry.size for entry in manifest.files.values())
        return self._host.obtain(digest, size_bytes=size_bytes, write=write, patience=patience)
