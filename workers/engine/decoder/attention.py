"""The two attentions of the embedded engine: a rectangle of new prompts, and one new token per running row.

PromptAttention writes the whole prompts into the cache and attends among themselves: prompts are padded on the right,
so the causal mask alone keeps every real token from seeing padding. TokenAttention writes one position per row and
attends to the row's own past; a mask hides what lies beyond a row's length, in spans of rows whose lengths differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from corral.workers.engine.decoder.cache import KVCache
from corral.workers.engine.decoder.row_spans import RowSpan

_CALL_BYTES = 2**18  # what torch's attention reads on a CPU in the 20 us that one more call takes (Xeon, float32)


def call_cost(cache: KVCache) -> int | None:
    """Positions that are read in the time one more call takes; None on a GPU, which reads all rows side by side."""
    return -(-_CALL_BYTES // cache.position_bytes) if cache.device.type == "cpu" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAttention:
    """Causal attention inside N right-padded prompts of width T; keys and values go to cache rows."""

    cache: KVCache
    num_prompts: int
    rows: Tensor
    """[R] int64 cache rows, R >= N."""
    prompt_of_row: Tensor
    """[R] int64, which of the N prompts each row gets."""
    softmax_scale: float

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        num_tokens = queries.shape[0]
        queries, keys, values = (self._by_prompt(tensor) for tensor in (queries, keys, values))
        source = self.prompt_of_row
        self.cache.write_prompts(layer, rows=self.rows, keys=keys[source], values=values[source])
        output = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
        return output.transpose(1, 2).reshape(num_tokens, -1)

    def _by_prompt(self, tensor: Tensor) -> Tensor:
        """[N * T, heads, D] -> [N, heads, T, D]"""
        return tensor.view(self.num_prompts, -1, *tensor.shape[1:]).transpose(1, 2)


class TokenAttention:
    """Attention of the token at `positions[b]` of row b over positions 0..positions[b], for rows 0..B-1."""

    def __init__(
        self,
        cache: KVCache,
        *,
        positions: Tensor,
        spans: Sequence[RowSpan],
        dtype: torch.dtype,
        softmax_scale: float,
    ) -> None:
        """positions: [B] int64; spans: what one call takes each, of the lengths positions + 1, known to the caller
        without asking the device."""
        self._cache = cache
        self._slots = cache.token_slots(positions)
        self._softmax_scale = softmax_scale
        self._spans = [(span, _bias(positions[span.start : span.stop], span, dtype=dtype)) for span in spans]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        num_rows, num_kv_heads = keys.shape[:2]
        self._cache.write_tokens(layer, slots=self._slots, keys=keys, values=values)
        # The query heads that share one key head stand where the sequence axis is: grouped attention without copies.
        grouped = queries.view(num_rows, num_kv_heads, -1, queries.shape[-1])
        outputs = [self._attend(layer, grouped[span.start : span.stop], span, bias) for span, bias in self._spans]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.reshape(num_rows, -1)

    def _attend(self, layer: int, queries: Tensor, span: RowSpan, bias: Tensor | None) -> Tensor:
        keys, values = self._cache.read(layer, start=span.start, stop=span.stop, length=span.longest)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=self._softmax_scale)


def _bias(positions: Tensor, span: RowSpan, *, dtype: torch.dtype) -> Tensor | None:
    """[rows, 1, 1, longest], minus infinity beyond each row's position; None where nothing lies beyond."""
    if span.shortest == span.longest:
        return None
    is_beyond = torch.arange(span.longest, device=positions.device) > positions.unsqueeze(-1)
    bias = torch.zeros(is_beyond.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(is_beyond, float("-inf"))[:, None, None, :]
