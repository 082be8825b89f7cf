"""Files of a version from those of the version before it, and from what has changed since.

    a file that is held + its delta in the new version ──► the new file

A delta names the digests of its base and of its result: after the trainer has gone back, what is held is an orphan, no
delta leads from it, and files are read whole.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.checkpoint.file_delta import DELTA_SUFFIX, DeltaError, apply_delta, read_header
from corral.workers.checkpoint.manifest import Manifest
from corral.workers.weight_transport.from_held import Held, NoWayError, Way, fill_from_held
from corral.workers.weight_transport.patience import Patience
from corral.workers.weight_transport.transport import Arrived


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
    """Of one version."""

    weights: Path
    manifest: Manifest
    held: Held

    def find_way(self, name: str, expected: FileEntry) -> Way | None:
        """By the file's delta."""
        if (delta := self.manifest.files.get(f"{name}{DELTA_SUFFIX}")) is None:
            return None
        path = self.weights / f"{name}{DELTA_SUFFIX}"
        try:
            with open(path, "rb") as file:
                header = read_header(file)
        except DeltaError as error:
            raise NoWayError(str(error)) from error
        if header.result != expected:
            raise NoWayError(f"{path} leads to {header.result}, and the manifest has {expected}")
        base = self.held.file(name, header.base)
        return Way(_applied(base, path), bytes_read=delta.size) if base is not None else None


def _applied(base: Path, delta_path: Path) -> Generator[memoryview, None, None]:
    with open(base, "rb", buffering=0) as old, open(delta_path, "rb") as delta:
        try:
            yield from apply_delta(old, delta, read_header(delta))
        except DeltaError as error:
            raise NoWayError(str(error)) from error
