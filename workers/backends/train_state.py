"""The state that training resumes from: trained parameters, their optimizer state, and a role's own numbers.

    train_state.json                        step, seed, number of files, sizes of all tensors, numbers without a tensor
    train_state-00000-of-00002.safetensors  parameter.<name>[...], exp_avg.<name>[...], exp_avg_sq.<name>[...]: rank 0's
    train_state-00001-of-00002.safetensors                         ... rank 1's

Names and tensors are those of the whole model, as `MeshEngine.export_weights` gives them, in float32; what a rank's
file has of them are parts (files/parts.py). So a reader takes what it lacks from whatever files have it, whichever
backend, layout and number of ranks wrote them. Which tensors there are besides parameters is the optimizer's business:
AdamW keeps two moments and a step, Muon a momentum.

    engine ──► StateShard ──copied──► StateShard ──write──► files        a later step changes the first, never the copy
    engine ◄── StoredState.fill ── the parts that this rank holds now ◄── files      and those of no other rank

There is no random state to keep: every step seeds itself from (seed, step, data-parallel rank).
"""

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from corral.experiments.trial.directory import fsync_directory
from corral.workers.backends.base import Numbers
from corral.workers.backends.files.tensors import Part, fill_parts, stored_name, write_tensors
from corral.workers.backends.host_copies import host_copies
from corral.workers.backends.lora import is_adapter
from corral.workers.checkpoint.durable_file import FileEntry, no_progress, write_durable

HEADER = "train_state.json"
PARAMETER: Final = "parameter"
"""What is kept of a parameter besides what its optimizer does."""
ADAMW: Final = frozenset({"exp_avg", "exp_avg_sq", "step"})
"""What AdamW keeps of a parameter, by torch's names."""
_FORMAT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStateHeader:
    """The JSON file beside the tensors."""

    step: int
    seed: int
    num_ranks: int
    """Files, one of each rank that wrote."""
    extra: Numbers = field(default_factory=dict)
    sum_of_frozen: int = 0
    """Tells apart the weights beside which adapters were trained (`lora.sum_of_frozen`); 0 where none are frozen."""
    sizes: Mapping[str, list[int]] = field(default_factory=dict)
    """Of the whole tensors, by kind and parameter: `exp_avg.model.norm.weight`."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """What is kept as one number of a parameter: `step.model.norm.weight`."""
    format: int = _FORMAT

    def kinds(self) -> dict[str, set[str]]:
        """The kinds of values kept of each parameter besides itself."""
        kept: defaultdict[str, set[str]] = defaultdict(set)
        for full_name in (*self.sizes, *self.scalars):
            kind, _, name = full_name.partition(".")
            kept[name].add(kind)
        return {name: kinds - {PARAMETER} for name, kinds in kept.items()}


def shard_name(rank: int, num_ranks: int) -> str:
    """File of one rank's parts."""
    return f"train_state-{rank:05d}-of-{num_ranks:05d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShard:
    """One rank's shard of what training resumes from."""

    file: str
    tensors: Mapping[str, Tensor]
    """This rank's parts, as the file names them."""
    header: TrainStateHeader | None
    """The part that is the same for all ranks; rank 0 has it and writes it."""

    def copied(self) -> "StateShard":
        """The same in host memory of its own.

        Guarantee: what is written of it is what the rank held at this moment, however many steps follow before.
        """
        return replace(self, tensors=host_copies(self.tensors))

    def write(self, directory: Path, *, on_progress: Callable[[], None] = no_progress) -> dict[str, FileEntry]:
        """Write the file, and the header if this rank has it; no rank waits for another one.

        Returns:
            The files by name; they are on disk.
        """
        directory.mkdir(parents=True, exist_ok=True)
        files = {self.file: write_tensors(directory / self.file, self.tensors, on_progress=on_progress)}
        if self.header is not None:
            content = json.dumps(asdict(self.header)).encode()
            files[HEADER] = write_durable(directory / HEADER, [content])
        fsync_directory(directory)
        return files


def state_shard(parts: Iterable[Part], header: TrainStateHeader, *, rank: int) -> StateShard:
    """The state of one rank; parts without values need not be kept.

    Args:
        header: of which the first rank's must say what all ranks together keep.
    """
    return StateShard(
        file=shard_name(rank, header.num_ranks),
        tensors={stored_name(part.name, part.start): part.values for part in parts if part.values.numel()},
        header=header if rank == 0 else None,
    )


def read_header(directory: Path) -> TrainStateHeader:
    """Read the JSON file.

    Raises:
        ValueError: if it is of another format than this version of corral writes.
    """
    fields: dict[str, Any] = json.loads((directory / HEADER).read_text(encoding="utf-8"))
    if fields.get("format") != _FORMAT:
        raise ValueError(
            f"{directory / HEADER} has format {fields.get('format')}, and this version of corral reads {_FORMAT}: "
            "continue with the version that wrote it, or start a new trial from the weights beside it"
        )
    return TrainStateHeader(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """The state that all ranks of some layout wrote, as one rank reads it."""

    directory: Path
    header: TrainStateHeader
    first_file: int = 0
    """Where to look first. A rank that looks into its own file, of a layout as before, opens no other."""
    on_progress: Callable[[], None] = no_progress
    """Called after every part."""

    @torch.no_grad()
    def fill(self, parts: Iterable[Part]) -> None:
        """Read what this rank holds into the memory where it holds it; of other ranks' parts nothing is read.

        Raises:
            ValueError: if files lack some of the values.
        """
        names = [shard_name(file, self.header.num_ranks) for file in range(self.header.num_ranks)]
        paths = [self.directory / name for name in names[self.first_file :] + names[: self.first_file]]
        fill_parts(parts, paths, on_progress=self.on_progress)

    def check(self, sizes: Mapping[str, Iterable[int]], kept: Callable[[str], Collection[str]] | None) -> None:
        """Refuse a state that is not of this model, or not of its optimizer.

        Args:
            sizes: of the whole model's trained parameters, by name.
            kept: what the optimizer keeps of a parameter once it has made a step; None if there is no optimizer.

        Raises:
            ValueError: saying what is there, what is expected, and how to go on.
        """
        kinds = self.header.kinds()
        missing, unknown = sorted(sizes.keys() - kinds.keys()), sorted(kinds.keys() - sizes.keys())
        if missing or unknown:
            is_adapted = any(map(is_adapter, kinds))
            of = "adapters" if is_adapted and not any(map(is_adapter, sizes)) else "another model"
            raise ValueError(
                f"training state in {self.directory} is of {of}: {len(missing)} parameters are missing there "
                f"{missing[:3]}, {len(unknown)} are unknown here {unknown[:3]}; continue with the model and the lora "
                "settings of the trial"
            )
        for name, size in sizes.items():
            stored = self.header.sizes[f"{PARAMETER}.{name}"]
            if stored != list(size):
                raise ValueError(f"stored {name} has shape {tuple(stored)}, the model's has {tuple(size)}")
            if kept is not None and kinds[name] and kinds[name] != set(kept(name)):
                raise ValueError(
                    f"training state in {self.directory} keeps {', '.join(sorted(kinds[name]))} of {name}, and this "
                    f"optimizer keeps {', '.join(sorted(kept(name)))}: continue with the optimizer that it was written "
                    "with, on a backend that has it (Muon: fsdp)"
                )
