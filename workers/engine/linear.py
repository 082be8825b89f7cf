"""Matrix products of the embedded engine: the weights themselves, and on a CPU a second copy packed for small batches.

    weight [out, in] ──pack──► packed copy        inputs [T, in] ──► inputs @ weight.T + bias [T, out]

A decode step multiplies a few rows by every weight, and reads all of them once per token. oneDNN's packed layout
makes that a fifth faster from four rows on; below, and for small matrices, its call costs more than it saves. The
copy doubles the memory of the large weights, and is stale after they change until `pack` is called again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_FOR_ROWS = 16  # the layout for this many rows served 4 to 512 best, of 1, 16 and 64
_PACKED_FROM_ROWS = 4
_PACKED_FROM_ELEMENTS = 2**17  # 512 KiB in float32; a smaller matrix stays in the cache, and the call dominates


class MatrixProduct(Protocol):
    """A product with a weight that somebody else owns and may overwrite in place."""

    def pack(self) -> None:
        """Make or renew what is computed from the weight; until then the product is that of the weight before."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """inputs [T, in] -> [T, out]."""


def packed_copy(weight: Tensor) -> Tensor | None:
    """oneDNN's layout of weight [out, in]; None where it would not help."""
    if not _is_packable(weight):
        return None
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS))


def packed_product(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """inputs [T, in] -> [T, out] by a packed copy."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], ""))


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
        self._packed = packed_copy(self.weight)

    def __call__(self, inputs: Tensor) -> Tensor:
        if self._packed is None or inputs.shape[0] < _PACKED_FROM_ROWS:
            return F.linear(inputs, self.weight, self.bias)
        return packed_product(inputs, self._packed, self.bias)
