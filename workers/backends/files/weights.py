"""Weights in Hugging Face's format, written by all ranks together, each some of the files.

    every rank:  (name, whole tensor) ... ──► shards of bounded size ──┬─ its own: a thread writes them ──► FileEntry
                                                                       └─ another rank's: let go
    one shard:   model.safetensors
    several:     model-00001-of-00003.safetensors ...   and, by rank 0, model.safetensors.index.json
    with a base: model.safetensors.delta beside each, where little has changed since

All ranks see the same names and sizes in the same order, so each knows the whole index, and nothing is said between
them. A rank holds two shards at most: the one that is written, and the one that grows meanwhile.

A delta is what a host has to read that holds the version before.

    the version before: files, manifest ──► WeightBase ──┐
    a new file, piece by piece, as it is written ────────┴──► DeltaEncoder ──► NAME.delta beside it, or none

The base is read back from the version's directory and not kept in memory: that would cost a rank as many bytes as it
writes, and what it wrote a step ago is in the page cache unless somebody else needs the memory.
"""

import copy
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from corral.experiments.trial.directory import fsync_directory
from corral.workers.backends.files.tensors import INDEX, ONLY_FILE, write_tensors
from corral.workers.backends.heads import Head
from corral.workers.backends.host_copies import HostCopying, host_copies
from corral.workers.checkpoint.durable_file import FileEntry, no_progress, write_durable
from corral.workers.checkpoint.file_delta import DELTA_SUFFIX, DeltaEncoder
from corral.workers.checkpoint.low_rank import ADAPTER_PREFIX, ADAPTER_TENSORS
from corral.workers.checkpoint.manifest import ADAPTER_FOLDER, CorruptCheckpointError, read_manifest

logger = logging.getLogger(__name__)

MAX_DELTA_FRACTION: Final = 0.25  # of the file; a larger delta saves a host little, and takes the rank more time
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
        self, name: str, tensors: Mapping[str, Tensor], path: Path, *, on_progress: Callable[[], None]
    ) -> dict[str, FileEntry]:
        """Write a new file, and what leads to it from the base's file `name`.

        Returns:
            As `_write_part`; without a delta if that would not pay, which `given_up` then explains.
        """
        # The smallest divides the pieces of all; a file of weights has one type only.
        itemsize = min(_MAX_ITEM_SIZE, *(tensor.element_size() for tensor in tensors.values()))
        try:
            base = open(self.directory / name, "rb", buffering=0)
        except OSError as error:
            self.given_up[name] = f"the version before cannot be read: {error}"
            return {"": write_tensors(path, tensors, on_progress=on_progress)}
        with base:
            encoder = DeltaEncoder(base, itemsize=itemsize, max_bytes=int(self.files[name].size * MAX_DELTA_FRACTION))
            entry = write_tensors(path, tensors, on_piece=encoder.add, on_progress=on_progress)
        content = encoder.content(base=self.files[name], result=entry)
        if not content:
            self.given_up[name] = encoder.given_up
            return {"": entry}
        return {"": entry, DELTA_SUFFIX: write_durable(Path(f"{path}{DELTA_SUFFIX}"), content)}


MAX_SHARD_BYTES: Final = 2**30  # small enough that every rank of a large model's mesh has files to write
_NUMBERED: Final = re.compile(r".*?\.\d+(?=\.)")


def as_stored(model: Any, weights: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """A transformers model's parameters by the names and in the pieces that files have, which some are loaded from.

    Mixture-of-experts models, for one, are computed with all experts of a layer in one tensor, and stored one by one.

    Args:
        weights: its whole parameters, layer by layer; one layer at a time is held.
        dtype: they are converted to.
    """
    for _, parameters in groupby(weights, key=lambda weight: _layer_of(weight[0])):
        layer = {name: tensor.to(dtype) for name, tensor in parameters}
        yield from revert_weight_conversion(model, layer).items()


def _layer_of(name: str) -> str:
    """ "model.layers.3" of all that is in that layer; of what is in none, its own name."""
    numbered = _NUMBERED.match(name)
    return numbered[0] if numbered else name


def copy_own(
    weights: Iterable[tuple[str, Tensor]], *, rank: int, num_ranks: int, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[tuple[str, Tensor]]:
    """The same weights for `write_weights`, to be written later: those of this rank's files in host memory.

    Of what other ranks write there are names, types and shapes only.

    Args:
        weights, rank, num_ranks, max_shard_bytes: as for `write_weights`.
    """
    shards, copying = _Shards(max_shard_bytes), HostCopying()
    kept: list[tuple[str, Tensor]] = []
    for name, tensor in weights:
        is_own = shards.add(name, tensor.numel() * tensor.element_size()) % num_ranks == rank
        kept.append((name, copying.copy(tensor) if is_own else torch.empty_like(tensor, device="meta")))
    copying.wait()
    return kept


def write_weights(
    directory: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    rank: int,
    num_ranks: int,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    base: WeightBase | None = None,
    on_progress: Callable[[], None] = no_progress,
) -> dict[str, FileEntry]:
    """Writes this rank's files of a model, and says which they are.

    Args:
        weights: the same on every rank; read to its end whatever happens to the files, since it may be a collective.
        rank: among those that write, of which there are `num_ranks`.
        max_shard_bytes: of the tensors of one file; a larger tensor has a file of its own.
        base: the version before, which deltas lead from; None writes none.

    Raises:
        OSError: the first file that could not be written, once `weights` has ended.
    """
    shards = _Shards(max_shard_bytes)
    parts: dict[int, Future[dict[str, FileEntry]]] = {}
    growing: dict[str, Tensor] = {}
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights") as writer:

        def write(shard: int) -> None:
            wait(parts.values())
            if growing:
                part = _hidden(directory, shard)
                parts[shard] = writer.submit(_write_part, part, dict(growing), shard, base, on_progress)
                growing.clear()

        for name, tensor in weights:
            before = shards.last
            shard = shards.add(name, tensor.numel() * tensor.element_size())
            if shard != before:
                write(before)
            if shard % num_ranks == rank:
                growing[name] = tensor.detach().cpu()
            del tensor
        write(shards.last)
    files: dict[str, FileEntry] = {}
    for shard, part in parts.items():
        for suffix, entry in part.result().items():
            name = f"{shards.file_name(shard)}{suffix}"
            os.rename(f"{_hidden(directory, shard)}{suffix}", directory / name)
            files[name] = entry
    if rank == 0 and shards.last > 0:
        files[INDEX] = write_durable(directory / INDEX, [shards.index()])
    return files


@dataclass
class _Shards:
    """Which tensor is in which file: they fill up one after the other."""

    max_bytes: int
    last: int = 0
    total_bytes: int = 0
    _bytes_in_last: int = 0
    _shard_by_name: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, size: int) -> int:
        """Add the next tensor; its shard."""
        if self._bytes_in_last and self._bytes_in_last + size > self.max_bytes:
            self.last, self._bytes_in_last = self.last + 1, 0
        self._bytes_in_last += size
        self.total_bytes += size
        self._shard_by_name[name] = self.last
        return self.last

    def file_name(self, shard: int) -> str:
        """Only known when all tensors have their place: it tells how many files there are."""
        return ONLY_FILE if self.last == 0 else f"{_name_begins(shard)}{self.last + 1:05d}.safetensors"

    def index(self) -> bytes:
        """Where a reader finds each tensor, as transformers and SGLang read it."""
        weight_map = {name: self.file_name(shard) for name, shard in self._shard_by_name.items()}
        return json.dumps({"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}, indent=2).encode()


def _hidden(directory: Path, shard: int) -> Path:
    """A file that is no part of the content until it has its name."""
    return directory / f".model-{shard + 1:05d}.part"


def _name_begins(shard: int) -> str:
    return f"model-{shard + 1:05d}-of-"


def _file_of_shard(files: Iterable[str], shard: int) -> str | None:
    """The file of another version with the same tensors as this one's shard, if both are cut into as many."""
    begins = (_name_begins(shard), ONLY_FILE) if shard == 0 else _name_begins(shard)
    return next((name for name in files if name.startswith(begins) and name.endswith(".safetensors")), None)


def _write_part(
    path: Path, tensors: Mapping[str, Tensor], shard: int, base: WeightBase | None, on_progress: Callable[[], None]
) -> dict[str, FileEntry]:
    """Write a file, and its delta if it has one; both get their names later.

    Returns:
        What was written, by what follows the path: "" for the file.
    """
    name = None if base is None else _file_of_shard(base.files, shard)
    if base is None or name is None:
        return {"": write_tensors(path, tensors, on_progress=on_progress)}
    return base.write_with_delta(name, tensors, path, on_progress=on_progress)


# A version of the weights as one rank writes it: its files of the model, and what lies beside them.
#
# engine ──► WeightShard ──write──► files          the model is read as it is written, by all ranks together
#                 └─copied──► WeightShard ──write──► the same files, later and without the others
#
# Beside the weights lie small files: configuration, tokenizer, chat template.
#
#     config of the model in memory ──► config.json, generation_config.json ──┐
#     directory that it was loaded from ──► tokenizer and others ─────────────┴──► {name: content}, kept in memory
#
# They are read once, when the model is loaded: that directory may be a commit, which is removed as newer ones come.


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShard:
    """One rank's part of a version of the weights. All ranks call either `write` or `copied`, once and together."""

    weights: Iterable[tuple[str, Tensor]]
    """Of the whole model, by the names and in the types that files have; read once and to its end."""
    rank: int
    num_ranks: int
    companions: Mapping[str, bytes]
    """Small files by name: configuration, tokenizer, that of an adapter; none on other ranks than the first."""
    adapter: Mapping[str, Tensor] | None
    """All that is trained, whole, by the model's names; None on other ranks than the first, and without adapters."""

    def copied(self) -> "WeightShard":
        """A copy of this rank's part in host memory. Collective. Writing the copy is not."""
        adapter = self.adapter and host_copies(self.adapter)
        return replace(self, weights=copy_own(self.weights, rank=self.rank, num_ranks=self.num_ranks), adapter=adapter)

    def write(
        self, directory: Path, *, base: WeightBase | None = None, on_progress: Callable[[], None] = no_progress
    ) -> dict[str, FileEntry]:
        """Write safetensors and what lies beside them; all ranks' files together are the model.

        Args:
            base: the version before, which deltas lead from; None writes none.

        Returns:
            The files that this rank wrote, by name; they are on disk.
        """
        directory.mkdir(parents=True, exist_ok=True)
        files = write_weights(
            directory, self.weights, rank=self.rank, num_ranks=self.num_ranks, base=base, on_progress=on_progress
        )
        if self.adapter is not None:
            (directory / ADAPTER_FOLDER).mkdir(mode=0o700)
            name = f"{ADAPTER_FOLDER}/{ADAPTER_TENSORS}"
            named = {f"{ADAPTER_PREFIX}{own}": tensor for own, tensor in self.adapter.items()}
            files[name] = write_tensors(directory / name, named, on_progress=on_progress)
        for name, content in self.companions.items():
            files[name] = write_durable(directory / name, [content])
        for folder in {directory} | {(directory / name).parent for name in files}:
            fsync_directory(folder)
        return files


_PATTERNS: Final = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)


def companion_files(directory: Path, config: Any, head: Head, *, dtype: torch.dtype) -> dict[str, bytes]:
    """What is saved beside weights in `dtype`, so that they load as what `head` says; as transformers writes it.

    Args:
        config: of the model that was loaded from `directory`.
    """
    with torch.device("meta"):  # the class is wanted, not a model
        model = head.saved_class.from_config(copy.deepcopy(config), dtype=dtype)
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    written = {"config.json": model.config.to_json_string().encode()}
    if model.can_generate():
        written["generation_config.json"] = model.generation_config.to_json_string().encode()
    found = [path for pattern in _PATTERNS for path in directory.glob(pattern) if path.is_file()]
    return written | {path.name: path.read_bytes() for path in found}
