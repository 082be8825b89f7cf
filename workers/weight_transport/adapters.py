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
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from corral.workers.checkpoint.durable_file import PIECE_BYTES, FileEntry
from corral.workers.checkpoint.low_rank import AdapterError, LowRank, read_adapter
from corral.workers.checkpoint.manifest import ADAPTER_FOLDER
from corral.workers.weight_transport.filling import Filling, FindWay, Held, NoWayError, Pieces, Way, whole

logger = logging.getLogger(__name__)

BASE_FILE: Final = "base-of-adapter"  # no name of a weight file, or servers would read it
_SUFFIX: Final = ".safetensors"
_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def by_adapter(version: Filling) -> FindWay:
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

    def find_way(self, name: str, expected: FileEntry) -> Way | None:
        """By the newest file of this name, whose weights have the same places if it has the same size."""
        for path, files in self.held.versions:
            if name.endswith(_SUFFIX) and (entry := files.get(name)) is not None and entry.size == expected.size:
                origin, doubt = f"{path / name} and the adapter", partial(self.base.unlink, missing_ok=True)
                return Way(origin=origin, pieces=self._pieces(path / name), failed=doubt)
        return None

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
