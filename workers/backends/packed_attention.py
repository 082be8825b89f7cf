"""Causal attention over packed sequences, of which none sees another.

    a GPU with a kernel for it   the whole row in one call (varlen_attention.py)
    anywhere else                one scaled-dot-product call per run of neighbouring segments of equal length

On a CPU runs are what a packed row is fastest with: a block-diagonal mask over the whole row computes, and throws away,
the attention between all pairs of sequences. Micro-batches are packed by length, so that runs are long. The model
receives `segment_lengths` and `cu_seqlens` as keywords of its forward pass, and transformers hands them on to here.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from corral.workers.backends.context_parallel import to_heads, to_tokens
from corral.workers.backends.sharding import layers_of
from corral.workers.backends.varlen_attention import attend_in_one_call, setting_of, takes_one_call
from corral.workers.shared_prompts import PromptGroup, attend_with_shared_prompts, in_row, stacked

PACKED_ATTENTION = "corral_packed_sdpa"
_GROUP = "context_parallel_group"  # of an attention layer


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
    cu_seqlens: Tensor,
    prompt_groups: Sequence[PromptGroup] | None = None,
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
        segment_lengths: tokens of each sequence; they add up to T, where nothing is shared.
        cu_seqlens: [segments + 1] int32 on the device: where they begin and end.
        prompt_groups: the row, where it has prompts once; such rows have no dropout, window or group.

    Where `share_attention` gave the layer a group, T above is the tokens of this rank, and the segments are those of
    all its ranks: each computes some of the heads, over whole sequences.

    Returns:
        ([1, T, heads, head_dim], None).
    """
    if prompt_groups is not None:
        return attend_with_shared_prompts(query, key, value, groups=prompt_groups, scaling=scaling), None
    group: dist.ProcessGroup | None = getattr(module, _GROUP, None)
    rows = (query, key, value) if group is None else to_heads(query, key, value, group)
    if takes_one_call(setting_of(rows[0], dropout=dropout, sliding_window=sliding_window)):
        longest = max(segment_lengths)
        output = attend_in_one_call(
            *rows, cu_seqlens=cu_seqlens, longest=longest, scaling=scaling, sliding_window=sliding_window
        )
    else:
        output = attend_by_runs(
            *rows, segment_lengths=segment_lengths, scaling=scaling, dropout=dropout, sliding_window=sliding_window
        )
    return output if group is None else to_tokens(output, group), None


def share_attention(model: Any, group: dist.ProcessGroup) -> None:
    """Let the ranks of a group, which have some tokens of a row each, share the attention of every layer of a model.

    Raises:
        ValueError: if it has layers whose attention is not computed here.
    """
    for layer in layers_of(model):
        attention = getattr(layer, "self_attn", None)
        if not isinstance(attention, nn.Module):
            raise ValueError(f"{type(layer).__name__} has no self_attn that ranks could share; use c1")
        share_heads(attention, group)


def share_heads(attention: nn.Module, group: dist.ProcessGroup) -> None:
    """Let `packed_attention` of one layer exchange the tokens of this rank for some heads of all tokens of a group."""
    setattr(attention, _GROUP, group)


def attend_by_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segment_lengths: Sequence[int],
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> Tensor:
    """[1, heads, T, head_dim] each, `key` and `value` with perhaps fewer heads -> [1, T, heads, head_dim]."""
    has_grouped_heads = query.shape[1] != key.shape[1]
    runs = [(length, len(list(equal))) for length, equal in groupby(segment_lengths)]
    widths = [length * count for length, count in runs]
    pieces = zip(runs, *(torch.split(tensor, widths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [
        in_row(
            F.scaled_dot_product_attention(
                stacked(q, count),
                stacked(k, count),
                stacked(v, count),
                attn_mask=(mask := _window_mask(length, sliding_window, q.device)),
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=has_grouped_heads,
            )
        )
        for (length, count), q, k, v in pieces
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """True where a token is seen; None where the window is no limit, and the causal mask says it all."""
    if sliding_window is None or length <= sliding_window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < sliding_window)
