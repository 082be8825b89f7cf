"""Copies in host memory, made at once and at the speed of the bus: of what later steps change, and of what gives way.

    tensors of a GPU ──► one after the other into pinned blocks, all under way before the one wait for the device
    tensors of a CPU ──► memory of their own

    parameters, moments ──► Offloaded: a copy of every storage; the storages have no memory ──bring_back──► as before

torch rounds each piece of pinned memory up to a power of two, which is up to twice what tensors take one by one. The
blocks are such powers, so nothing is added but what is left of the last ones. They go back to torch's own store when
the last copy in them is let go, and the next copies are laid into the same blocks.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from corral.workers.backends.sharding import local

_FIRST_BLOCK: Final = 2**20
_LARGEST_BLOCK: Final = 2**28  # of one that has several tensors; little beside a shard of a model
_ALIGNMENT: Final = 64  # bytes between beginnings: whole lines of a processor's cache, and any type of number


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies by the same names; they are complete when this returns."""
    copying = HostCopying()
    copies = {name: copying.copy(tensor) for name, tensor in tensors.items()}
    copying.wait()
    return copies


class HostCopying:
    """Copies under way, of tensors that come one after the other."""

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()
        self._blocks = Blocks(is_pinned=True)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy, complete after `wait`; what the tensor's device does next may change the tensor."""
        tensor = tensor.detach()
        if not tensor.is_cuda:
            return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        self._devices.add(tensor.device)
        memory = self._blocks.take(tensor.numel() * tensor.element_size())
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """For all copies so far."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()


class Blocks:
    """Memory in blocks of 2**n bytes, given out piece by piece."""

    def __init__(self, *, is_pinned: bool, largest: int = _LARGEST_BLOCK) -> None:
        """
        Args:
            largest: bytes of a block, unless one piece is larger.
        """
        self._is_pinned, self._largest = is_pinned, largest
        self._free: list[Tensor] = []
        """What is left of each block."""
        self.total_bytes = 0
        """Of all blocks."""

    def take(self, size: int) -> Tensor:
        """[size] uint8, of a block that has room, or of a new one: as large as all before it, within bounds."""
        place = next((place for place, free in enumerate(self._free) if free.numel() >= size), len(self._free))
        if place == len(self._free):
            usual = min(max(_FIRST_BLOCK, _power_of_two(self.total_bytes)), self._largest)
            num_bytes = max(usual, _power_of_two(size))
            self._free.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned))
            self.total_bytes += num_bytes
        free = self._free[place]
        self._free[place] = free[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        if not self._free[place].numel():
            del self._free[place]
        return free[:size]


def _power_of_two(number: int) -> int:
    """The smallest one that is as large."""
    return 1 << max(0, number - 1).bit_length()


class Offloaded:
    """Memory of tensors given back to their device, with the content kept in host memory.

    The tensors themselves stay where they are referred to, by the module, by the optimizer and within FSDP2, which
    would all have to learn new addresses; only the memory below them goes and comes. Between the two nothing may read
    them. On a CPU nothing is gained, and the same code runs.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """
        Args:
            tensors: of `parameters_that_can_leave` and `state_that_can_leave`, whose memory is their own.
        """
        copying = HostCopying()
        self._tensors = list(tensors)  # none of them is another one by the time that it is asked for
        self._copies: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._copy_of: dict[int, Tensor] = {}
        for tensor in self._tensors:
            storage = local(tensor).untyped_storage()
            if storage.nbytes():
                if storage.data_ptr() not in self._copies:
                    self._copies[storage.data_ptr()] = storage, copying.copy(_bytes_of(storage))
                self._copy_of[id(tensor)] = self._copies[storage.data_ptr()][1]
        copying.wait()
        for storage, _ in self._copies.values():
            storage.resize_(0)
        if any(storage.device.type == "cuda" for storage, _ in self._copies.values()):
            torch.cuda.empty_cache()  # torch would keep it for itself, and others share the device

    def content_of(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor where its content lies, be it one of these or not."""
        own, copy = local(tensor), self._copy_of.get(id(tensor))
        if copy is None:
            return own
        memory = copy.view(own.dtype)
        return memory.as_strided(own.shape, own.stride(), memory.storage_offset() + own.storage_offset())

    def bring_back(self) -> None:
        """Take the memory again, with the content that it had; once."""
        for storage, copy in self._copies.values():
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        self._copy_of.clear()


def parameters_that_can_leave(model: nn.Module) -> list[Tensor]:
    """All parameters, after copying those whose memory cannot be given back; for the rows of a model that is cut.

    On a CPU a file that is mapped, or numpy, may hold it together with the parameter. The model takes a copy as if
    it moved to another device, so that FSDP2 notices.
    """
    if not all(_can_leave(parameter) for parameter in model.parameters()):
        model._apply(_that_can_leave)  # type: ignore[no-untyped-call]
    return list(model.parameters())


def state_that_can_leave(optimizer: Any) -> list[Tensor]:
    """All tensors of the state of an optimizer, or of several that are chained, after copying as above."""
    found: list[Tensor] = []
    for _, state in optimizer.state.items():
        state |= {name: _that_can_leave(value) for name, value in state.items() if isinstance(value, Tensor)}
        found += [value for value in state.values() if isinstance(value, Tensor)]
    return found


def _that_can_leave(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its memory cannot be given back."""
    return tensor if _can_leave(tensor) else tensor.clone()


def _can_leave(tensor: Tensor) -> bool:
    return local(tensor).untyped_storage().resizable()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The storage as [nbytes] uint8, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
