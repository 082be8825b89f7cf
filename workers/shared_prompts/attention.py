"""Causal attention over a row that has prompts once: each answer sees itself, and the prompt before it.

    row                P P P P a a b b b
    own                prompt, a and b, each within itself, causally             runs of equal length in one call
    prompt             all queries of a and b ──► all keys of P                  one call a group, without a mask
    merged             for queries of a and b: both results, weighted by the sums of their softmax

A softmax over two sets of keys is made of those over each: o = (e^l1 o1 + e^l2 o2) / (e^l1 + e^l2) for results o and
logarithms l of the sums (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867). Nothing is made for the pairs
of answers, and no key or value is there twice; what is kept for the backward pass is what one call over the row keeps.
The kernel's backward pass of a set of keys, told the merged result and sum, gives the share of that set.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corral.workers.shared_prompts.rows import PromptGroup

_ATEN = torch.ops.aten


class _Piece(NamedTuple):
    """One call of the kernel."""

    queries: slice
    """Of the row."""
    keys: slice
    """Of the row."""
    num_segments: int
    """Segments of equal length in both, which do not see each other."""
    is_causal: bool


def attend_with_shared_prompts(
    query: Tensor, key: Tensor, value: Tensor, *, groups: Sequence[PromptGroup], scaling: float | None
) -> Tensor:
    """[1, heads, R, head_dim] each, `key` and `value` with perhaps fewer heads -> [1, R, heads, head_dim].

    Args:
        groups: the whole row.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # which knows torch's own calls only
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    output: Tensor = _SharedPromptAttention.apply(query, key, value, tuple(groups), scaling)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2)


class _SharedPromptAttention(torch.autograd.Function):
    """[1, heads, R, head_dim] -> the same, in memory token by token."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, groups: tuple[PromptGroup, ...], scale: float | None
    ) -> Tensor:
        _, heads, width, head_dim = query.shape
        output = query.new_empty(1, width, heads, head_dim).transpose(1, 2)
        log_sums = query.new_empty(1, heads, width, dtype=torch.float32)
        for piece in _within_segments(groups):
            result, of_piece = _attend(piece, query, key, value, scale)
            output[:, :, piece.queries] = in_row(result)
            log_sums[:, :, piece.queries] = in_row(of_piece[..., None])[..., 0]
        for piece in _on_prompts(groups):
            result, of_piece = _attend(piece, query, key, value, scale)
            own = log_sums[:, :, piece.queries].clone()
            merged = torch.logaddexp(own, of_piece)
            log_sums[:, :, piece.queries] = merged
            result = result * (of_piece - merged).exp()[..., None]  # float32, whatever the type of the products
            output[:, :, piece.queries] = result + output[:, :, piece.queries] * (own - merged).exp()[..., None]
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.groups, ctx.scale = groups, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: a layer that is computed again gives them one time
        of_inputs = [torch.zeros_like(tensor) for tensor in saved[:3]]
        for piece in (*_within_segments(ctx.groups), *_on_prompts(ctx.groups)):
            parts = _gradients(piece, gradients[0], saved, ctx.scale)
            for whole, part, place in zip(of_inputs, parts, (piece.queries, piece.keys, piece.keys), strict=True):
                whole[:, :, place] += in_row(part)
        return *of_inputs, None, None


def _within_segments(groups: Sequence[PromptGroup]) -> Iterator[_Piece]:
    """Each segment within itself; neighbours of equal length are one piece."""
    segments = [length for shared, own in groups for length in (shared, *own) if length]
    start = 0
    for length, equal in groupby(segments):
        count = len(list(equal))
        run = slice(start, start + length * count)
        yield _Piece(run, run, count, is_causal=True)
        start = run.stop


def _on_prompts(groups: Sequence[PromptGroup]) -> Iterator[_Piece]:
    """All that the answers of a group have of their own, and what they share."""
    start = 0
    for group in groups:
        end = start + group.num_tokens
        if group.shared:
            middle = start + group.shared
            yield _Piece(slice(middle, end), slice(start, middle), 1, is_causal=False)
        start = end


def _attend(piece: _Piece, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """[count, heads, length, head_dim], and [count, heads, length] float32: the logarithms of the softmax's sums."""
    queries = stacked(query[:, :, piece.queries], piece.num_segments)
    keys, values = (stacked(tensor[:, :, piece.keys], piece.num_segments) for tensor in (key, value))
    kernel = (
        _ATEN._scaled_dot_product_flash_attention_for_cpu
        if query.device.type == "cpu"
        else _ATEN._scaled_dot_product_flash_attention
    )
    result, log_sums, *_ = kernel(queries, keys, values, 0.0, piece.is_causal, scale=scale)
    return result, log_sums


def _gradients(
    piece: _Piece, gradient: Tensor, saved: Sequence[Tensor], scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What the keys of a piece are the reason of, by its queries, keys and values.

    Args:
        gradient: by the output of the row.
        saved: queries, keys, values, output, and logarithms of the softmax's sums of the row.
    """
    query, key, value, output, log_sums = saved
    of_result, queries, results = (
        stacked(tensor[:, :, piece.queries], piece.num_segments) for tensor in (gradient, query, output)
    )
    keys, values = (stacked(tensor[:, :, piece.keys], piece.num_segments) for tensor in (key, value))
    sums = stacked(log_sums[:, :, piece.queries, None], piece.num_segments)[..., 0]
    known = (of_result, queries, keys, values, results, sums.contiguous())
    if query.device.type == "cpu":
        backward: Any = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        parts: tuple[Tensor, Tensor, Tensor] = backward(*known, 0.0, piece.is_causal, scale=scale)
        return parts
    nothing_random = torch.zeros(2, dtype=torch.uint64, device=query.device)
    backward = _ATEN._scaled_dot_product_flash_attention_backward
    lengths = (None, None, queries.shape[2], keys.shape[2])
    parts = backward(*known, *lengths, 0.0, piece.is_causal, nothing_random, nothing_random[0], scale=scale)
    return parts


def stacked(run: Tensor, count: int) -> Tensor:
    """[1, heads, count * length, size] -> [count, heads, length, size], without a copy."""
    _, heads, width, size = run.shape
    return run[0].view(heads, count, width // count, size).transpose(0, 1)


def in_row(several: Tensor) -> Tensor:
    """The inverse of `stacked`."""
    return several.transpose(0, 1).flatten(1, 2)[None]
