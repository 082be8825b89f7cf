"""What training resumes from: trained parameters, what the optimizer keeps of each, and a role's own numbers.

    train_state.json                        step, seed, number of files, numbers that belong to no parameter
    train_state-00000-of-00002.safetensors  parameter.<name>, exp_avg.<name>, exp_avg_sq.<name>, step.<name>: rank 0
    train_state-00001-of-00002.safetensors                         ... rank 1

A file holds one rank's pieces: each tensor's metadata say which box of the whole tensor it is. A reader takes the boxes
that it lacks from whatever files have them, so another number of ranks, cut otherwise, can go on. Which tensors there
are is the optimizer's business: AdamW keeps two moments and a step, others keep others.

    engine ──► StateShard ──copied──► StateShard ──write──► files        a later step changes the first, never the copy

There is no random state to keep: every step seeds itself from (seed, step).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from corral.experiments.trial.directory import fsync_directory
from corral.workers.backends.files.tensors import write_tensors
from corral.workers.backends.host_copies import host_copies
from corral.workers.backends.sharding import local
from corral.workers.checkpoint.durable_file import FileEntry, no_progress, write_durable

HEADER = "train_state.json"
_FORMAT = 2
_PARAMETER = "parameter"
_BOXES = "boxes"  # in a file's metadata

Numbers: TypeAlias = dict[str, float | list[float]]
"""What belongs to a role and to none of its parameters: a value normaliser's moments, a KL controller's coefficient."""


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
    format: int = _FORMAT


class Box(NamedTuple):
    """A part of a tensor."""

    start: tuple[int, ...]
    """Its first index, by dimension."""
    shape: tuple[int, ...]
    """Its own size."""
    whole: tuple[int, ...]
    """Size of the tensor that it is cut out of."""


def shard_name(rank: int, num_ranks: int) -> str:
    """File of one rank's pieces."""
    return f"train_state-{rank:05d}-of-{num_ranks:05d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShard:
    """One rank's share of what training resumes from, and how its file describes it."""

    file: str
    tensors: Mapping[str, Tensor]
    """As the file names them, each this rank's own part."""
    metadata: Mapping[str, str]
    """What the file says of where they belong."""
    header: TrainStateHeader | None
    """What is the same for all ranks; the first one has it and writes it."""

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
        path = directory / self.file
        files = {
            self.file: write_tensors(path, self.tensors, metadata=self.metadata, on_progress=on_progress),
        }
        if self.header is not None:
            content = json.dumps(asdict(self.header), indent=1).encode()
            files[HEADER] = write_durable(directory / HEADER, [content])
        fsync_directory(directory)
        return files


def state_shard(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    header: TrainStateHeader,
    *,
    rank: int,
) -> StateShard:
    """This rank's pieces of every parameter, and of everything that the optimizer, if any, keeps of it.

    Raises:
        ValueError: if the optimizer keeps something else than tensors.
    """
    pieces = dict(_pieces(parameters, optimizer))
    boxes = {name: _box_of(tensor) for name, tensor in pieces.items()}
    return StateShard(
        file=shard_name(rank, header.num_ranks),
        tensors={name: local(tensor) for name, tensor in pieces.items()},
        metadata={_BOXES: json.dumps(boxes)},
        header=header if rank == 0 else None,
    )


def _pieces(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, Tensor]]:
    states = {} if optimizer is None else optimizer.state
    for name, parameter in parameters.items():
        yield f"{_PARAMETER}.{name}", parameter
        for key, value in states.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise ValueError(f"the optimizer keeps {key}={value!r} of {name}; only tensors are saved: make it one")
            yield f"{key}.{name}", value


def read_header(directory: Path) -> TrainStateHeader:
    """Read the JSON file.

    Raises:
        ValueError: if it is of another format than this version of corral writes.
    """
    fields: dict[str, Any] = json.loads((directory / HEADER).read_text(encoding="utf-8"))
    if fields.get("format") != _FORMAT:
        raise ValueError(f"{directory / HEADER} has format {fields.get('format')}; this version reads {_FORMAT}")
    return TrainStateHeader(**fields)


