"""What a rank of the fsdp backend keeps of a training state: its rows, or its box, of every parameter and moment.

parameters, optimizer.state ──► parts.parts_of ──► a file of the state          (train_state.py)
parameters, optimizer.state ◄── filled, after moments were made anew ◄── files of any layout and backend
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from corral.workers.backends.files.parts import Part
from corral.workers.backends.fsdp.optimizers import kinds_kept
from corral.workers.backends.hosted_state import HostedState
from corral.workers.backends.sharding import local
from corral.workers.backends.train_state import (
    PARAMETER,
    StateShard,
    TrainStateHeader,
    check_contents,
    fill,
    state_shard,
)
from corral.workers.checkpoint.durable_file import no_progress


def make_shard(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    header: TrainStateHeader,
    *,
    rank: int,
    hosted: HostedState | None = None,
) -> StateShard:
    """This rank's parts of every parameter, and of everything that the optimizer, if any, keeps of it.

    Args:
        hosted: where that lies, if not on the device.

    Raises:
        ValueError: if the optimizer keeps something else than tensors.
    """
    kept = dict(_kept(parameters, optimizer))
    scalars = {name: tensor for name, tensor in kept.items() if not tensor.ndim}
    whole = {name: tensor for name, tensor in kept.items() if tensor.ndim}
    if rank == 0:
        header = replace(
            header,
            sizes={name: list(tensor.shape) for name, tensor in whole.items()},
            scalars=dict(zip(scalars, _numbers(list(scalars.values())), strict=True)),
        )
    return state_shard((_part(name, tensor, hosted) for name, tensor in whole.items()), header, rank=rank)


def read_state(
    directory: Path,
    header: TrainStateHeader,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    *,
    first_file: int = 0,
    on_progress: Callable[[], None] = no_progress,
    hosted: HostedState | None = None,
) -> None:
    """Load parameters and optimizer state, whoever wrote them; each rank reads what it holds now, and nothing else.

    Args:
        first_file: where to look first.
        on_progress: called after every tensor.
        hosted: where optimizer state is to lie, if not on the device, which never has more than one parameter's.

    Raises:
        ValueError: if the state is of another model or optimizer, or a part of it is missing.
    """
    sizes = {name: parameter.shape for name, parameter in parameters.items()}
    if optimizer is None:
        check_contents(directory, header, sizes, None)
    else:
        kept = kinds_kept(optimizer)
        check_contents(directory, header, sizes, lambda name: kept(parameters[name]))
        _make_place(header, parameters, optimizer, hosted)
    parts = (_part(name, tensor, hosted) for name, tensor in _kept(parameters, optimizer) if tensor.ndim)
    fill(directory, parts, num_files=header.num_ranks, first_file=first_file, on_progress=on_progress)


def _make_place(
    header: TrainStateHeader,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    hosted: HostedState | None,
) -> None:
    """Give each parameter the state that is stored of it, to be filled; what was there before is gone."""
    for name, kinds in header.kinds().items():
        parameter = parameters[name]
        optimizer.state.pop(parameter, None)
        if kinds:
            optimizer.state[parameter] = {kind: _empty(header, f"{kind}.{name}", parameter) for kind in kinds}
            if hosted is not None:
                hosted.put_away(parameter)


def _empty(header: TrainStateHeader, full_name: str, parameter: nn.Parameter) -> Tensor:
    number = header.scalars.get(full_name)
    if number is not None:
        return torch.tensor(number, dtype=torch.float32, device=parameter.device)
    return torch.empty_like(parameter.detach())


def _kept(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, Tensor]]:
    """By kind and parameter; one parameter after the other."""
    states = {} if optimizer is None else optimizer.state
    for name, parameter in parameters.items():
        yield f"{PARAMETER}.{name}", parameter
        for kind, value in states.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise ValueError(f"the optimizer keeps {kind}={value!r} of {name}; only tensors are saved: make it one")
            yield f"{kind}.{name}", value


def _part(name: str, tensor: Tensor, hosted: HostedState | None) -> Part:
    start = (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Part(name, tuple(start), local(tensor) if hosted is None else hosted.memory_of(tensor))


def _numbers(scalars: list[Tensor]) -> list[float]:
    """After one wait for the device, not one for each."""
    numbers: list[float] = torch.stack(scalars).tolist() if scalars else []
    return numbers
