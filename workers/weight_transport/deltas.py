"""Files of a version from those of the version before it, and from what has changed since.

    a file that is held + its delta in the new version ──► the new file
    a file that is held + the deltas of the versions that were missed, and of the new one ──► the new file

A delta names the digests of its base and of its result: after the trainer has gone back, what is held is an orphan, no
delta leads from it, and files are read whole.
"""

import logging
import os
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.checkpoint.file_delta import DELTA_SUFFIX, DeltaError, PieceFile, Readable, apply_delta, read_header
from corral.workers.checkpoint.manifest import Manifest
from corral.workers.weight_transport.delta_chains import Delta, cheapest_chain
from corral.workers.weight_transport.from_held import Held, NoWayError, Way, fill_from_held
from corral.workers.weight_transport.patience import Patience
from corral.workers.weight_transport.transport import Arrived

logger = logging.getLogger(__name__)


def fill_with_deltas(
    weights: Path, manifest: Manifest, into: Path, held: Sequence[Path], patience: Patience
) -> Arrived:
    """Read deltas where they lead from what is held, and all else whole; see `FillVersion`.

    Deltas are not among the files: no server reads them.
    """
    served = {name: entry for name, entry in manifest.files.items() if not name.endswith(DELTA_SUFFIX)}
    present = Held.of(held)
    deltas = _Deltas(weights, manifest, present)
    shown = msgspec.structs.replace(manifest, files=served)
    filled = fill_from_held(weights, shown, into, present, patience, deltas.find_way)
    return Arrived(bytes_read=filled.bytes_read)


@dataclass(frozen=True, slots=True)
class _Deltas:
    """Of one version, and of those beside it that are still there."""

    weights: Path
    manifest: Manifest
    held: Held

    def find_way(self, name: str, expected: FileEntry) -> Way | None:
        """By the file's delta from what is held; where a version was missed, by that one's delta and its own."""
        if f"{name}{DELTA_SUFFIX}" not in self.manifest.files:
            return None
        own = _read_delta(self.weights / f"{name}{DELTA_SUFFIX}")
        if own.result != expected:
            raise NoWayError(f"{own.path} leads to {own.result}, and the manifest has {expected}")
        others = [] if self.held.file(name, own.base) is not None else self._of_missed_versions(name)
        chain = cheapest_chain(self.held.contents(name), expected, [own, *others])
        if not chain:
            return None
        base = self.held.file(name, chain[0].base)
        assert base is not None  # the chain begins with something that is held
        return Way(_applied(base, chain), bytes_read=sum(delta.size for delta in chain))

    def _of_missed_versions(self, name: str) -> list[Delta]:
        """Their manifests need not be read: what comes out in the end is compared with that of the present version."""
        found: list[Delta] = []
        for path in self.weights.parent.glob(f"*/{name}{DELTA_SUFFIX}"):
            if path.parent == self.weights:
                continue
            try:
                found.append(_read_delta(path))
            except (NoWayError, OSError) as error:  # it may be gone this very moment, as old versions go
                logger.info("%s is no way to %s: %s", path, self.weights, error)
        return found


def _read_delta(path: Path) -> Delta:
    try:
        with open(path, "rb") as file:
            header = read_header(file)
            return Delta(path=path, size=os.fstat(file.fileno()).st_size, base=header.base, result=header.result)
    except DeltaError as error:
        raise NoWayError(str(error)) from error


def _applied(base: Path, chain: Sequence[Delta]) -> Generator[memoryview, None, None]:
    with ExitStack() as files:
        source: Readable = files.enter_context(open(base, "rb", buffering=0))
        try:
            for delta in chain:
                opened = files.enter_context(open(delta.path, "rb"))
                pieces = apply_delta(source, opened, read_header(opened))
                source = PieceFile(pieces)
            yield from pieces
        except DeltaError as error:
            raise NoWayError(str(error)) from error
