"""WeightTransport: how a version's files get from the shared file system to where a server of this host reads them.

version, directory, digest of its manifest ──stage (the server generates on)──► StagedVersion: verified files
                                               `──► CorruptCheckpointError: they are not what was published

disk             verified where they are; every server of the host reads them once more from there
shared_memory    one worker of the host copies them into host memory, verified on the way; all servers read that
delta            the same, but it reads what changed since a version that is in host memory, where there is one
lora             the same, but it reads an adapter
broadcast        the same, but it asks the workers of other hosts that hold the version by now, and reads the rest
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol


class StagingError(RuntimeError):
    """The files of a version could not be staged in time; says what it waited for, or what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What a worker has fetched of a version, and from where."""

    bytes_read: int = 0
    """Of the shared file system."""
    bytes_received: int = 0
    """From other hosts."""
    failed_sources: tuple[str, ...] = ()
    """Control URLs of the workers that did not give what they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedVersion(Arrived):
    """Files that are what was published, ready to be read; all else is 0 if another worker of the host staged them."""

    path: Path
    """Where the server reads them; they stay there until the next version is staged."""
    seconds: float
    """How long that took, waits for other workers included."""

    def after(self, earlier: "StagedVersion") -> "StagedVersion":
        """The same, with what an earlier staging of this version has cost as well."""
        return replace(
            self,
            bytes_read=earlier.bytes_read + self.bytes_read,
            bytes_received=earlier.bytes_received + self.bytes_received,
            seconds=earlier.seconds + self.seconds,
        )


class WeightTransport(Protocol):
    """Stages one version at a time for one server; blocks, so it is called in a thread.

    Example:
        staged = transport.stage("0.7", trial.weights_path / "v00000007-e0", digest, timeout_s=300.0)
        await client.load(url, version="0.7", weights=staged.path, flush_cache=True, timeout_s=300.0)
    """

    place: str
    """This host's directory, by a name that no other host's has; empty where other hosts are given nothing."""

    def stage(
        self, version: str, weights: Path, digest: str | None, *, timeout_s: float, sources: Sequence[str] = ()
    ) -> StagedVersion:
        """Make a version's files ready, and let go of those of the version before.

        Args:
            version: its tag, for messages.
            weights: its directory on the shared file system.
            digest: of its manifest; None trusts the manifest that is there, or the files where there is none.
            timeout_s: longest time that it may take.
            sources: control URLs of workers on other hosts that hold it, for who asks other hosts at all.

        Raises:
            CorruptCheckpointError: the files are not what the manifest says, or the manifest is another one.
            StagingError: it took too long, or there is no such directory.
        """

    def held(self, digest: str) -> Path | None:
        """The directory of a version that other hosts may have, by the digest of its manifest; any thread may ask."""

    def close(self) -> None:
        """Let go of what was staged, and end a staging under way; any thread may call it."""
