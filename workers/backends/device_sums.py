"""Sums over micro-batches that stay on the device until the host needs them.

    micro-batch 1: {name: scalar} ─┐
    micro-batch 2: {name: scalar} ─┴─► + ─► float64 scalars on the device ── on_host ──► {name: float}

A number that is read for each micro-batch keeps the host waiting until the device has computed it, and then the device
until the host has enqueued more; read once after all of them, it costs one wait for a step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class DeviceSums:
    """Scalars added up by name, in float64 and in the order in which they come."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Scalars of any type, all of one device; waits for nothing."""
        for name, value in values.items():
            wide = value.detach().to(torch.float64)
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide

    def on_host(self) -> dict[str, float]:
        """All sums, after one wait for the device."""
        if not self._sums:
            return {}
        return dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True))
