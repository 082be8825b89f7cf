"""Products in bfloat16 of float32 weights, without a second copy of the weights.

    forward    weight (float32) ──► cast ──► product ──► let go        kept for the backward pass: the float32 weight,
    backward   weight (float32) ──► cast ──► product ──► let go        which is there anyway, and the input

Under autocast alone every cast weight stays until the backward pass has used it, since the product's gradient needs it,
and until the end of a forward pass without gradient, since autocast keeps it for a second use: two more bytes for each
parameter, and under FSDP2 for each of the whole model on every rank. The numbers are those of autocast, bit for bit.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corral.workers.backends.sharding import local_with_gradient


def cast_per_use(model: nn.Module) -> None:
    """Let every linear layer of a model cast its weight where autocast is on, each time that it is used."""
    for module in model.modules():
        if type(module) is nn.Linear:  # a subclass knows better
            module.__class__ = CastingLinear


class CastingLinear(nn.Linear):
    """A linear layer whose weight is cast each time that it is used; one that is held in that type is not copied.

    Of a weight whose rows are cut over tensor-parallel ranks, such as those of some heads, it takes this rank's:
    [..., in] -> [..., out / t].
    """

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else local_with_gradient(self.bias)
        return product(input, local_with_gradient(self.weight), bias)


def product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, [..., K] -> [..., N]; where autocast is on, in its type, without keeping a cast weight."""
    if not torch.is_autocast_enabled(input.device.type):
        return F.linear(input, weight, bias)
    apply: Any = _Product.apply
    output: Tensor = apply(input, weight, bias, products_type(input))
    return output


def products_type(tensor: Tensor) -> torch.dtype:
    """The type that products of this tensor have."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


class _Product(torch.autograd.Function):
    """`F.linear` in another type than its weight's."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """input [..., K], weight [N, K], bias [N] -> [..., N] in `dtype`."""
        low = input.to(dtype)
        ctx.save_for_backward(low, weight)
        ctx.input_dtype, ctx.bias_dtype = input.dtype, None if bias is None else bias.dtype
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(low, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        low, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_input = of_weight = of_bias = None
        with torch.autocast(gradient.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_input = (gradient @ weight.to(gradient.dtype)).to(ctx.input_dtype)
            if ctx.needs_input_grad[1]:
                of_weight = (rows.T @ low.flatten(0, -2)).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                of_bias = rows.sum(0).to(ctx.bias_dtype)
        return of_input, of_weight, of_bias, None
