"""Files of a version from those of the version before it, the base model's weights, and the version's adapter.

    adapter (A, B) ──► W0 + (B A) alpha / r of each adapted weight ─┬─► the new file
    the same file of a version that is held ──► all other weights ──┘

W0 of the adapted weights is read from the base model once per host, and goes along with the versions that are held, as
a file that no server reads. The trainer made its files in the same way (`low_rank.py`), bit for bit; a base that is
another one, or an adapter that was torn, shows in the digest.
"""

import json
import logging
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from corral.workers.checkpoint.durable_file import PIECE_BYTES, FileEntry
from corral.workers.checkpoint.low_rank import ADAPTER_FOLDER, AdapterError, LowRank, read_adapter
from corral.workers.weight_transport.filling import Encoded, Filling, Held, NoWayError, Pieces, Way

logger = logging.getLogger(__name__)

BASE_FILE: Final = "base-of-adapter"  # no name of a weight file, or servers would read it
_SUFFIX: Final = ".safetensors"
_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def by_adapter(version: Filling) -> Encoded:
    """The version's adapter where a version is held; its own files are not among them, since no server reads them."""
    files = version.manifest.files
    adapter = {name for name in files if name.startswith(f"{ADAPTER_FOLDER}/")}
    served = {name: entry for name, entry in files.items() if name not in adapter}
    adapted = _prepare(version.weights, version.into, version.held) if adapter and version.held.versions else None
    if adapted is None:
        return Encoded(files=served)
    return Encoded(
        files=served,
        find_way=adapted.find_way,
        bytes_read=sum(files[name].size for name in adapter) + adapted.base_bytes,
        settle=adapted.doubt_base,
    )


def _prepare(weights: Path, into: Path, held: Held) -> "_Adapted | None":
    """What the files of a version are made of besides those that are held; None where that cannot be read."""
    try:
        model, added = read_adapter(weights / ADAPTER_FOLDER)
        return _Adapted(added, into / BASE_FILE, _take_base(model, added.keys(), into, held), held)
    except (AdapterError, OSError, SafetensorError) as error:
        logger.warning("%s is read whole, since nothing can be made from its adapter: %s", weights, error)
        return None


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
    """W0 of these weights."""
    base_bytes: int
    """That were read for it now."""
    held: Held

    def find_way(self, name: str, expected: FileEntry) -> Way | None:
        """By the newest file of this name, whose weights have the same places if it has the same size."""
        for path, files in self.held.versions:
            if name.endswith(_SUFFIX) and (entry := files.get(name)) is not None and entry.size == expected.size:
                return Way(origin=f"{path / name} and the adapter", pieces=self._pieces(path / name))
        return None

    def doubt_base(self, came_otherwise: Set[str]) -> None:
        """It may be what was wrong with files that were not made of it; then the next version reads it anew."""
        if any(name.endswith(_SUFFIX) for name in came_otherwise):
            self.base.unlink()

    def _pieces(self, path: Path) -> Pieces:
        try:
            with open(path, "rb", buffering=0) as old, safe_open(self.base, framework="pt") as base:
                yield from self._merged_file(old, base)
        except SafetensorError as error:
            raise NoWayError(f"the base model's weights that this host keeps cannot be used: {error}") from error

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
                raise NoWayError(f"{name} is of {entry['dtype']}, which nothing is added to")
            old.seek(end - first, os.SEEK_CUR)
            yield self._merged(name, base.get_tensor(name), _DTYPES[entry["dtype"]])

    def _merged(self, name: str, weight: Tensor, dtype: torch.dtype) -> memoryview:
        """As the trainer holds the frozen weight, in the type of its products, and writes the sum."""
        added = self.added[name]
        if weight.shape != (added.B.shape[0], added.A.shape[1]):
            raise NoWayError(f"{name} of the base model has shape {list(weight.shape)}, which is not its adapter's")
        merged = added.added_to(weight.to(dtype)).to(dtype)
        return merged.view(-1).view(torch.uint8).numpy().data


def _piece_by_piece(file: FileIO, num_bytes: int) -> Pieces:
    while num_bytes > 0:
        piece = file.read(min(num_bytes, PIECE_BYTES))
        if not piece:
            raise NoWayError(f"{file.name} ends within a weight")
        num_bytes -= len(piece)
        yield memoryview(piece)
