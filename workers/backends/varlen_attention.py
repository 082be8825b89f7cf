"""Causal attention over a packed row in one call, whatever its sequences' lengths, where a GPU has a kernel for it.

    q, k, v [T, heads, head_dim], cu_seqlens [n + 1] ──► torch's varlen_attn (Flash Attention) ──► [T, heads, head_dim]
    setting ── why_not_one_call ──► None: this call, or the reason why a row goes by runs (packed_attention.py)

The kernel finds each sequence by its bounds on the device: nothing is copied or padded, and the host waits for nothing.
"""

import logging
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from corral.workers.backends.low_precision import products_type
from corral.workers.backends.varlen_torch_versions import varlen_attention

logger = logging.getLogger(__name__)

_TYPES: Final = (torch.bfloat16, torch.float16)
_OLDEST: Final = (8, 0)
_MAX_HEAD_DIM: Final = 256
_MAX_HEAD_DIM_ELSEWHERE: Final = 192  # the backward pass of larger heads needs the shared memory of an A100 or H100
_LARGE_MEMORY: Final = ((8, 0), (9, 0))


class AttentionSetting(NamedTuple):
    """What decides how the attention of a row is computed."""

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
