"""The two attentions of the embedded engine, and its key/value cache: one row per running request, left-aligned.

    row:     0 [k k k k k . . .]     length 5: positions 0..4 hold keys, the rest is garbage that attention masks
             1 [k k k . . . . .]     length 3
             2 [. . . . . . . .]     free
              <---- capacity --->

Rows 0..B-1 are always the running requests, so attention reads contiguous slices without gathering. When a request
leaves, other rows `move` into the gap. The rectangle grows in powers of two and is bounded by `max_total_tokens`.

ContextAttention writes what follows the positions that a row shares with another one, and attends to those and among
itself. TokenAttention writes one position per row and attends to the row's own past; a mask hides what lies beyond a
row's length, in spans of neighbours of like length, so that few are read past their own end:

    row      0  1  2  3  4  5  6  7
    length   9  9  8  9  2  3  2  3    -->  rows 0..3 up to position 9, rows 4..7 up to 3: 48 positions instead of 72
             |_________|  |_________|

Every row grows by one a step, and what a cut saves stays the same: so rows are divided anew only when some have joined,
left or moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from corral.workers.engine.sampling import to_device

_SMALLEST_CAPACITY = 64  # below this, growing costs more copies than it saves memory


def power_of_two_at_least(count: int) -> int:
    return 1 << (count - 1).bit_length()


class KVCache:
    """Keys and values of every layer, each [num_rows, num_kv_heads, capacity, head_dim]."""

    def __init__(self, empty: Tensor, *, num_layers: int, max_rows: int, max_total_tokens: int) -> None:
        """empty: [0, num_kv_heads, 0, head_dim], of the type and on the device that they are to have."""
        _, self._num_kv_heads, _, self._head_dim = empty.shape
        self._max_rows = max_rows
        self._max_total_tokens = max_total_tokens
        self._keys = [empty] * num_layers
        self._values = [empty] * num_layers

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

    def reserve(self, *, num_rows: int, length: int, longest_reserved: int) -> bool:
        """Make room for `num_rows` rows of `length` positions, knowing that none will pass `longest_reserved`.

        Returns:
            Whether the rectangle has become another one: it may have fewer rows than before, or shorter ones.
        """
        if num_rows <= self.num_rows and length <= self.capacity:
            return False
        capacity = min(power_of_two_at_least(max(length, _SMALLEST_CAPACITY)), max(longest_reserved, length))
        affordable_rows = max(self._max_total_tokens // capacity, num_rows)
        wanted_rows = max(power_of_two_at_least(num_rows), self.num_rows)  # those of ended requests may be kept
        self._replace(min(wanted_rows, self._max_rows, affordable_rows), capacity)
        return True

    def release(self) -> None:
        """Give the memory back; only while no row is in use."""
        self._replace(0, 0)

    def _replace(self, rows: int, capacity: int) -> None:
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):  # one by one: the old cache and the new one are never both there
                tensors[layer] = self._resized(old, rows, capacity)

    def _resized(self, old: Tensor, rows: int, capacity: int) -> Tensor:
        # Zeros, not empty: a masked position still enters as 0 * value, and uninitialised memory may hold NaN.
        new = old.new_zeros((rows, self._num_kv_heads, capacity, self._head_dim))
        kept_rows, kept_length = min(rows, old.shape[0]), min(capacity, old.shape[2])
        new[:kept_rows, :, :kept_length] = old[:kept_rows, :, :kept_length]
        return new

    def write(self, layer: int, *, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Fill positions of a row from `start` on; keys and values [1, num_kv_heads, T, head_dim]."""
        stop = start + keys.shape[2]
        self._keys[layer][row, :, start:stop] = keys[0]
        self._values[layer][row, :, start:stop] = values[0]

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

    def copy(self, copies: Sequence[tuple[int, int]], *, length: int) -> None:
        """Copy the first `length` positions of (source, target) rows, all as if at once."""
        if not copies:
            return
        sources, targets = to_device(copies, self.device).unbind(1)
        for cache in (*self._keys, *self._values):
            cache[targets, :, :length] = cache[sources, :, :length]

    def content(self, row: int, *, length: int) -> list[Tensor]:
        """A copy of the first `length` positions of a row, for `fill`."""
        return [cache[row, :, :length].clone() for cache in (*self._keys, *self._values)]

    def fill(self, row: int, content: Sequence[Tensor]) -> None:
        """Write what `content` gave into another row."""
        for cache, kept in zip((*self._keys, *self._values), content, strict=True):
            cache[row, :, : kept.shape[1]] = kept

    def move(self, *, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` over row `target`."""
        for cache in (*self._keys, *self._values):
            cache[target, :, :length] = cache[source, :, :length]


# In a simulation of 512 answers of 16 to 512 tokens in 64 rows, 13 % are read in vain, by 5 calls, moves cost 4 % of
# reading. At 0.9 moves cost more than they save; at 0.0, the last row in every gap, 28 % are read in vain, by 14 calls.
_LEAST_LIKENESS = 0.75


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows start..stop-1, whose lengths go from `shortest` to `longest` positions."""

    start: int
    stop: int
    shortest: int
    longest: int


class RowSpans:
    """Divides the rows of a batch that changes little from step to step."""

    def __init__(self, *, call_cost: int | None) -> None:
        """call_cost: positions that are read in the time that one more call takes; None makes one call of all rows."""
        self._call_cost = call_cost
        self._offsets: list[int] = []
        self._stops: list[int] = []

    @property
    def least_likeness(self) -> float:
        """How like in length a row is to be that takes another's place, see `BatchScheduler`; 0.0 for one call of all
        rows."""
        return 0.0 if self._call_cost is None else _LEAST_LIKENESS

    def of(self, lengths: Sequence[int]) -> list[RowSpan]:
        """Spans that follow each other and hold every row; lengths: at least one."""
        if self._call_cost is None:
            return [RowSpan(0, len(lengths), min(lengths), max(lengths))]
        offsets = [length - lengths[0] for length in lengths]
        if offsets != self._offsets:
            self._offsets, self._stops = offsets, cut_rows(lengths, call_cost=self._call_cost)
        starts = [0, *self._stops[:-1]]
        return [
            RowSpan(start, stop, min(lengths[start:stop]), max(lengths[start:stop]))
            for start, stop in zip(starts, self._stops, strict=True)
        ]


def cut_rows(lengths: Sequence[int], *, call_cost: int) -> list[int]:
    """Ends of the spans that are cheapest, where a span costs `call_cost` and rows x longest.

    By dynamic programming over stretches of equal length, which no cut can gain from: their number squared.
    """
    run_lengths: list[int] = []
    run_stops = [0]
    for length, run in groupby(lengths):
        run_lengths.append(length)
        run_stops.append(run_stops[-1] + sum(1 for _ in run))
    cheapest = [0]  # of the rows before each run
    span_starts: list[int] = []  # where the last span begins that ends with each run
    for end, stop in enumerate(run_stops[1:], start=1):
        longest, costs = 0, []
        for start in range(end - 1, -1, -1):
            longest = max(longest, run_lengths[start])
            costs.append((cheapest[start] + longest * (stop - run_stops[start]), start))
        cost, start = min(costs)
        cheapest.append(cost + call_cost)
        span_starts.append(start)
    stops: list[int] = []
    end = len(run_lengths)
    while end:
        stops.append(run_stops[end])
        end = span_starts[end - 1]
    return stops[::-1]


_CALL_BYTES = 2**18  # what torch's attention reads on a CPU in the 20 us that one more call takes (Xeon, float32)


def call_cost(cache: KVCache) -> int | None:
    """Positions that are read in the time one more call takes; None on a GPU, which reads all rows side by side."""
    return -(-_CALL_BYTES // cache.position_bytes) if cache.device.type == "cpu" else None


class Reach(NamedTuple):
    """What is computed of a row: positions start..stop-1, those before being in the cache."""

    row: int
    start: int
    stop: int


_QUERY_BLOCK = 512  # tokens whose mask over all positions exists at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextAttention:
    """Causal attention of tokens that follow what their rows hold, of one row after the other; their keys and values
    go to the cache."""

    cache: KVCache
    reaches: Sequence[Reach]
    softmax_scale: float

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        sizes = [reach.stop - reach.start for reach in self.reaches]
        # [T, heads, D] -> of each row [1, heads, T, D]
        by_row = [
            [part.transpose(0, 1).unsqueeze(0) for part in torch.split(tensor, sizes)]
            for tensor in (queries, keys, values)
        ]
        outputs = [self._attend(layer, *parts) for parts in zip(self.reaches, *by_row, strict=True)]
        return torch.cat(outputs, dim=2).squeeze(0).transpose(0, 1).reshape(queries.shape[0], -1)

    def _attend(self, layer: int, reach: Reach, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        row, start, stop = reach
        self.cache.write(layer, row=row, start=start, keys=keys, values=values)
        if start == 0:
            return self._attention(queries, keys, values, is_causal=True)
        blocks = []
        for first in range(start, stop, _QUERY_BLOCK):
            end = min(first + _QUERY_BLOCK, stop)
            seen_keys, seen_values = self.cache.read(layer, start=row, stop=row + 1, length=end)
            positions = torch.arange(end, device=queries.device)
            mask = positions <= positions[first:].unsqueeze(-1) if end - first > 1 else None
            block = queries[:, :, first - start : end - start]
            blocks.append(self._attention(block, seen_keys, seen_values, mask=mask))
        return torch.cat(blocks, dim=2)

    def _attention(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=self.softmax_scale, enable_gqa=True
        )


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
