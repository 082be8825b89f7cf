"""Causal attention over packed sequences, of which none sees another.

    a GPU with a kernel for it   the whole row in one call
    anywhere else                one scaled-dot-product call per run of neighbouring segments of equal length

On a CPU runs are what a packed row is fastest with: a block-diagonal mask over the whole row computes, and throws away,
the attention between all pairs of sequences. Micro-batches are packed by length, so that runs are long. The model
receives `segment_lengths` and `cu_seqlens` as keywords of its forward pass, and transformers hands them on to here.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from corral.workers.backends.context_parallel import to_heads, to_tokens
from corral.workers.backends.low_precision import products_type
from corral.workers.backends.sharding import layers_of
from corral.workers.backends.varlen_torch_versions import varlen_attention
from corral.workers.shared_prompts import PromptGroup, attend_with_shared_prompts, in_row, stacked

PACKED_ATTENTION = "corral_packed_sdpa"
_GROUP = "context_parallel_group"  # of an attention layer


# Causal attention over a packed row in one call, whatever its sequences' lengths, where a GPU has a kernel for it.
#
#     q, k, v [T, heads, size], cu_seqlens [n + 1] ──► torch's varlen_attn (Flash Attention) ──► [T, heads, size]
#     setting ── why_not_one_call ──► None: this call, or the reason why a row goes by runs
#
# The kernel finds each sequence by its bounds on the device: nothing is copied or padded, and the host waits for
# nothing.

logger = logging.getLogger(__name__)

_TYPES: Final = (torch.bfloat16, torch.float16)
_OLDEST: Final = (8, 0)
_MAX_HEAD_DIM: Final = 256
_MAX_HEAD_DIM_ELSEWHERE: Final = 192  # the backward pass of larger heads needs the shared memory of an A100 or H100
_LARGE_MEMORY: Final = ((8, 0), (9, 0))


class AttentionSetting(NamedTuple):
    """The properties that decide how the attention of a row is computed."""

    capability: tuple[int, int] | None
    """Of an NVIDIA GPU, by a torch that has Flash Attention; None elsewhere."""
    dtype: torch.dtype
    """Of the products, which autocast decides where it is on."""
    head_dim: int
    dropout: float
    sliding_window: int | None
    """How many tokens one sees, with itself; None is all before it."""


def why_not_one_call(setting: AttentionSetting) -> str | None:
    """Why the kernel cannot take a row; None where it can."""
    capability, dtype, head_dim, dropout, window = setting
    if capability is None:
        return "this torch has no Flash Attention for the device"
    if capability < _OLDEST:
        return f"Flash Attention needs compute capability {_named(_OLDEST)}, and this GPU has {_named(capability)}"
    if dtype not in _TYPES:
        return f"Flash Attention computes in bfloat16 or float16, and products are {str(dtype).removeprefix('torch.')}"
    largest = _MAX_HEAD_DIM if capability in _LARGE_MEMORY else _MAX_HEAD_DIM_ELSEWHERE
    if head_dim % 8 or head_dim > largest:
        return f"Flash Attention takes heads of a multiple of 8 up to {largest} here, and these have {head_dim}"
    if window is not None and window < 1:
        return f"a sliding window of {window} tokens sees nothing"
    if dropout:
        return f"the call has no dropout, and attention here has {dropout}"
    return None


@lru_cache(maxsize=64)  # a model has one setting or two: what is decided is said once
def takes_one_call(setting: AttentionSetting) -> bool:
    """Whether rows go by one call each."""
    reason = why_not_one_call(setting)
    if reason is None:
        logger.info("attention takes all sequences of a row in one call: %s", setting)
    else:
        logger.info("attention takes sequences of equal length together, not all of a row in one call: %s", reason)
    return reason is None


def setting_of(query: Tensor, *, dropout: float, sliding_window: int | None) -> AttentionSetting:
    """The setting of a call, from its queries [..., head_dim]."""
    capability, dtype = _capability(query.device), products_type(query)
    return AttentionSetting(capability, dtype, query.shape[-1], dropout, sliding_window)


def attend_in_one_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens: Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """[1, heads, T, head_dim] each, `key` and `value` with perhaps fewer heads -> [1, T, heads, head_dim].

    Guarantee: the host reads nothing of the device.

    Args:
        cu_seqlens: [n + 1] int32 on the device.
        longest: tokens of the longest sequence, known to the host.
    """
    # Rotated queries and keys come in float32 under autocast, which changes the types of torch's own calls only.
    dtype = products_type(query)
    queries, keys, values = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    # As many as are seen before a token, and none after it.
    window_size = (-1 if sliding_window is None else sliding_window - 1, 0)
    return varlen_attention(queries, keys, values, cu_seqlens, longest, scale=scaling, window_size=window_size)[None]


def _capability(device: torch.device) -> tuple[int, int] | None:
    # ROCm calls its GPUs cuda, too, and counts them otherwise.
    if device.type != "cuda" or torch.version.cuda is None or not torch.backends.cuda.is_flash_attention_available():
        return None
    return torch.cuda.get_device_capability(device)


def _named(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


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
