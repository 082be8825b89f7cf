"""Copies in host memory of what later steps change, made at once and at the speed of the bus.

    tensors of a GPU ──► one after the other into pinned blocks, all under way before the one wait for the device
    tensors of a CPU ──► memory of their own

torch rounds each piece of pinned memory up to a power of two, which is up to twice what tensors take one by one. The
blocks are such powers, so nothing is added but what is left of the last ones. They go back to torch's own store when
the last copy in them is let go, and the next copies are laid into the same blocks.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

_FIRST_BLOCK: Final = 2**20
_LARGEST_BLOCK: Final = 2**28  # of one that has several tensors; little beside the share of a model
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
