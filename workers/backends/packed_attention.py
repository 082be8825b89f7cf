"""Causal attention over packed sequences: one scaled-dot-product call per run of neighbouring segments of equal length.

On CPU this is what a packed row is fastest with: a block-diagonal mask over the whole row computes, and throws away,
the attention between all pairs of sequences. Micro-batches are packed by length, so that runs are long. The model
receives `segment_lengths` as a keyword of its forward pass, and transformers hands it through to here.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

PACKED_ATTENTION = "corral_packed_sdpa"


def register_packed_attention() -> None:
    """Make the function known to transformers under `PACKED_ATTENTION`; doing so again changes nothing."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segment_lengths: Sequence[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature; no token sees another segment's, or a later one of its own.

    Args:
        module: the attention layer.
        query: [1, heads, T, head_dim]; `key` and `value` may have fewer heads.
        attention_mask: unused; the segments say it all.
        segment_lengths: tokens of each sequence; they add up to T.

    Returns:
        ([1, T, heads, head_dim], None).
    """
    has_grouped_heads = query.shape[1] != key.shape[1]
    runs = [(length, len(list(equal))) for length, equal in groupby(segment_lengths)]
    widths = [length * count for length, count in runs]
    pieces = zip(runs, *(torch.split(tensor, widths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [
        _joined(
            F.scaled_dot_product_attention(
                _stacked(q, count),
                _stacked(k, count),
                _stacked(v, count),
                attn_mask=(mask := _window_mask(length, sliding_window, q.device)),
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=has_grouped_heads,
            )
        )
        for (length, count), q, k, v in pieces
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _stacked(run: Tensor, count: int) -> Tensor:
    """[1, heads, count * L, head_dim] -> [count, heads, L, head_dim], without a copy."""
    _, heads, width, head_dim = run.shape
    return run[0].view(heads, count, width // count, head_dim).transpose(0, 1)


def _joined(stacked: Tensor) -> Tensor:
    """The inverse of `_stacked`."""
    count, heads, length, head_dim = stacked.shape
    return stacked.transpose(0, 1).reshape(1, heads, count * length, head_dim)


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """True where a token is seen; None where the window is no limit, and the causal mask says it all."""
    if sliding_window is None or length <= sliding_window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < sliding_window)
