"""WeightTransport: how a version's files get from the shared file system to where a server of this host reads them.

version, directory, digest of its manifest ──stage (the server generates on)──► StagedVersion: verified files
                                               `──► CorruptCheckpointError: they are not what was published

disk             verified where they are; every server of the host reads them once more from there
shared_memory    one worker of the host copies them into host memory, verified on the way; all servers read that
delta            the same, but it reads what changed since the version that is in host memory, where there is one
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class StagingError(RuntimeError):
    """The files of a version could not be staged in time; says what it waited for, or what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedVersion:
    """Files that are what was published, ready to be read."""

    path: Path
    """Where the server reads them; they stay there until the next version is staged."""
    bytes_read: int
    """By this worker from the shared file system; 0 if another worker of the host has staged them."""
    seconds: float
    """How long that took, waits for other workers included."""


class WeightTransport(Protocol):
    """Stages one version at a time for one server; blocks, so it is called in a thread.

    Example:
        staged = transport.stage("0.7", trial.weights_path / "v00000007-e0", digest, timeout_s=300.0)
        await client.load(url, version="0.7", weights=staged.path, flush_cache=True, timeout_s=300.0)
    """

    def stage(self, version: str, weights: Path, digest: str | None, *, timeout_s: float) -> StagedVersion:
        """Make a version's files ready, and let go of those of the version before.

        Args:
            version: its tag, for messages.
            weights: its directory on the shared file system.
            digest: SHA-256 of its manifest; None trusts the manifest that is there, or the files where there is none.
            timeout_s: longest time that it may take.

        Raises:
            CorruptCheckpointError: the files are not what the manifest says, or the manifest is another one.
            StagingError: it took too long, or there is no such directory.
        """

    def close(self) -> None:
        """Let go of what was staged, and end a staging under way; any thread may call it."""
