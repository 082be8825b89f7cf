"""Memory of tensors given back to their device, with the content kept in host memory.

    parameters, moments ── offload ──► Offloaded: bytes of every storage, in host memory; the storages have no memory
                        ◄─ bring_back ─┘

The tensors themselves stay where they are referred to, by the module, by the optimizer and within FSDP2, which would
all have to be told otherwise; only the memory below them goes and comes. Between the two nothing may read them.

On a CPU the memory that is given back is as large as that which is taken for the copy: nothing is gained there, and
the same code runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from corral.workers.backends.sharding import local


@dataclass(frozen=True, slots=True)
class Offloaded:
    """What `bring_back` needs, once."""

    _copies: tuple[tuple[torch.UntypedStorage, Tensor], ...]

    def bring_back(self) -> None:
        """Take the memory again, with the content that it had."""
        for storage, copy in self._copies:
            storage.resize_(copy.numel())
            bytes_of(storage).copy_(copy)


def offload(tensors: Iterable[Tensor]) -> Offloaded:
    """Copy the memory below these tensors, as far as it is this rank's, and give it back storage by storage.

    The memory must be the tensors' own: see `own_parameters` and `own_state`.
    """
    copies: list[tuple[torch.UntypedStorage, Tensor]] = []
    for storage in _storages(tensors):
        copies.append((storage, bytes_of(storage).to("cpu", copy=True)))
        storage.resize_(0)
    if any(storage.device.type == "cuda" for storage, _ in copies):
        torch.cuda.empty_cache()  # torch would keep it for itself, and others share the device
    return Offloaded(tuple(copies))


def own_parameters(model: nn.Module) -> list[Tensor]:
    """All parameters, after copying those whose memory cannot be given back; for the rows of a model that is cut.

    On a CPU a file that is mapped, or numpy, may hold it together with the parameter. The model is told of a copy as if
    it moved to another device, so that FSDP2 hears of it.
    """
    if not all(_is_own(parameter) for parameter in model.parameters()):
        model._apply(owned)  # type: ignore[no-untyped-call]
    return list(model.parameters())


def own_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors of the optimizer's state, after copying those whose memory cannot be given back."""
    states: Iterable[dict[str, Any]] = optimizer.state.values()
    for state in states:
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = owned(value)
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def owned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its memory cannot be given back."""
    return tensor if _is_own(tensor) else tensor.clone()


def _is_own(tensor: Tensor) -> bool:
    return local(tensor).untyped_storage().resizable()


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once, without those that have no memory."""
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The storage as [nbytes] uint8, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
