"""Matrix products of the embedded engine: by weights or their rounding to int8, on a CPU laid out for small batches.

    weights [out, in], of layers with the same inputs --pack--> one copy     inputs [T, in] --> [T, sum of out]
                                                                 |
                                                small, float32:  transposed, [in, out]
                                                otherwise:       blocks of oneDNN

A decode step multiplies a few rows by every weight, and reads all of them once per token. MKL multiplies 4 to 64 rows
by a small matrix a quarter to a third faster where it is transposed (measured on a Xeon with AVX-512, as all figures
here); a large one is bound by reading, and oneDNN's blocks are read a fifth faster. The copy doubles the memory of the
weights, and is stale after they change until `pack` is called again.

    weight [out, in] float --quantize--> values [out, in] int8, scales [out]       weight ~ values * scales
    inputs [T, in] --> (inputs @ values.T) * scales + bias [T, out]

Only weights are rounded, not activations: each output channel to 255 steps of a size of its own, symmetrically around 0
(Krishnamoorthi 2018, https://arxiv.org/abs/1806.08342). Nothing accumulates, since `pack` rounds the float weights that
are there and leaves them as they are. The scales multiply the product and not the weights, so that every way to
compute it is by exactly these integers, which a bfloat16 can hold. torch's kernel for int8 reads half of bfloat16's
bytes and is the fastest for a row or two of it; for more rows the copies are, and for rows of float32 the kernel is not
vectorised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_TRANSPOSED_TO_ELEMENTS = 2**18  # 1 MiB in float32, half of a core's cache; past it columns are read too slowly
_BLOCKED_FOR_ROWS = 16  # the layout for this many rows served 4 to 512 best, of 1, 16 and 64
_BLOCKED_FROM_ROWS = 4  # below, and for small matrices, oneDNN's call costs more than it saves
_BLOCKED_FROM_ELEMENTS = 2**17


LayerTensors = tuple[Tensor, Tensor | None]
"""Weight [out, in] and bias [out] of a linear layer, which somebody else owns and may overwrite in place."""


def side_by_side(layers: Sequence[LayerTensors]) -> LayerTensors:
    """The tensors of one layer that gives what all of `layers` give: its own for one, new ones for several."""
    if len(layers) == 1:
        return layers[0]
    biases = [bias for _, bias in layers if bias is not None]
    if len(biases) not in (0, len(layers)):
        raise ValueError(
            f"{len(biases)} of {len(layers)} layers that are multiplied as one have a bias; all or none do"
        )
    return torch.cat([weight for weight, _ in layers]), torch.cat(biases) if biases else None


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
        return 1 if self.is_transposed else _BLOCKED_FROM_ROWS

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


class Linear:
    """The products of the same inputs with the weights of one or several layers, side by side."""

    def __init__(self, *layers: LayerTensors) -> None:
        self._layers = layers
        self._copy: WeightCopy | None = None
        self._bias: Tensor | None = None

    def pack(self) -> None:
        """Make or renew what is computed from the weight; until then the product is that of the weight before."""
        weight, self._bias = side_by_side(self._layers)
        self._copy = WeightCopy.of(weight)

    def __call__(self, inputs: Tensor) -> Tensor:
        """inputs [T, in] -> [T, sum of out]."""
        copy = self._copy
        if copy is not None and inputs.shape[0] >= copy.from_rows:
            return copy.product(inputs, self._bias)
        products = [F.linear(inputs, weight, bias) for weight, bias in self._layers]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def add_to(self, sums: Tensor, inputs: Tensor) -> None:
        """sums [T, sum of out] += what `inputs` [T, in] give."""
        copy = self._copy
        if copy is not None and copy.is_transposed and self._bias is None:
            sums.addmm_(inputs, copy.tensor)
        else:
            sums.add_(self(inputs))


QUANTIZABLE_DTYPES = (torch.float32, torch.bfloat16)
"""Of weights that can be quantised: in float16 a product may be infinite before it is scaled."""

_LARGEST = 127  # -128 would have no counterpart
_KERNEL_UP_TO_ROWS = 2
_KERNEL_INPUTS_STEP = 32  # the kernel does not look at the end of a row that is no multiple of its vectors, and crashes


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of a weight [out, in]; no entry moves by more than half of the row's scale.

    weight ~ values * scales[:, None], of values [out, in] int8, -127 to 127, and scales [out] of the weight's dtype,
    above 0.

    The scale is the row's largest magnitude / 127, brought to the weight's dtype before the row is divided by it.
    """
    exact = weight.float()
    scales = (exact.abs().amax(dim=1) / _LARGEST).to(weight.dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))  # a row of zeros stays one
    steps = torch.round(exact / scales.float().unsqueeze(1))
    return steps.clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales


class Int8Linear(Linear):
    """By the rounding of float weights that somebody else owns.

    It holds the integers as int8 where torch's kernel is used, and as floats for all else: beside the float weight that
    is no less memory than `Linear` needs. On a GPU it is the plain product of these floats.
    """

    _scales: Tensor | None = None
    _int8: Tensor | None = None
    _plain: Tensor | None = None

    def pack(self) -> None:
        """Round the weights as they are now; before the first time there is nothing to multiply by."""
        weight, self._bias = side_by_side(self._layers)
        values, self._scales = quantize(weight)
        integers = values.to(weight.dtype)
        self._int8 = values if _has_kernel(weight) else None
        self._copy = WeightCopy.of(integers)
        self._plain = integers if self._copy is None else None

    def __call__(self, inputs: Tensor) -> Tensor:
        assert self._scales is not None, "pack() rounds the weight first"
        if self._int8 is not None and inputs.shape[0] <= _KERNEL_UP_TO_ROWS:
            scaled = torch._weight_int8pack_mm(inputs, self._int8, self._scales)
        elif self._copy is not None:
            scaled = self._copy.product(inputs, None).mul_(self._scales)
        else:
            assert self._plain is not None
            scaled = F.linear(inputs, self._plain).mul_(self._scales)
        return scaled if self._bias is None else scaled.add_(self._bias)

    def add_to(self, sums: Tensor, inputs: Tensor) -> None:
        """sums [T, sum of out] += what `inputs` [T, in] give."""
        sums.add_(self(inputs))


def _has_kernel(weight: Tensor) -> bool:
    is_vectorised = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return is_vectorised and weight.shape[1] % _KERNEL_INPUTS_STEP == 0
