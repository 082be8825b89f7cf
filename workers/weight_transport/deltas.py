"""Fills a version into the host directory from the version that is there, and from what has changed since.

    for each file:  the same in a version that is held ──► a second name for it
                    a delta from one that is held ───────► base + delta, hashed on the way ──► the manifest's digest?
                                                              no, damaged, or another base │
                    all others ◄───────────────────────────────────────────────────────────┘ read whole

A delta names the digests of its base and of its result, so that nobody need know which version follows which: after the
trainer has gone back, what is held is an orphan, no delta leads from it, and files are read whole.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.checkpoint.file_delta import DELTA_SUFFIX, DeltaError, apply_delta, read_header
from corral.workers.checkpoint.manifest import CorruptCheckpointError, Manifest, read_manifest
from corral.workers.weight_transport.patience import Patience
from corral.workers.weight_transport.verified_copy import copy_verified

logger = logging.getLogger(__name__)

_THREADS: Final = 4  # hashing is what takes longest, and is done file by file


def fill_with_deltas(weights: Path, manifest: Manifest, into: Path, held: Sequence[Path], patience: Patience) -> int:
    """Read deltas where they lead from what is held, and all else whole; see `FillVersion`.

    Guarantee: when it returns, every file has the digest that `manifest` names, whatever it was made from. Deltas are
    not among the files: no server reads them.
    """
    served = {name: entry for name, entry in manifest.files.items() if not name.endswith(DELTA_SUFFIX)}
    version = _Version(weights, manifest.files, into, _bases(held), patience.check)
    with ThreadPoolExecutor(_THREADS) as pool:
        read_by_name = dict(zip(served, pool.map(version.make, served), strict=True))
    missing = {name: served[name] for name, num_bytes in read_by_name.items() if num_bytes is None}
    logger.info(
        "%s/%s: %d of %d files from the version before, %d read whole",
        weights.parent.name,
        weights.name,
        len(served) - len(missing),
        len(served),
        len(missing),
    )
    whole = copy_verified(weights, msgspec.structs.replace(manifest, files=missing), into, on_progress=patience.check)
    return whole + sum(num_bytes for num_bytes in read_by_name.values() if num_bytes is not None)


def _bases(held: Sequence[Path]) -> list[tuple[Path, Mapping[str, FileEntry]]]:
    """Each version that is held, with what its files were compared with before it got its name."""
    bases: list[tuple[Path, Mapping[str, FileEntry]]] = []
    for path in held:
        try:
            bases.append((path, read_manifest(path, path.name).files))
        except CorruptCheckpointError as error:
            logger.warning("no delta is applied to what this host holds: %s", error)
    return bases


@dataclass(frozen=True, slots=True)
class _Version:
    """The version that is filled in."""

    weights: Path
    files: Mapping[str, FileEntry]
    into: Path
    bases: Sequence[tuple[Path, Mapping[str, FileEntry]]]
    on_progress: Callable[[], None]

    def make(self, name: str) -> int | None:
        """A file out of what is held; the bytes that were read for it, or None if it has to be read whole."""
        if Path(name).name != name:
            return None
        delta = self.files.get(f"{name}{DELTA_SUFFIX}")
        try:
            if (same := self._held(name, self.files[name])) is not None:
                os.link(same, self.into / name)
                return 0
            return delta.size if delta is not None and self._apply_delta(name) else None
        except (DeltaError, OSError) as error:
            logger.warning(
                "%s is read whole, since it could not be made from what is held: %s", self.weights / name, error
            )
            (self.into / name).unlink(missing_ok=True)
            return None

    def _held(self, name: str, entry: FileEntry) -> Path | None:
        """The file of this name in a version that is held, if it is this one."""
        return next((path / name for path, files in self.bases if files.get(name) == entry), None)

    def _apply_delta(self, name: str) -> bool:
        """False if what it leads from is not held."""
        expected, digest = self.files[name], hashlib.sha256()
        delta_path = self.weights / f"{name}{DELTA_SUFFIX}"
        with open(delta_path, "rb") as delta:
            header = read_header(delta)
            if header.result != expected:
                raise DeltaError(f"{delta_path} leads to {header.result}, and the manifest has {expected}")
            if (base := self._held(name, header.base)) is None:
                return False
            with open(base, "rb", buffering=0) as old, open(self.into / name, "xb", buffering=0) as new:
                for piece in apply_delta(old, delta, header):
                    digest.update(piece)
                    while piece:  # one write(2) may take less on a nearly full disk
                        piece = piece[new.write(piece) :]
                    self.on_progress()
        if (actual := digest.hexdigest()) != expected.sha256:
            raise DeltaError(f"{base} and {delta_path}: expected SHA-256 {expected.sha256}, got {actual}")
        return True
