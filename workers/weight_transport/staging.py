"""WeightStaging: how a version's files get to where a server of this host reads them, while the server generates.

                          ┌── this host's memory, and the worker of it that has the lock: filling.py
weights.transport ──place─┼── the same, after other hosts: PeerFiles
     │                    └── the shared file system, verified where it is; for want of room, too
     └──encoding── as it is, by deltas, by the adapter: what is read where a version is held already
"""

import errno
import heapq
import http.client
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from corral.experiments.config.rollout import WeightEncoding, WeightsConfig
from corral.workers.checkpoint.durable_file import CACHED_BYTES, PIECE_BYTES, FileEntry, digest_of
from corral.workers.checkpoint.file_delta import DELTA_SUFFIX, DeltaError, PieceFile, Readable, apply_delta, read_header
from corral.workers.checkpoint.low_rank import AdapterError, LowRank, read_adapter
from corral.workers.checkpoint.manifest import ADAPTER_FOLDER, MANIFEST_NAME, read_manifest, verify_manifest
from corral.workers.weight_transport.filling import (
    Arrived,
    Encode,
    FileSource,
    Filling,
    FindSource,
    Held,
    NoSourceError,
    Pieces,
    StagedVersion,
    StagingDeadline,
    StagingError,
    whole,
)
from corral.workers.weight_transport.host_weights import HostWeights, NoRoomError

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S: Final = 5.0  # for a staging under way; if its file system hangs, the process's end lets go instead


# Files of a version from those of the version before it, the base model's weights, and the version's adapter.
#
#     adapter (A, B) ──► W0 + (B A) alpha / r of each adapted weight ─┬─► the new file
#     the same file of a version that is held ──► all other weights ──┘
#
# W0 of the adapted weights is read from the base model once per host, and goes along with the versions that are held,
# as a file that no server reads. The trainer made its files in the same way (`low_rank.py`), bit for bit; a base that
# is another one, or an adapter that was torn, shows in the digest.

BASE_FILE: Final = "base-of-adapter"  # no name of a weight file, or servers would read it
_SUFFIX: Final = ".safetensors"
_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


# Files of a version from those of the version before it, and from what has changed since.
#
#     held: a file of v5      v6: delta 5 -> 6      v7, wanted: delta 6 -> 7
#             `───────────────────► 5 -> 6 ────────────► 6 -> 7 ──► its file of v7
#
# A server that was busy while versions came misses some; of several ways it takes that with the fewest bytes. A delta
# names the digests of its base and of its result: after the trainer has gone back, what is held is an orphan, no delta
# leads from it, and files are read whole.


