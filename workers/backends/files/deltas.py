"""Deltas of weight files: what a host has to read that holds the version before.

    the version before: files, manifest ──► WeightBase ──┐
    a new file, piece by piece, as it is written ────────┴──► DeltaEncoder ──► NAME.delta beside it, or none

The base is read back from the version's directory and not kept in memory: that would cost a rank as many bytes as it
writes, and what it wrote a step ago is in the page cache unless somebody else needs the memory.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torch import Tensor

from corral.workers.backends.files.tensors import write_tensors
from corral.workers.checkpoint.durable_file import FileEntry, write_durable
from corral.workers.checkpoint.file_delta import DeltaEncoder
from corral.workers.checkpoint.manifest import CorruptCheckpointError, read_manifest

logger = logging.getLogger(__name__)

MAX_SHARE: Final = 0.25  # of the file; a host saves little by a larger delta, and the rank spends more time on it
_MAX_ITEM_SIZE: Final = 4  # what the format of deltas knows


@dataclass
class WeightBase:
    """A sealed version of the same weights, against which the next one's deltas are made."""

    directory: Path
    files: Mapping[str, FileEntry]
    given_up: dict[str, str] = field(default_factory=dict)
    """Files of the new version that have no delta, and why."""

    @classmethod
    def of(cls, directory: Path) -> "WeightBase | None":
        """None, and a warning, if its manifest cannot be read: deltas save reading, and nothing depends on them."""
        try:
            return cls(directory, read_manifest(directory, None).files)
        except CorruptCheckpointError as error:
            logger.warning("the next version of the weights has no deltas: %s", error)
            return None

    def write_with_delta(
        self, name: str, tensors: Mapping[str, Tensor], path: Path, delta_path: Path, *, on_progress: Callable[[], None]
    ) -> tuple[FileEntry, FileEntry | None]:
        """Write a new file, and what leads to it from the base's file `name`.

        Returns:
            What was written of the file, and of the delta; None if that would not pay, which `given_up` then explains.
        """
        # The smallest divides the pieces of all; a file of weights has one type only.
        itemsize = min(_MAX_ITEM_SIZE, *(tensor.element_size() for tensor in tensors.values()))
        try:
            base = open(self.directory / name, "rb", buffering=0)
        except OSError as error:
            self.given_up[name] = f"the version before cannot be read: {error}"
            return write_tensors(path, tensors, on_progress=on_progress), None
        with base:
            encoder = DeltaEncoder(base, itemsize=itemsize, max_bytes=int(self.files[name].size * MAX_SHARE))
            entry = write_tensors(path, tensors, on_piece=encoder.add, on_progress=on_progress)
        content = encoder.content(base=self.files[name], result=entry)
        if not content:
            self.given_up[name] = encoder.given_up
            return entry, None
        return entry, write_durable(delta_path, content)
