"""Copies in host memory of what later steps change, made at once and at the speed of the bus.

    tensors of a GPU ──► pinned memory, all of them under way before the one wait for the device
    tensors of a CPU ──► memory of their own

Pinned memory goes back to torch's own store, which the next copies of the same sizes are taken from.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies by the same names; they are complete when this returns."""
    copies: dict[str, Tensor] = {}
    devices: set[torch.device] = set()
    for name, tensor in tensors.items():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            devices.add(tensor.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies
