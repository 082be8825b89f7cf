"""torch's attention over a packed row: what torch 2.11, 2.12 and 2.13 name differently of it, beside torch_versions.py.

Apart from these, as it loads torch's compiler, a second of computing that a process without an engine does not need.
"""

import inspect
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import varlen

_TAKES_GQA: Final = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
VARLEN_OPERATION: Final = torch.ops.torch_attn._varlen_attn.default
"""The operation that dispatch modes such as recomputation see for `varlen_attention`."""


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, **options: Any
) -> Tensor:
    """torch's `varlen_attn` of [T, heads, head_dim] over one packed row; `key` and `value` may have fewer heads."""
    if _TAKES_GQA and query.shape[1] != key.shape[1]:  # torch 2.11 has no such flag, and lets its kernel see the heads
        options["enable_gqa"] = True
    output = varlen.varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)
    assert isinstance(output, Tensor), "nothing else was asked for"
    return output
