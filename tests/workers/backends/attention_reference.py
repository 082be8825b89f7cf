"""Attention over a packed row told pair by pair, in float64, and rows to compare it on."""

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from corral.workers.backends.packed_attention import packed_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Queries, keys and values of some sequences, and the gradient that comes back for what they attend to."""

    lengths: tuple[int, ...]
    query: Tensor
    """[1, heads, T, head_dim]; `key` and `value` may have fewer heads."""
    key: Tensor
    value: Tensor
    gradient: Tensor
    """[1, T, heads, head_dim]."""

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.query.device)


def make_row(
    lengths: tuple[int, ...],
    *,
    heads: int = 4,
    key_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
) -> Row:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    total = sum(lengths)
    query, key, value = (drawn(1, count, total, head_dim).requires_grad_() for count in (heads, key_heads, key_heads))
    return Row(lengths=lengths, query=query, key=key, value=value, gradient=drawn(1, total, heads, head_dim))


def slow_attention(
    query: Tensor, key: Tensor, value: Tensor, *, lengths: tuple[int, ...], window: int | None = None
) -> Tensor:
    """[1, heads, T, head_dim] -> [1, T, heads, head_dim] float64: each token sees the last ones of its own sequence."""
    ratio = query.shape[1] // key.shape[1]
    rows = []
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        for place in range(length):
            seen = slice(start + (0 if window is None else max(0, place - window + 1)), start + place + 1)
            heads = []
            for head in range(query.shape[1]):
                keys, values = key[0, head // ratio, seen].double(), value[0, head // ratio, seen].double()
                scores = keys @ query[0, head, start + place].double() / math.sqrt(query.shape[-1])
                heads.append(scores.softmax(0) @ values)
            rows.append(torch.stack(heads))
    return torch.stack(rows)[None]


def slow_gradients(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, *, lengths: tuple[int, ...], window: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `slow_attention` in closed form, shaped as queries, keys and values are.

    For softmax P of scores S = scale Q K': dV = P' dO, dS = P (dP - sum(P dP)) with dP = dO V', dQ = scale dS K,
    dK = scale dS' Q; heads that share a key add up.

    Args:
        gradient: [1, heads, T, head_dim] of what is attended to.
    """
    ratio, scale = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5
    grown = (tensor.double() for tensor in (query, key, value, gradient))
    own_query, own_key, own_value, own_gradient = grown
    results = [torch.zeros_like(tensor) for tensor in (own_query, own_key, own_value)]
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        own = slice(start, start + length)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        is_seen = (distance >= 0) & (distance < (length if window is None else window))
        for head in range(query.shape[1]):
            place, shared = (0, head, own), (0, head // ratio, own)
            scores = scale * own_query[place] @ own_key[shared].T
            weights = scores.masked_fill(~is_seen, -math.inf).softmax(1)
            of_weights = own_gradient[place] @ own_value[shared].T
            of_scores = weights * (of_weights - (weights * of_weights).sum(1, keepdim=True))
            results[0][place] += scale * of_scores @ own_key[shared]
            results[1][shared] += scale * of_scores.T @ own_query[place]
            results[2][shared] += weights.T @ own_gradient[place]
    of_query, of_key, of_value = results
    return of_query, of_key, of_value


def with_gradients(row: Row, output: Tensor) -> list[Tensor]:
    """What was computed of a row, and the gradients of its queries, keys and values, on the CPU."""
    inputs = (row.query, row.key, row.value)
    gradients = torch.autograd.grad(output, inputs, row.gradient.to(output.dtype))
    return [tensor.detach().cpu().double() for tensor in (output, *gradients)]


def attend(row: Row, *, window: int | None = None, layer: nn.Module | None = None) -> Tensor:
    """[1, T, heads, head_dim] by the way under test, in a layer that may have a group of ranks."""
    output, _ = packed_attention(
        layer or nn.Module(),
        row.query,
        row.key,
        row.value,
        None,
        segment_lengths=row.lengths,
        cu_seqlens=row.cu_seqlens,
        sliding_window=window,
    )
    return output
