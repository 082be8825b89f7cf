"""Kernels that GPUs have and CPUs have not, computed slowly by torch's own attention and products in float32.

They refuse what the kernels refuse: other types than bfloat16 and float16, bounds of other types, heads of odd sizes.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_OPS: Any = torch.ops.pretended


def _logits(query: Tensor, key: Tensor, *, scale: float | None, is_causal: bool, window: int | None) -> Tensor:
    """[..., heads, queries, keys], minus infinity where nothing is seen; as many heads of keys as of queries."""
    logits = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    distance = torch.arange(query.shape[-2])[:, None] - torch.arange(key.shape[-2])
    if is_causal:
        logits = logits.masked_fill(distance < 0, -torch.inf)
    return logits if window is None else logits.masked_fill(distance > window, -torch.inf)


def _attend(query: Tensor, key: Tensor, value: Tensor, **seen: Any) -> tuple[Tensor, Tensor]:
    """[..., heads, length, head_dim] -> the same, and the logarithms of the softmax's sums [..., heads, length]."""
    key, value = (tensor.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3) for tensor in (key, value))
    logits = _logits(query, key, **seen)
    return logits.softmax(-1) @ value, logits.logsumexp(-1)


def _gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sums: Tensor, **seen: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values, by the result and the sums that it is told, which may be those of more keys."""
    groups = query.shape[-3] // key.shape[-3]
    key, value = (tensor.repeat_interleave(groups, dim=-3) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5 if seen["scale"] is None else seen["scale"]
    weights = (_logits(query, key, **seen) - log_sums[..., None]).exp()
    of_weights = gradient @ value.transpose(-1, -2) - (gradient * output).sum(-1, keepdim=True)
    of_logits = weights * of_weights * scale
    of_keys, of_values = of_logits.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ gradient
    return of_logits @ key, *(part.unflatten(-3, (-1, groups)).sum(-3) for part in (of_keys, of_values))


def _check(*tensors: Tensor) -> None:
    kinds = {tensor.dtype for tensor in tensors}
    assert kinds in ({torch.bfloat16}, {torch.float16}), f"Flash Attention takes bfloat16 or float16, not {kinds}"
    assert all(t.is_cuda and t.stride(-1) == 1 and t.shape[-1] <= 256 and t.shape[-1] % 8 == 0 for t in tensors)


def _nothing_random(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.zeros(2, dtype=torch.uint64, device=device)
    return none, none[0], torch.zeros(0, device=device)


def _segments(cu_seqlens: Tensor, longest: int, num_tokens: int) -> Iterator[slice]:
    assert cu_seqlens.is_cuda and cu_seqlens.dtype == torch.int32
    bounds = _OPS.on_host(cu_seqlens).tolist()
    assert bounds[-1] == num_tokens and all(end - start <= longest for start, end in pairwise(bounds))
    return (slice(start, end) for start, end in pairwise(bounds) if end > start)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, _: Tensor, longest: int, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_forward of packed rows [T, heads, head_dim]."""
    _check(query, key, value)
    tokens = [_OPS.on_host(tensor).transpose(0, 1).float() for tensor in (query, key, value)]
    parts = [
        _attend(*(tensor[:, own] for tensor in tokens), **_seen(rest[2], options))
        for own in _segments(cu_seqlens, longest, query.shape[0])
    ]
    outputs, log_sums = zip(*parts, strict=True)
    made = _in_rows(outputs, query.dtype), _OPS.on_device(torch.cat(log_sums, 1))
    return *made, *_nothing_random(query.device)


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward of the same."""
    cu_seqlens, _, longest, _, _, is_causal = rest[:6]
    tokens = [_OPS.on_host(tensor).transpose(0, 1).float() for tensor in (gradient, query, key, value, output)]
    sums, seen = _OPS.on_host(log_sums), _seen(is_causal, options)
    parts = [
        _gradients(*(tensor[:, own] for tensor in (*tokens, sums)), **seen)
        for own in _segments(cu_seqlens, longest, query.shape[0])
    ]
    return tuple(_in_rows(of_input, query.dtype) for of_input in zip(*parts, strict=True))


def _in_rows(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    made: Tensor = _OPS.on_device(torch.cat(tuple(parts), 1).transpose(0, 1).to(dtype).contiguous())
    return made


def _seen(is_causal: bool, options: dict[str, Any]) -> dict[str, Any]:
    left, right = options.get("window_size_left"), options.get("window_size_right")
    window = left if left is not None and left >= 0 else None
    return {"scale": options.get("scale"), "is_causal": is_causal or right == 0, "window": window}


def _padded_flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, is_causal: bool = False, *_: Any, **options: Any
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention of [batch, heads, length, head_dim]."""
    _check(query, key, value)
    tensors = (_OPS.on_host(tensor).float() for tensor in (query, key, value))
    output, log_sums = _attend(*tensors, **_seen(is_causal, options))
    laid_out = output.to(query.dtype).transpose(1, 2).contiguous()
    lengths = (None, None, query.shape[2], key.shape[2])
    made = _OPS.on_device(laid_out).transpose(1, 2), _OPS.on_device(log_sums)
    return *made, *lengths, *_nothing_random(query.device)


