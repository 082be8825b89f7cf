"""Numbers of the host -> a tensor on the engine's device, which the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[Any], device: torch.device, *, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.tensor(values, device=device)`, which on a GPU would wait for all that was asked of it before.

    The copy is ordered with the work that follows on the device, and the pinned memory is kept until it is done.
    """
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
