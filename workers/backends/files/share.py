"""A version of the weights as one rank writes it: its files of the model, and what lies beside them.

engine ──► WeightShare ──write──► files          the model is read as it is written, by all ranks together
                └─copied──► WeightShare ──write──► the same files, later and without the others

Beside the weights lie small files: configuration, tokenizer, chat template.

    config of the model in memory ──► config.json, generation_config.json ──┐
    directory that it was loaded from ──► tokenizer and others ─────────────┴──► {name: content}, kept in memory

They are read once, when the model is loaded: that directory may be a commit, which is removed as newer ones come.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from corral.experiments.trial.directory import fsync_directory
from corral.workers.backends.files.tensors import write_tensors
from corral.workers.backends.files.weights import WeightBase, copy_own, write_weights
from corral.workers.backends.heads import Head
from corral.workers.backends.host_copies import host_copies
from corral.workers.checkpoint.durable_file import FileEntry, no_progress, write_durable
from corral.workers.checkpoint.low_rank import ADAPTER_PREFIX, ADAPTER_TENSORS
from corral.workers.checkpoint.manifest import ADAPTER_FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShare:
    """What one rank writes of a version; `write` or `copied` is called once, by all ranks at the same place."""

    weights: Iterable[tuple[str, Tensor]]
    """Of the whole model, by the names and in the types that files have; read once and to its end."""
    rank: int
    num_ranks: int
    companions: Mapping[str, bytes]
    """Small files by name: configuration, tokenizer, that of an adapter; none on other ranks than the first."""
    adapter: Mapping[str, Tensor] | None
    """All that is trained, whole, by the model's names; None on other ranks than the first, and without adapters."""

    def copied(self) -> "WeightShare":
        """The same in host memory, as far as this rank writes it; a collective, and its `write` is none any more."""
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
