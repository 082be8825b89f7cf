"""Products of many matrices with the tokens of each, in one call: what the experts of a mixture are multiplied by.

tokens, sorted by group [T, in] ──┐ forward: one call          kept for the backward pass: tokens in that type, and
a matrix [out, in] for each ──────┴─► [T, out] in `dtype`      the matrices as they are held; cast again there
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

_ROW_BYTES: Final = 16  # torch's grouped product reads rows in such steps


def grouped_product(
    tokens: Tensor, ends: Tensor, matrices: Sequence[Tensor], *, dtype: torch.dtype | None = None
) -> Tensor:
    """Each group of tokens times the transpose of its own matrix.

    Args:
        tokens: [T, in], sorted by group.
        ends: [groups] int32: where each group ends.
        matrices: [out, in] of each group, or one tensor [groups, out, in].
        dtype: of the product, to which both are cast; None takes that of the tokens. A gradient comes back in the type
            of what it is of.

    Returns:
        [T, out].
    """
    output: Tensor = _GroupedProduct.apply(tokens, ends, dtype or tokens.dtype, *matrices)  # type: ignore[no-untyped-call]
    return output


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, dtype: torch.dtype, *matrices: Tensor) -> Tensor:
        low = tokens.to(dtype)
        ctx.save_for_backward(low, ends, *matrices)
        ctx.tokens_dtype = tokens.dtype
        return _each(low, as_one(matrices).to(dtype).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        low, ends, *matrices = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_tokens = of_matrices = None
        if ctx.needs_input_grad[0]:
            of_tokens = _each(gradient, as_one(matrices).to(low.dtype), ends).to(ctx.tokens_dtype)
        if any(ctx.needs_input_grad[3:]):
            of_matrices = _between(gradient, low, ends).to(matrices[0].dtype)
        if of_matrices is None or matrices[0].ndim == 3:
            return of_tokens, None, None, of_matrices
        return of_tokens, None, None, *of_matrices.unbind()


def _each(tokens: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """[T, a], [groups, a, b] -> [T, b]."""
    if _fits(*matrices.shape[1:], dtype=tokens.dtype):
        return F.grouped_mm(tokens, matrices, offs=ends)
    products = tokens.new_empty(len(tokens), matrices.shape[2])
    for part, matrix, place in zip(_split(tokens, ends), matrices, _split(products, ends), strict=True):
        # into its place: the results of `aten.mm`, which recompute.py keeps, would be kept beside it
        torch.mm(part, matrix, out=place)
    return products


def _between(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """[T, a], [T, b] -> [groups, a, b]: of the tokens of each group."""
    if _fits(left.shape[1], right.shape[1], dtype=left.dtype):
        return F.grouped_mm(left.t(), right, offs=ends)
    return torch.stack([a.T @ b for a, b in zip(_split(left, ends), _split(right, ends), strict=True)])


def _fits(*row_sizes: int, dtype: torch.dtype) -> bool:
    """Whether torch multiplies all groups in one call; others it does one by one, after a wait for where they end."""
    return all(size * dtype.itemsize % _ROW_BYTES == 0 for size in row_sizes)


def _split(tokens: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return torch.tensor_split(tokens, ends.cpu().long())[:-1]  # after the last one's end there is nothing


def as_one(matrices: Sequence[Tensor]) -> Tensor:
    """[out, in] each -> [matrices, out, in], without a copy where they stand at equal distances in memory."""
    first = matrices[0].detach()
    if first.ndim == 3:
        return first
    offsets = [matrix.storage_offset() for matrix in matrices]
    step = offsets[1] - offsets[0] if len(offsets) > 1 else first.numel()
    are_together = (
        len({matrix.untyped_storage().data_ptr() for matrix in matrices}) == 1
        and offsets == [offsets[0] + place * step for place in range(len(offsets))]
        and step >= first.numel()
        and step * first.element_size() % _ROW_BYTES == 0
        and all(matrix.is_contiguous() for matrix in matrices)
    )
    if not are_together:
        return torch.stack([matrix.detach() for matrix in matrices])
    return first.as_strided((len(matrices), *first.shape), (step, *first.stride()))