def _padded_flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward, which believes the result and the sums that it is told."""
    given = (gradient, query, key, value, output, log_sums)
    parts = _gradients(*(_OPS.on_host(tensor).float() for tensor in given), **_seen(rest[5], options))
    return tuple(_OPS.on_device(part.to(query.dtype)) for part in parts)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """aten::mm.dtype: of narrow numbers, added up in wide ones."""
    made: Tensor = _OPS.on_device(_OPS.on_host(left).to(dtype) @ _OPS.on_host(right).to(dtype))
    return made


def _add_product(total: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor, **_: Any) -> Tensor:
    """aten::addmm.dtype_out with factors of 1."""
    product = _OPS.on_host(left).to(dtype) @ _OPS.on_host(right).to(dtype)
    _OPS.on_host(out).copy_(_OPS.on_host(total) + product)
    return out


def _norm(values: Tensor, shape: list[int], weight: Tensor | None, epsilon: float | None) -> tuple[Tensor, Tensor]:
    """aten::_fused_rms_norm over the last dimension, which keeps one scale of each row."""
    rows = _OPS.on_host(values).float()
    tiny = torch.finfo(values.dtype).eps if epsilon is None else epsilon
    scales = (rows.square().mean(-1, keepdim=True) + tiny).rsqrt()
    normalized = rows * scales * (1.0 if weight is None else _OPS.on_host(weight).float())
    return _OPS.on_device(normalized.to(values.dtype)), _OPS.on_device(scales)


def _norm_backward(
    gradient: Tensor, values: Tensor, shape: list[int], scales: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """aten::_fused_rms_norm_backward of the same."""
    slopes, rows, scale = (_OPS.on_host(tensor).float() for tensor in (gradient, values, scales))
    weighed = slopes if weight is None else slopes * _OPS.on_host(weight).float()
    of_rows = scale * (weighed - rows * scale.square() * (weighed * rows).mean(-1, keepdim=True))
    of_weight = (slopes * rows * scale).flatten(0, -2).sum(0)
    return (
        _OPS.on_device(of_rows.to(values.dtype)) if mask[0] else None,
        _OPS.on_device(of_weight.to(weight.dtype)) if mask[1] and weight is not None else None,
    )


def install() -> torch.library.Library:
    """Give the device these kernels for as long as the result is held."""
    library = torch.library.Library("aten", "IMPL")
    kernels = {
        "_flash_attention_forward": _flash,
        "_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_flash_attention": _padded_flash,
        "_scaled_dot_product_flash_attention_backward": _padded_flash_backward,
        "_fused_rms_norm": _norm,
        "_fused_rms_norm_backward": _norm_backward,
        "mm.dtype": _product,
        "addmm.dtype_out": _add_product,
    }
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CUDA")
    return library
