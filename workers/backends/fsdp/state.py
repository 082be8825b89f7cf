"""What a rank of the fsdp backend keeps of a training state: its rows, or its box, of every parameter and moment.

parameters, optimizer.state ──► parts ──► a file of the state          (train_state.py)
parameters, optimizer.state ◄── filled, after moments were made anew ◄── files of any layout and backend
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from corral.workers.backends.files.parts import Part
from corral.workers.backends.fsdp.optimizers import kinds_kept
from corral.workers.backends.sharding import local, start_of
from corral.workers.backends.train_state import (
    PARAMETER,
    StateShard,
    StoredState,
    TrainStateHeader,
    state_shard,
)


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
    stored: StoredState, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> None:
    """Load parameters and optimizer state, whoever wrote them; each rank reads what it holds now, and nothing else.

    Raises:
        ValueError: if the state is of another model or optimizer, or a part of it is missing.
    """
    sizes = {name: parameter.shape for name, parameter in parameters.items()}
    if optimizer is None:
        stored.check(sizes, None)
    else:
        kept = kinds_kept(optimizer)
        stored.check(sizes, lambda name: kept(parameters[name]))
        optimizer.state.clear()
        for name, kinds in stored.header.kinds().items():
            if kinds:
                like = parameters[name].detach()
                numbers = {kind: stored.header.scalars.get(f"{kind}.{name}") for kind in kinds}
                optimizer.state[parameters[name]] = {
                    kind: torch.empty_like(like)  # to be filled
                    if number is None
                    else torch.tensor(number, dtype=torch.float32, device=like.device)
                    for kind, number in numbers.items()
                }
    stored.fill(
        Part(name, start_of(tensor), local(tensor)) for name, tensor in _kept(parameters, optimizer) if tensor.ndim
    )


def _kept(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, Tensor]]:
    """By kind and parameter; one parameter after the other."""
    states = {} if optimizer is None else optimizer.state
    for name, parameter in parameters.items():
        yield f"{PARAMETER}.{name}", parameter
        for kind, value in states.get(parameter, {}).items():
            yield f"{kind}.{name}", value
