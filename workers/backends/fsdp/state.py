"""What a rank of the fsdp backend keeps of a training state: its rows, or its box, of every parameter and moment.

parameters, optimizer.state ──► parts ──► a file of the state          (train_state.py)
parameters, optimizer.state ◄── filled, after moments were made anew ◄── files of any layout and backend
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from corral.workers.backends.files.parts import Part
from corral.workers.backends.fsdp.optimizers import kinds_kept
from corral.workers.backends.sharding import local, start_of
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
    content_of: Callable[[Tensor], Tensor] = local,
) -> StateShard:
    """This rank's parts of every parameter, and of everything that the optimizer, if any, keeps of it.

    Args:
        content_of: gives this rank's part of a tensor, wherever it lies.
    """
    kept = dict(_kept(parameters, optimizer))
    if rank == 0:
        scalars = {name: content_of(tensor) for name, tensor in kept.items() if not tensor.ndim}
        numbers = torch.stack(list(scalars.values())).tolist() if scalars else []  # one wait for the device
        header = replace(
            header,
            sizes={name: list(tensor.shape) for name, tensor in kept.items() if tensor.ndim},
            scalars=dict(zip(scalars, numbers, strict=True)),
        )
    parts = (Part(name, start_of(tensor), content_of(tensor)) for name, tensor in kept.items() if tensor.ndim)
    return state_shard(parts, header, rank=rank)


def read_state(
    directory: Path,
    header: TrainStateHeader,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    *,
    first_file: int = 0,
    on_progress: Callable[[], None] = no_progress,
) -> None:
    """Load parameters and optimizer state, whoever wrote them; each rank reads what it holds now, and nothing else.

    Args:
        first_file: where to look first.
        on_progress: called after every tensor.

    Raises:
        ValueError: if the state is of another model or optimizer, or a part of it is missing.
    """
    sizes = {name: parameter.shape for name, parameter in parameters.items()}
    if optimizer is None:
        check_contents(directory, header, sizes, None)
    else:
        kept = kinds_kept(optimizer)
        check_contents(directory, header, sizes, lambda name: kept(parameters[name]))
        optimizer.state.clear()
        for name, kinds in header.kinds().items():
            if kinds:
                optimizer.state[parameters[name]] = {
                    kind: _empty(header.scalars.get(f"{kind}.{name}"), parameters[name]) for kind in kinds
                }
    parts = (
        Part(name, start_of(tensor), local(tensor)) for name, tensor in _kept(parameters, optimizer) if tensor.ndim
    )
    fill(directory, parts, num_files=header.num_ranks, first_file=first_file, on_progress=on_progress)


def _empty(number: float | None, parameter: nn.Parameter) -> Tensor:
    """What is kept of a parameter as one number, or memory of its size, which is to be filled."""
    if number is None:
        return torch.empty_like(parameter.detach())
    return torch.tensor(number, dtype=torch.float32, device=parameter.device)


def _kept(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, Tensor]]:
    """By kind and parameter; one parameter after the other."""
    states = {} if optimizer is None else optimizer.state
    for name, parameter in parameters.items():
        yield f"{PARAMETER}.{name}", parameter
        for kind, value in states.get(parameter, {}).items():
            yield f"{kind}.{name}", value
