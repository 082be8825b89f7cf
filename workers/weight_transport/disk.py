"""DiskTransport: servers read the shared file system themselves.

directory ──verified where it is──► the same directory ──► the server reads it again, standing still
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from corral.workers.checkpoint.content_digest import digest_of
from corral.workers.checkpoint.manifest import MANIFEST_NAME, verify_manifest
from corral.workers.weight_transport.patience import Patience
from corral.workers.weight_transport.transport import StagedVersion, StagingError


class DiskTransport:
    """Keeps nothing: for hosts without room in memory, and for models from elsewhere, which have no manifest."""

    place = ""

    def __init__(self) -> None:
        self._given_up = threading.Event()

    def stage(
        self, version: str, weights: Path, digest: str | None, *, timeout_s: float, sources: Sequence[str] = ()
    ) -> StagedVersion:
        """Compare the files with their manifest; a directory without one, a model from elsewhere, is as it is."""
        started = time.monotonic()
        patience = Patience.of(f"version {version}", timeout_s=timeout_s, given_up=self._given_up)
        bytes_read = 0
        if has_manifest(weights, digest):
            manifest = verify_manifest(weights, digest, on_progress=patience.check)
            bytes_read = sum(entry.size for entry in manifest.files.values())
        return StagedVersion(path=weights, bytes_read=bytes_read, seconds=time.monotonic() - started)

    def held(self, digest: str) -> Path | None:
        """None: it keeps nothing."""
        return None

    def close(self) -> None:
        """End a staging under way."""
        self._given_up.set()


def has_manifest(weights: Path, digest: str | None) -> bool:
    """Whether there is anything to compare the files with; one that was named and is missing is for its reader to find.

    Raises:
        StagingError: there is no such directory.
    """
    if not weights.is_dir():
        raise StagingError(f"{weights} is not there; it was removed, or this host does not see the trial's directory")
    return digest is not None or (weights / MANIFEST_NAME).exists()


def manifest_digest(weights: Path) -> str:
    """Of the manifest that is there."""
    return digest_of((weights / MANIFEST_NAME).read_bytes())
