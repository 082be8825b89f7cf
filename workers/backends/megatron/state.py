"""What training resumes from: master weights and moments, each rank its share, in files that any layout can read.

    train_state.json                        as the fsdp backend writes it
    train_state-00000-of-00004.safetensors  param.<name>, exp_avg.<name>, exp_avg_sq.<name>: rank 0's share

Megatron's distributed optimizer cuts what a tensor-parallel rank has of a parameter, flattened, over the data-parallel
ranks. A file's metadata say of each piece whose part it is of and where it begins, so that a reader of another layout
puts whole parameters together, one at a time, and takes its own share. Names are those of the whole model, where each
expert's matrix is a parameter.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from corral.workers.backends.megatron.bridge import Bridge, is_cut
from corral.workers.backends.megatron.optimizer import StageOptimizer
from corral.workers.backends.train_state import StateShard, TrainStateHeader, shard_name
from corral.workers.checkpoint.durable_file import no_progress

_PIECES: Final = "pieces"
_STEP: Final = "step"


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a flat tensor of a file belongs."""

    tensor_rank: int
    tensor_ranks: int
    """Parts that its parameter was cut into; 1 if every tensor-parallel rank had it whole."""
    shape: tuple[int, ...]
    """Of the part that it is a share of."""
    start: int
    """Its first value within that part, flattened."""


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank's optimizer keeps of one parameter."""

    start: int
    tensors: Mapping[str, Tensor]
    """Flat: `param`, `exp_avg`, `exp_avg_sq`."""


def shares(parameters: Mapping[str, nn.Parameter], optimizer: StageOptimizer) -> Iterator[tuple[str, Share]]:
    """By name; a parameter that other data-parallel ranks keep has none. Moments that no step has made yet are zero."""
    for name, parameter in parameters.items():
        for part in optimizer.chained_optimizers:
            if parameter in part.model_param_gbuf_map:
                yield name, _share(parameter, part)


def _share(parameter: nn.Parameter, optimizer: Any) -> Share:
    index, kind, bucket = optimizer.model_param_gbuf_map[parameter]
    kept = optimizer.gbuf_ranges[index][kind][bucket]["param_map"][parameter]
    group, place = optimizer.model_param_group_index_map[parameter]
    main = optimizer.optimizer.param_groups[group]["params"][place]
    moments = optimizer.optimizer.state[main]
    for moment in ("exp_avg", "exp_avg_sq"):
        moments.setdefault(moment, torch.zeros_like(main.detach()))
    moments.setdefault(_STEP, torch.zeros((), dtype=torch.float32, device=main.device))
    return Share(kept["param"].start, {"param": main.detach(), **_without_step(moments)})


def _without_step(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in moments.items() if name != _STEP}


def state_shard(
    parameters: Mapping[str, nn.Parameter],
    optimizer: StageOptimizer,
    bridge: Bridge,
    header: TrainStateHeader,
    *,
    rank: int,
) -> StateShard:
    """This rank's shares of every parameter and its moments."""
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, dict[str, Any]] = {}
    for name, share in shares(parameters, optimizer):
        parameter = parameters[name]
        piece = Piece(
            tensor_rank=bridge.tensor_rank if is_cut(parameter) else 0,
            tensor_ranks=bridge.tensor_ranks if is_cut(parameter) else 1,
            shape=tuple(parameter.shape),
            start=share.start,
        )
        for kind, tensor in share.tensors.items():
            tensors[f"{kind}.{name}"] = tensor
            pieces[f"{kind}.{name}"] = asdict(piece)
    return StateShard(
        file=shard_name(rank, header.num_ranks),
        tensors=tensors,
        metadata={_PIECES: json.dumps(pieces)},
        header=header if rank == 0 else None,
    )


@torch.no_grad()
def read_shares(
    directory: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: StageOptimizer,
    bridge: Bridge,
    *,
    num_files: int,
    step: int,
    on_progress: Callable[[], None] = no_progress,
) -> None:
    """Fill this rank's share of every parameter and moment, whatever layout has written them.

    Args:
        step: optimizer steps made so far, which AdamW corrects its moments by.

    Raises:
        ValueError: if the files are of another model, or some are missing.
    """
    with ExitStack() as stack:
        stored = _Stored(directory, num_files, stack)
        if unknown := sorted(parameters.keys() - stored.names()):
            raise ValueError(
                f"training state in {directory} is of another model, or of the fsdp backend: it lacks {len(unknown)} "
                f"parameters, such as {unknown[0]!r}"
            )
        for name, share in shares(parameters, optimizer):
            for kind, tensor in share.tensors.items():
                part = stored.part(kind, name, parameters[name], bridge).flatten()
                tensor.copy_(part[share.start : share.start + tensor.numel()])
            on_progress()
    for moments in optimizer.moments():
        moments[_STEP].fill_(step)


class _Stored:
    """The files of all ranks, and where in them what is."""

    def __init__(self, directory: Path, num_files: int, stack: ExitStack) -> None:
        self._directory = directory
        self._found: dict[str, list[tuple[Any, Piece]]] = {}
        for rank in range(num_files):
            file: Any = stack.enter_context(safe_open(directory / shard_name(rank, num_files), framework="pt"))
            for tensor, piece in json.loads(file.metadata()[_PIECES]).items():
                self._found.setdefault(tensor, []).append((file, Piece(**piece | {"shape": tuple(piece["shape"])})))

    def names(self) -> set[str]:
        """Parameters of the whole model."""
        return {tensor.partition(".")[2] for tensor in self._found}

    def part(self, kind: str, name: str, parameter: nn.Parameter, bridge: Bridge) -> Tensor:
        """What this tensor-parallel rank has of a parameter, or of a moment, under the present layout."""
        pieces = self._found[f"{kind}.{name}"]
        num_parts = pieces[0][1].tensor_ranks
        if num_parts == bridge.tensor_ranks or not is_cut(parameter):
            return self._assembled(kind, name, bridge.tensor_rank if num_parts > 1 else 0)
        whole = bridge.join(name, [self._assembled(kind, name, rank) for rank in range(num_parts)], parameter)
        return bridge.own_part(name, whole, parameter)

    def _assembled(self, kind: str, name: str, tensor_rank: int) -> Tensor:
        """One tensor-parallel rank's part, from the shares of its data-parallel ranks."""
        pieces = [(file, piece) for file, piece in self._found[f"{kind}.{name}"] if piece.tensor_rank == tensor_rank]
        flat: Tensor | None = None
        missing = torch.Size(pieces[0][1].shape).numel()
        for start, file in {piece.start: file for file, piece in pieces}.items():  # some ranks have written the same
            values = file.get_tensor(f"{kind}.{name}")
            flat = torch.empty(torch.Size(pieces[0][1].shape).numel(), dtype=values.dtype) if flat is None else flat
            flat[start : start + values.numel()] = values
            missing -= values.numel()
        if flat is None or missing:
            raise ValueError(f"{self._directory} lacks {missing} of the values of {kind}.{name}: shards are missing")
        return flat.view(pieces[0][1].shape)
