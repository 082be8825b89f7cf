"""Matrix products with int8 weights: what a quantised maker multiplies by, made anew whenever its float weights change.

    weight [out, in] float ──quantize──► values [out, in] int8, scales [out]       weight ~ values * scales
    inputs [T, in] ──► (inputs @ values.T) * scales + bias [T, out]

Only weights are rounded, not activations: each output channel to 255 steps of a size of its own, symmetrically around 0
(Krishnamoorthi 2018, https://arxiv.org/abs/1806.08342). Nothing accumulates, since `pack` rounds the float weights that
are there and leaves them as they are.

The scales multiply the product and not the weights, so that every way to compute it is by exactly these integers, which
a bfloat16 can hold. torch's kernel for int8 reads half of bfloat16's bytes and is the fastest for a row or two of it;
for more rows the copies of linear.py are, and for rows of float32 the kernel is not vectorised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from corral.workers.engine.decoder.linear import LayerTensors, WeightCopy, side_by_side

DTYPES = (torch.float32, torch.bfloat16)
"""Of weights that can be quantised: in float16 a product may be infinite before it is scaled."""

_LARGEST = 127  # -128 would have no counterpart
_KERNEL_UP_TO_ROWS = 2
_KERNEL_INPUTS_STEP = 32  # the kernel does not look at the end of a row that is no multiple of its vectors, and crashes


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """weight [out, in] ~ values * scales[:, None]."""

    values: Tensor
    """[out, in] int8, -127 to 127."""
    scales: Tensor
    """[out] of the weight's dtype, above 0."""


def quantize(weight: Tensor) -> Int8Weight:
    """Round each row of a weight [out, in]; no entry moves by more than half of the row's scale.

    The scale is the row's largest magnitude / 127, brought to the weight's dtype before the row is divided by it.
    """
    exact = weight.float()
    scales = (exact.abs().amax(dim=1) / _LARGEST).to(weight.dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))  # a row of zeros stays one
    steps = torch.round(exact / scales.float().unsqueeze(1))
    return Int8Weight(steps.clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales)


class Int8Linear:
    """inputs [T, in] -> [T, sum of out] by the rounding of float weights that somebody else owns.

    It holds the integers as int8 where torch's kernel is used, and as floats for all else: beside the float weight that
    is no less memory than `Linear` needs. On a GPU it is the plain product of these floats.
    """

    def __init__(self, *layers: LayerTensors) -> None:
        self._layers = layers
        self._bias: Tensor | None = None
        self._scales: Tensor | None = None
        self._int8: Tensor | None = None
        self._copy: WeightCopy | None = None
        self._plain: Tensor | None = None

    def pack(self) -> None:
        """Round the weights as they are now; before the first time there is nothing to multiply by."""
        weight, self._bias = side_by_side(self._layers)
        rounded = quantize(weight)
        integers = rounded.values.to(weight.dtype)
        self._scales = rounded.scales
        self._int8 = rounded.values if _has_kernel(weight) else None
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
