"""WeightStaging: how a version's files get to where a server of this host reads them, while the server generates.

                          ┌── this host's memory, and the worker of it that has the lock: filling.py
weights.transport ──place─┼── the same, after other hosts: peers.py
     │                    └── the shared file system, verified where it is; for want of room, too
     └──encoding── as it is, by deltas, by the adapter: what is read where a version is held already
"""

import errno
import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from corral.experiments.config.rollout import WeightEncoding, WeightsConfig
from corral.workers.checkpoint.content_digest import digest_of
from corral.workers.checkpoint.manifest import MANIFEST_NAME, read_manifest, verify_manifest
from corral.workers.weight_transport.adapters import by_adapter
from corral.workers.weight_transport.deltas import by_deltas
from corral.workers.weight_transport.filling import (
    Arrived,
    Encode,
    Filling,
    Held,
    Patience,
    StagedVersion,
    StagingError,
    whole,
)
from corral.workers.weight_transport.host_weights import HostWeights, NoRoomError
from corral.workers.weight_transport.peers import PeerFiles, Peers

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S: Final = 5.0  # for a staging under way; if its file system hangs, the process's end lets go instead
_ENCODINGS: Final[Mapping[WeightEncoding, Encode]] = {"whole": whole, "delta": by_deltas, "lora": by_adapter}


def make_staging(
    config: WeightsConfig, *, trial_uuid: str, worker: str, admin_key: str, tls: ssl.SSLContext
) -> "WeightStaging":
    """Of one generation worker; without a usable host directory servers read as with `disk`, and the log says why.

    Args:
        worker: its name, for the other workers of its host.
        admin_key: what workers of other hosts want of those that they give weights to.
        tls: by which those workers prove themselves first.
    """
    if config.place == "shared":
        return WeightStaging(None)
    peers = Peers(admin_key, tls) if config.place == "hosts" else None
    try:
        host = HostWeights(config.host_directory, trial_uuid, owner=worker)
    except OSError as error:
        logger.warning(
            "each server of this host reads weights from the shared file system, since %s cannot be used (%s); "
            "weights.host_directory names another place",
            config.host_directory,
            error,
        )
        return WeightStaging(None)
    return WeightStaging(host, encode=_ENCODINGS[config.encoding], peers=peers)


class WeightStaging:
    """Stages one version at a time for one server; blocks, so it is called in a thread.

    Example:
        staged = staging.stage("0.7", trial.weights_path / "v00000007-e0", digest, timeout_s=300.0)
        await client.load(url, version="0.7", weights=staged.path, flush_cache=True, timeout_s=300.0)
        staging.taken_over()
    """

    def __init__(self, host: HostWeights | None, *, encode: Encode = whole, peers: Peers | None = None) -> None:
        """
        Args:
            host: where versions are put; None leaves them on the shared file system, from where the server reads them
                once more: for hosts without room in memory.
            peers: other hosts, which are asked before the shared file system is, and given what is held here.
        """
        self.place = f"{socket.gethostname()}:{host.path}" if host is not None and peers is not None else ""
        """This host's directory, by a name that no other host's has; empty where other hosts are given nothing."""
        self._host = host
        self._encode = encode
        self._peers = peers
        self._given_up = threading.Event()
        self._lock = threading.Lock()

    def stage(
        self, version: str, weights: Path, digest: str | None, *, timeout_s: float, sources: Sequence[str] = ()
    ) -> StagedVersion:
        """Make a version's files ready, unless another worker of this host has; those that the server reads now stay.

        Args:
            version: its tag, for messages.
            weights: its directory on the shared file system.
            digest: of its manifest; None trusts the manifest that is there, or the files where there is none: a model
                from elsewhere.
            timeout_s: longest time that it may take, and again where there was no room.
            sources: control URLs of workers on other hosts that hold it, for who asks other hosts at all.

        Raises:
            CorruptCheckpointError: the files are not what the manifest says, or the manifest is another one.
            StagingError: it took too long, or there is no such directory.
        """
        started = time.monotonic()
        if not weights.is_dir():
            raise StagingError(
                f"{weights} is not there; it was removed, or this host does not see the trial's directory"
            )
        path, arrived = weights, Arrived()
        if digest is not None or (weights / MANIFEST_NAME).exists():
            try:
                path, arrived = self._obtain(weights, digest, sources, self._patience(version, timeout_s))
            except NoRoomError as error:
                logger.warning("version %s is read from %s by each server of this host: %s", version, weights, error)
                arrived = _verify(weights, digest, self._patience(version, timeout_s))
            except OSError as error:
                raise StagingError(f"version {version} could not be staged from {weights}: {error}") from error
        return StagedVersion(path=path, seconds=time.monotonic() - started, **asdict(arrived))

    def taken_over(self) -> None:
        """The server reads what was staged last; files of older versions may go."""
        if self._host is not None:
            with self._lock:
                self._host.taken_over()

    def held(self, digest: str) -> Path | None:
        """The directory of a version that other hosts may have, by the digest of its manifest; any thread may ask."""
        return self._host.held(digest) if self._host is not None and self._peers is not None else None

    def close(self) -> None:
        """Let go of what was staged, and end a staging under way; any thread may call it. The last worker of the host
        removes its directory."""
        self._given_up.set()
        if self._host is not None and self._lock.acquire(timeout=_CLOSE_TIMEOUT_S):
            self._host.close()

    def _patience(self, version: str, timeout_s: float) -> Patience:
        return Patience.of(f"version {version}", timeout_s=timeout_s, given_up=self._given_up)

    def _obtain(
        self, weights: Path, digest: str | None, sources: Sequence[str], patience: Patience
    ) -> tuple[Path, Arrived]:
        if self._host is None:
            return weights, _verify(weights, digest, patience)
        patience.check()
        digest = digest or digest_of((weights / MANIFEST_NAME).read_bytes())
        manifest = read_manifest(weights, digest)
        peers = PeerFiles(self._peers, digest, sources, patience) if self._peers is not None else None

        def write(into: Path, held: Sequence[Path]) -> Arrived:
            version = Filling(
                weights=weights, manifest=manifest, into=into, held=Held.of(held), on_progress=patience.check
            )
            try:
                arrived = version.fill(self._encode, peers.ways if peers is not None else ())
                return replace(arrived, failed_sources=tuple(sorted(peers.failed)) if peers is not None else ())
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise NoRoomError(f"{into} ran full: {error}") from error
                raise

        size_bytes = sum(entry.size for entry in manifest.files.values())
        with self._lock:
            return self._host.obtain(digest, size_bytes=size_bytes, write=write, patience=patience)


def _verify(weights: Path, digest: str | None, patience: Patience) -> Arrived:
    """Compare files with their manifest, where they are."""
    manifest = verify_manifest(weights, digest, on_progress=patience.check)
    return Arrived(bytes_read=sum(entry.size for entry in manifest.files.values()))