@torch.no_grad()
def read_shards(
    directory: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    *,
    num_files: int,
    first_file: int = 0,
    on_progress: Callable[[], None] = no_progress,
) -> None:
    """Load parameters and optimizer state; each rank takes the pieces that it holds now, and reads no others.

    Args:
        num_files: that were written.
        first_file: where to look first. A rank that looks into its own file, of ranks as many as before, opens no
            other.
        on_progress: called after every parameter.

    Raises:
        ValueError: if the files' parameters are not exactly this model's.
    """
    names = [shard_name(file, num_files) for file in range(num_files)]
    with ExitStack() as stack:
        files = _Files([directory / name for name in names[first_file:] + names[:first_file]], stack)
        stored = files.names()
        _check_names(directory, {n.partition(".")[2] for n in stored if n.startswith(f"{_PARAMETER}.")}, parameters)
        keys: dict[str, list[str]] = {name: [] for name in parameters}
        for key, _, name in (stored_name.partition(".") for stored_name in sorted(stored)):
            if key != _PARAMETER:
                keys[name].append(key)
        for name, parameter in parameters.items():
            on_progress()
            local(parameter).copy_(local(files.read(f"{_PARAMETER}.{name}", like=parameter)))
            if optimizer is None:
                continue
            optimizer.state.pop(parameter, None)
            if keys[name]:
                optimizer.state[parameter] = {key: files.read(f"{key}.{name}", like=parameter) for key in keys[name]}


class _Files:
    """The files of all ranks, opened when something is sought in them."""

    def __init__(self, paths: Sequence[Path], stack: ExitStack) -> None:
        self._paths = paths
        self._stack = stack
        self._opened: list[tuple[Any, dict[str, Box]]] = []

    def names(self) -> set[str]:
        """Of the stored tensors; every file has a piece of each, be it empty."""
        return set(next(self._each())[1])

    def read(self, name: str, *, like: Tensor) -> Tensor:
        """A stored tensor, cut as `like` is, on its device; one without dimensions is the same for all.

        Raises:
            ValueError: if it is not of the same shape, or pieces of it are missing.
        """
        _, boxes = next(self._each())
        if boxes[name].whole == ():
            file, _ = next(self._each())
            scalar: Tensor = file.get_tensor(name)
            return scalar.to(like.device)
        if boxes[name].whole != tuple(like.shape):
            raise ValueError(f"stored {name} has shape {boxes[name].whole}, the model's has {tuple(like.shape)}")
        piece = self._read_box(name, _box_of(like)).to(like.device)
        if not isinstance(like, DTensor):
            return piece
        return DTensor.from_local(
            piece, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _read_box(self, name: str, wanted: Box) -> Tensor:
        piece: Tensor | None = None
        missing = torch.Size(wanted.shape).numel()
        seen: set[Box] = set()
        for file, boxes in self._each():
            if boxes[name] in seen:  # ranks that hold the same have all written it
                continue
            seen.add(boxes[name])
            source, target = _overlap(boxes[name], wanted)
            values = file.get_slice(name)[source]
            if piece is None:
                piece = torch.empty(wanted.shape, dtype=values.dtype)
            piece[target] = values
            missing -= values.numel()
            if not missing:
                return piece
        raise ValueError(f"{self._paths[0].parent} lacks {missing} of the values of {name}: shards are missing")

    def _each(self) -> Iterator[tuple[Any, dict[str, Box]]]:
        for index, path in enumerate(self._paths):
            if index == len(self._opened):
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                boxes = json.loads(file.metadata()[_BOXES])
                self._opened.append((file, {name: Box(*map(tuple, box)) for name, box in boxes.items()}))
            yield self._opened[index]


def _overlap(stored: Box, wanted: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """What two boxes of one tensor have in common, as indices into each."""
    source, target = [], []
    for stored_start, stored_size, start, size in zip(
        stored.start, stored.shape, wanted.start, wanted.shape, strict=True
    ):
        first = max(stored_start, start)
        last = max(first, min(stored_start + stored_size, start + size))
        source.append(slice(first - stored_start, last - stored_start))
        target.append(slice(first - start, last - start))
    return tuple(source), tuple(target)


def _box_of(tensor: Tensor) -> Box:
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box((0,) * len(shape), shape, shape)
    own, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(start), tuple(own), shape)


def _check_names(directory: Path, stored: set[str], parameters: Mapping[str, nn.Parameter]) -> None:
    missing, unknown = sorted(parameters.keys() - stored), sorted(stored - parameters.keys())
    if missing or unknown:
        raise ValueError(
            f"training state in {directory} is of another model: {len(missing)} parameters are missing there "
            f"{missing[:3]}, {len(unknown)} are unknown here {unknown[:3]}"
        )
