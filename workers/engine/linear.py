"""Matrix products of the embedded engine: the weights themselves, and on a CPU copies laid out for small batches.

    weight [out, in] --pack--> copy        inputs [T, in] --> inputs @ weight.T + bias [T, out]
                                |
               small, float32:  transposed, [in, out]
               otherwise:       blocks of oneDNN

A decode step multiplies a few rows by every weight, and reads all of them once per token. MKL multiplies 4 to 64 rows
by a small matrix a quarter to a third faster where it is transposed (measured on a Xeon with AVX-512, as all figures
here); a large one is bound by reading, and oneDNN's blocks are read a fifth faster. The copy doubles the memory of the
weights, and is stale after they change until `pack` is called again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_TRANSPOSED_TO_ELEMENTS = 2**18  # 1 MiB in float32, half of a core's cache; past it columns are read too slowly
_TRANSPOSED_FROM_ROWS = 2  # a single row is a product with a vector, equally fast in both layouts
_BLOCKED_FOR_ROWS = 16  # the layout for this many rows served 4 to 512 best, of 1, 16 and 64
_BLOCKED_FROM_ROWS = 4  # below, and for small matrices, oneDNN's call costs more than it saves
_BLOCKED_FROM_ELEMENTS = 2**17


class MatrixProduct(Protocol):
    """A product with a weight that somebody else owns and may overwrite in place."""

    def pack(self) -> None:
        """Make or renew what is computed from the weight; until then the product is that of the weight before."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """inputs [T, in] -> [T, out]."""


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """A weight in the layout that is read fastest in products with a few rows."""

    tensor: Tensor
    is_transposed: bool

    @classmethod
    def of(cls, weight: Tensor) -> WeightCopy | None:
        """Of a weight [out, in]; None where no copy would help."""
        if weight.device.type != "cpu":
            return None
        if weight.dtype == torch.float32 and weight.numel() <= _TRANSPOSED_TO_ELEMENTS:
            return cls(weight.t().contiguous(), is_transposed=True)
        if weight.numel() < _BLOCKED_FROM_ELEMENTS or not _has_blocks(weight.dtype):
            return None
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight, _BLOCKED_FOR_ROWS)
        return cls(cast(Tensor, blocks), is_transposed=False)

    @property
    def from_rows(self) -> int:
        """Fewer rows than these are multiplied faster by the weight itself."""
        return _TRANSPOSED_FROM_ROWS if self.is_transposed else _BLOCKED_FROM_ROWS

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """inputs [T, in] -> [T, out]."""
        if not self.is_transposed:
            return cast(Tensor, torch.ops.mkldnn._linear_pointwise(inputs, self.tensor, bias, "none", [], ""))
        return torch.mm(inputs, self.tensor) if bias is None else torch.addmm(bias, inputs, self.tensor)


def _has_blocks(dtype: torch.dtype) -> bool:
    mkldnn: Any = torch.backends.mkldnn  # untyped
    if not mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


@dataclass(slots=True, eq=False)
class Linear:
    """inputs [T, in] -> [T, out], over tensors that somebody else owns and may overwrite in place."""

    weight: Tensor
    bias: Tensor | None
    _copy: WeightCopy | None = field(default=None, init=False)

    def pack(self) -> None:
        """Make or renew the copy, where one helps."""
        self._copy = WeightCopy.of(self.weight)

    def __call__(self, inputs: Tensor) -> Tensor:
        copy = self._copy
        if copy is None or inputs.shape[0] < copy.from_rows:
            return F.linear(inputs, self.weight, self.bias)
        return copy.product(inputs, self.bias)
