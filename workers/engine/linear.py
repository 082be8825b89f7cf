"""Matrix products of the embedded engine: the weights themselves, and on a CPU a second copy packed for small batches.

A decode step multiplies a few rows by every weight, and reads all of them once per token. oneDNN's packed layout
makes that a fifth faster from four rows on; below, and for small matrices, its call costs more than it saves. The
copy doubles the memory of the large weights, and is stale after they change until `pack` is called again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_FOR_ROWS = 16  # the layout for this many rows served 4 to 512 best, of 1, 16 and 64
_PACKED_FROM_ROWS = 4
_PACKED_FROM_ELEMENTS = 2**17  # 512 KiB in float32; a smaller matrix stays in the cache, and the call dominates


def _is_packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.numel() < _PACKED_FROM_ELEMENTS:
        return False
    mkldnn: Any = torch.backends.mkldnn  # untyped
    if not mkldnn.is_available():
        return False
    is_bfloat16_usable = weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 or is_bfloat16_usable


@dataclass(slots=True, eq=False)
class Linear:
    """inputs [T, in] -> [T, out], over tensors that somebody else owns and may overwrite in place."""

    weight: Tensor
    bias: Tensor | None
    _packed: Tensor | None = field(default=None, init=False)

    def pack(self) -> None:
        """Make or renew the packed copy, where one helps."""
        if _is_packable(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_FOR_ROWS)

    def __call__(self, inputs: Tensor) -> Tensor:
        if self._packed is None or inputs.shape[0] < _PACKED_FROM_ROWS:
            return F.linear(inputs, self.weight, self.bias)
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], ""))
