"""Key/value cache of the embedded engine: one row per running request, left-aligned.

    row:     0 [k k k k k . . .]     length 5: positions 0..4 hold keys, the rest is garbage that attention masks
             1 [k k k . . . . .]     length 3
             2 [. . . . . . . .]     free
              <---- capacity --->

Rows 0..B-1 are always the running requests, so attention reads contiguous slices without gathering. When a request
leaves, other rows `move` into the gap. The rectangle grows in powers of two and is bounded by `max_total_tokens`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST_CAPACITY = 64  # below this, growing costs more copies than it saves memory


def power_of_two_at_least(count: int) -> int:
    return 1 << (count - 1).bit_length()


class KVCache:
    """Keys and values of every layer, each [num_rows, num_kv_heads, capacity, head_dim]."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_total_tokens: int,
    ) -> None:
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._max_rows = max_rows
        self._max_total_tokens = max_total_tokens
        empty = torch.empty((0, num_kv_heads, 0, head_dim), dtype=dtype, device=device)
        self._keys = [empty] * num_layers
        self._values = [empty] * num_layers
        self.num_replacements = 0
        """How often other tensors have taken the place of these."""

    @property
    def num_rows(self) -> int:
        return int(self._keys[0].shape[0])

    @property
    def capacity(self) -> int:
        """Positions per row."""
        return int(self._keys[0].shape[2])

    @property
    def device(self) -> torch.device:
        return self._keys[0].device

    @property
    def position_bytes(self) -> int:
        """Key and value of one position, in one layer."""
        return 2 * self._num_kv_heads * self._head_dim * self._keys[0].element_size()

    def reserve(self, *, num_rows: int, length: int, longest_reserved: int) -> None:
        """Make room for `num_rows` rows of `length` positions, knowing that none will pass `longest_reserved`."""
        if num_rows <= self.num_rows and length <= self.capacity:
            return
        capacity = min(power_of_two_at_least(max(length, _SMALLEST_CAPACITY)), max(longest_reserved, length))
        affordable_rows = max(self._max_total_tokens // capacity, num_rows)
        self._replace(min(power_of_two_at_least(num_rows), self._max_rows, affordable_rows), capacity)

    def release(self) -> None:
        """Give the memory back; only while no row is in use."""
        self._replace(0, 0)

    def _replace(self, rows: int, capacity: int) -> None:
        self._keys = [self._resized(old, rows, capacity) for old in self._keys]
        self._values = [self._resized(old, rows, capacity) for old in self._values]
        self.num_replacements += 1

    def _resized(self, old: Tensor, rows: int, capacity: int) -> Tensor:
        # Zeros, not empty: a masked position still enters as 0 * value, and uninitialised memory may hold NaN.
        new = old.new_zeros((rows, self._num_kv_heads, capacity, self._head_dim))
        kept_rows, kept_length = min(rows, old.shape[0]), min(capacity, old.shape[2])
        new[:kept_rows, :, :kept_length] = old[:kept_rows, :, :kept_length]
        return new

    def write_prompts(self, layer: int, *, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Fill positions 0..T-1 of `rows` [N] int64 from keys and values [N, num_kv_heads, T, head_dim]."""
        self._keys[layer][rows, :, : keys.shape[2]] = keys
        self._values[layer][rows, :, : keys.shape[2]] = values

    def token_slots(self, positions: Tensor) -> Tensor:
        """[B, num_kv_heads] flat slots of position `positions[b]` in row b, the same for every layer."""
        num_rows, capacity = positions.shape[0], self.capacity
        heads = torch.arange(0, num_rows * self._num_kv_heads * capacity, capacity, device=positions.device)
        return heads.view(num_rows, -1) + positions.unsqueeze(-1)

    def write_tokens(self, layer: int, *, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write one position per row; keys and values [B, num_kv_heads, head_dim], slots from `token_slots`."""
        for cache, new in ((self._keys[layer], keys), (self._values[layer], values)):
            cache.view(-1, self._head_dim).index_put_((slots,), new)

    def read(self, layer: int, *, start: int, stop: int, length: int) -> tuple[Tensor, Tensor]:
        """Views (keys, values) of rows start..stop-1, each [stop - start, num_kv_heads, length, head_dim]."""
        return self._keys[layer][start:stop, :, :length], self._values[layer][start:stop, :, :length]

    def clear(self, row: int) -> None:
        """Zero a row that may hold NaN, which would outlast its request: see `_resized`."""
        for cache in (*self._keys, *self._values):
            cache[row].zero_()

    def move(self, *, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` over row `target`."""
        for cache in (*self._keys, *self._values):
            cache[target, :, :length] = cache[source, :, :length]