def by_deltas(version: Filling) -> FindSource:
    """Deltas where they lead from what is held."""
    return partial(_way_by_deltas, version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A file that leads from one content of another file to the next."""

    path: Path
    size: int
    """Bytes of it."""
    base: FileEntry
    result: FileEntry


def cheapest_chain(held: Collection[FileEntry], wanted: FileEntry, deltas: Iterable[Delta]) -> tuple[Delta, ...] | None:
    """Deltas to apply one after the other, the first one to something that is held (Dijkstra 1959, from the end).

    Returns:
        Those with the fewest bytes, and fewer than the wanted file has; None where no deltas lead there so.
    """
    leading_to: dict[FileEntry, list[Delta]] = defaultdict(list)
    for delta in deltas:
        leading_to[delta.result].append(delta)
    order = count()  # of equally many bytes, the first that was found
    reached: list[tuple[int, int, FileEntry, tuple[Delta, ...]]] = [(0, next(order), wanted, ())]
    done: set[FileEntry] = set()
    while reached:
        num_bytes, _, entry, chain = heapq.heappop(reached)
        if entry in held:
            return chain
        if entry in done:
            continue
        done.add(entry)
        for delta in leading_to[entry]:
            if num_bytes + delta.size < wanted.size:
                heapq.heappush(reached, (num_bytes + delta.size, next(order), delta.base, (delta, *chain)))
    return None


def _way_by_deltas(version: Filling, name: str, expected: FileEntry) -> FileSource | None:
    """By the file's delta from what is held; where a version was missed, by that one's delta and its own."""
    if f"{name}{DELTA_SUFFIX}" not in version.manifest.files:
        return None
    own = _read_delta(version.weights / f"{name}{DELTA_SUFFIX}")
    if own.result != expected:
        raise NoSourceError(f"{own.path} leads to {own.result}, and the manifest has {expected}")
    others = [] if version.held.file(name, own.base) is not None else _missed_deltas(version.weights, name)
    chain = cheapest_chain(version.held.contents(name), expected, [own, *others])
    if not chain:
        return None
    base = version.held.file(name, chain[0].base)
    assert base is not None  # the chain begins with something that is held
    num_bytes = sum(delta.size for delta in chain)
    return FileSource(origin=f"{base} and {len(chain)} deltas", pieces=_applied(base, chain), bytes_read=num_bytes)


def _missed_deltas(weights: Path, name: str) -> list[Delta]:
    """Of the versions beside this one that are still there.

    Their manifests need not be read: what comes out in the end is compared with that of the present version.
    """
    found: list[Delta] = []
    for path in weights.parent.glob(f"*/{name}{DELTA_SUFFIX}"):
        try:
            found.append(_read_delta(path))
        except (NoSourceError, OSError) as error:  # it may be gone this very moment, as old versions go
            logger.info("%s is no way to %s: %s", path, weights, error)
    return found


def _read_delta(path: Path) -> Delta:
    try:
        with open(path, "rb") as file:
            header = read_header(file)
            return Delta(path=path, size=os.fstat(file.fileno()).st_size, base=header.base, result=header.result)
    except DeltaError as error:
        raise NoSourceError(str(error)) from error


def _applied(base: Path, chain: Sequence[Delta]) -> Pieces:
    with ExitStack() as files:
        source: Readable = files.enter_context(open(base, "rb", buffering=0))
        try:
            for delta in chain:
                opened = files.enter_context(open(delta.path, "rb"))
                pieces = apply_delta(source, opened, read_header(opened))
                source = PieceFile(pieces)
            yield from pieces
        except DeltaError as error:
            raise NoSourceError(str(error)) from error


def by_adapter(version: Filling) -> FindSource:
    """The version's adapter, where a version is held and that can be read."""
    adapter = [entry for name, entry in version.manifest.files.items() if name.startswith(f"{ADAPTER_FOLDER}/")]
    if not adapter or not version.held.versions:
        return whole(version)
    try:
        model, added = read_adapter(version.weights / ADAPTER_FOLDER)
        base_bytes = _take_base(model, added.keys(), version.into, version.held)
    except (AdapterError, OSError, SafetensorError) as error:
        logger.warning("%s is read whole, since nothing can be made from its adapter: %s", version.weights, error)
        return whole(version)
    version.bytes_read += base_bytes + sum(entry.size for entry in adapter)
    return _Adapted(added, version.into / BASE_FILE, version.held).find_way


def _take_base(model: Path, names: Set[str], into: Path, held: Held) -> int:
    """Let `into` have the base model's weights of these names; returns the bytes that were read for it."""
    for path, _ in held.versions:
        if (path / BASE_FILE).exists():
            os.link(path / BASE_FILE, into / BASE_FILE)
            return 0
    found: dict[str, Tensor] = {}
    for path in sorted(model.glob(f"*{_SUFFIX}")):
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in names & set(file.keys())})
    if missing := sorted(names - found.keys()):
        raise AdapterError(f"{model} has no weight {missing[0]}, which the adapter is beside")
    save_file(found, into / BASE_FILE)
    return sum(tensor.nbytes for tensor in found.values())


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A version that is to be made."""

    added: Mapping[str, LowRank]
    """By weight."""
    base: Path
    """W0 of these weights. It may be what is wrong where a file is not what it should be, and is removed then, so that
    the next version reads it anew."""
    held: Held

    def find_way(self, name: str, expected: FileEntry) -> FileSource | None:
        """By the newest file of this name, whose weights have the same places if it has the same size."""
        for path, files in self.held.versions:
            if name.endswith(_SUFFIX) and (entry := files.get(name)) is not None and entry.size == expected.size:
                origin, doubt = f"{path / name} and the adapter", partial(self.base.unlink, missing_ok=True)
                return FileSource(origin=origin, pieces=self._pieces(path / name), failed=doubt)
        return None

    def _pieces(self, path: Path) -> Pieces:
        try:
            with open(path, "rb", buffering=0) as old, safe_open(self.base, framework="pt") as base:
                yield from self._merged_file(old, base)
        except SafetensorError as error:
            raise NoSourceError(f"the base model's weights that this host keeps cannot be used: {error}") from error

    def _merged_file(self, old: FileIO, base: Any) -> Pieces:
        length = old.read(8)
        header = old.read(int.from_bytes(length, "little"))
        yield memoryview(length + header)
        tensors: dict[str, Any] = json.loads(header)
        tensors.pop("__metadata__", None)
        for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            first, end = entry["data_offsets"]
            if name not in self.added:
                yield from _piece_by_piece(old, end - first)
                continue
            if entry["dtype"] not in _DTYPES:
                raise NoSourceError(f"{name} is of {entry['dtype']}, which nothing is added to")
            old.seek(end - first, os.SEEK_CUR)
            yield self._merged(name, base.get_tensor(name), _DTYPES[entry["dtype"]])

    def _merged(self, name: str, weight: Tensor, dtype: torch.dtype) -> memoryview:
        """As the trainer holds the frozen weight, in the type of its products, and writes the sum."""
        added = self.added[name]
        if weight.shape != (added.B.shape[0], added.A.shape[1]):
            raise NoSourceError(f"{name} of the base model has shape {list(weight.shape)}, which is not its adapter's")
        merged = added.added_to(weight.to(dtype)).to(dtype)
        return merged.view(-1).view(torch.uint8).numpy().data


def _piece_by_piece(file: FileIO, num_bytes: int) -> Pieces:
    while num_bytes > 0:
        piece = file.read(min(num_bytes, PIECE_BYTES))
        if not piece:
            raise NoSourceError(f"{file.name} ends within a weight")
        num_bytes -= len(piece)
        yield memoryview(piece)


# Ways by which files of a version come from workers of other hosts that hold it.
#
#     source ──GET /weights/DIGEST/FILE──► pieces      gone, refuses, silent, other bytes: it is asked for nothing more
#
# The other end is `workers/generation/control.py`.

_SILENCE_S: Final = 20.0  # longer than a host that computes leaves a socket alone, shorter than any version takes


@dataclass(frozen=True, slots=True)
class Peers:
    """The workers of other hosts, for those who know the key."""

    admin_key: str = field(repr=False)
    tls: ssl.SSLContext
    """By which a source proves itself before it gets the key."""
    silence_s: float = _SILENCE_S
    """Longest time without a byte of a source."""
    fraction_of_time: float = 0.5
    """Of the time for staging, which all sources together may take; the shared file system has the rest."""


class PeerFiles:
    """The files of one version, as other hosts give them; each may be asked for in a thread of its own."""

    def __init__(self, peers: Peers, digest: str, sources: Sequence[str], patience: StagingDeadline) -> None:
        """
        Args:
            digest: of the manifest.
            sources: control URLs of workers that may hold the version, in the order in which they are asked.
        """
        self.failed: set[str] = set()
        """Sources that are asked for nothing more."""
        self.ways: list[FindSource] = [partial(self._find_way, source) for source in sources]
        self._peers = peers
        self._digest = digest
        now = time.monotonic()
        self._until = now + peers.fraction_of_time * (patience.deadline - now)

    def _find_way(self, source: str, name: str, expected: FileEntry) -> FileSource | None:
        if source in self.failed or time.monotonic() > self._until:
            return None
        url = f"{source}/weights/{self._digest}/{quote(name)}"
        pieces = self._pieces(url, expected.size)
        return FileSource(
            origin=url, pieces=pieces, bytes_received=expected.size, failed=partial(self.failed.add, source)
        )

    def _pieces(self, url: str, size_bytes: int) -> Pieces:
        """The pieces as they arrive, so that the copying thread can check its deadline."""
        parts, state = urlsplit(url), "did not answer"
        connection = http.client.HTTPSConnection(parts.netloc, timeout=self._peers.silence_s, context=self._peers.tls)
        try:
            connection.request("GET", parts.path, headers={"Authorization": f"Bearer {self._peers.admin_key}"})
            response = connection.getresponse()
            if response.status != 200:
                raise NoSourceError(f"{url} answered {response.status}: {response.read(200).decode(errors='replace')}")
            if response.length != size_bytes:
                raise NoSourceError(f"{url}: expected {size_bytes} bytes, got {response.length}")
            buffer, remaining = memoryview(bytearray(CACHED_BYTES)), size_bytes
            while remaining:
                state = f"failed with {remaining} bytes to come"
                size = response.fp.readinto1(buffer[:remaining])
                if not size:
                    raise NoSourceError(f"{url} ended with {remaining} bytes to come")
                if time.monotonic() > self._until:
                    fraction = self._peers.fraction_of_time
                    raise NoSourceError(f"other hosts took {fraction:.0%} of the time, and had not given all")
                remaining -= size
                yield buffer[:size]
        except (OSError, http.client.HTTPException) as error:
            raise NoSourceError(f"{url} {state}: {error}") from error
        finally:
            connection.close()


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


_ENCODINGS: Final[Mapping[WeightEncoding, Encode]] = {"whole": whole, "delta": by_deltas, "lora": by_adapter}


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

    def _patience(self, version: str, timeout_s: float) -> StagingDeadline:
        return StagingDeadline.of(f"version {version}", timeout_s=timeout_s, given_up=self._given_up)

    def _obtain(
        self, weights: Path, digest: str | None, sources: Sequence[str], patience: StagingDeadline
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


def _verify(weights: Path, digest: str | None, patience: StagingDeadline) -> Arrived:
    """Compare files with their manifest, where they are."""
    manifest = verify_manifest(weights, digest, on_progress=patience.check)
    return Arrived(bytes_read=sum(entry.size for entry in manifest.files.values()))
