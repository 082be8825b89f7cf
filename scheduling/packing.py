"""Sequence lengths -> micro-batches that fit a token budget, and what sequences cost.

pack_first_fit_decreasing   memory: no micro-batch holds more than max_tokens
forward_flops               time: with attention's quadratic share
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul

from pydantic import Field

from corral.scheduling.frozen import FrozenModel


class MicroBatchSpec(FrozenModel):
    """How one call's sequences are split into micro-batches."""

    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Most tokens in one micro-batch; None puts all of them into `n_min` micro-batches."""
    n_min: int = Field(default=1, ge=1)
    """Fewest micro-batches, as far as there are sequences (a pipeline needs at least its number of stages)."""
    shares_prompts: bool = False
    """Whether a micro-batch has once what answers of one prompt begin with, where backend and model can do that."""


def pack_first_fit_decreasing(lengths: Sequence[int], *, max_tokens: int, min_bins: int = 1) -> list[list[int]]:
    """Pack sequences into bins of at most `max_tokens` (first fit decreasing: 11/9 of the fewest bins, plus 6/9).

    Example:
        pack_first_fit_decreasing([5, 3, 4, 2], max_tokens=7)    # [[0, 3], [2, 1]]

    Where fewer than `min_bins` bins would do, the sequences are spread evenly over `min_bins`. Bins are never empty, so
    that there are at most `len(lengths)` of them.

    Returns:
        Indices into `lengths`, each exactly once; longest first within a bin.

    Raises:
        ValueError: if one sequence alone is longer than `max_tokens`.
    """
    if max_tokens < 1 or min_bins < 1:
        raise ValueError(
            f"max_tokens and min_bins must be at least 1, got max_tokens={max_tokens}, min_bins={min_bins}"
        )
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"sequence {index} has the negative length {length}")
        if length > max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens but a micro-batch holds at most {max_tokens}; "
                f"raise max_tokens_per_micro_batch to at least {max(lengths)} or shorten the sequences"
            )
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    bins = _first_fit(longest_first, lengths, max_tokens=max_tokens)
    if len(bins) >= min(min_bins, len(lengths)):
        return bins
    spread: list[list[int]] = [[] for _ in range(min(min_bins, len(lengths)))]
    fill_lightest(spread, longest_first, lengths, limit=max_tokens)
    return spread


def _first_fit(order: Sequence[int], lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Each into the first bin that has room for it, or into another new one."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for index in order:
        number = next((number for number, room in enumerate(rooms) if room >= lengths[index]), len(bins))
        if number == len(bins):
            bins.append([])
            rooms.append(max_tokens)
        bins[number].append(index)
        rooms[number] -= lengths[index]
    return bins


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The sizes of a decoder that decide how much work a sequence is."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_key_value_heads: int
    """Fewer than `num_heads` with grouped-query attention."""
    head_dim: int

    @property
    def query_size(self) -> int:
        """Mostly, but not always, the hidden size."""
        return self.num_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        return self.num_key_value_heads * self.head_dim


# Balancing needs only the ratio of linear to quadratic work: where the true shape is unknown, that of a 7-billion model
TYPICAL_SHAPE = TransformerShape(
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    vocab_size=152064,
    num_heads=28,
    num_key_value_heads=4,
    head_dim=128,
)


def forward_flops(groups: Iterable[Sequence[int]], shapes: Sequence[TransformerShape]) -> list[float]:
    """Floating-point operations that each group of sequences takes in one forward pass of each of these models.

    Per layer and token: 4 * hidden * (attention + key_value) for the projections of queries and outputs, keys and
    values, 6 * hidden * intermediate for the gated MLP, and 2 * length * attention for attention (the unmasked half).

    Args:
        groups: lengths in tokens.
        shapes: a model that is trained counts three times.
    """
    per_token = per_square = 0
    for shape in shapes:
        projections = 4 * shape.hidden_size * (shape.query_size + shape.key_value_size)
        mlp = 6 * shape.hidden_size * shape.intermediate_size
        per_token += shape.num_layers * (projections + mlp) + 2 * shape.hidden_size * shape.vocab_size
        per_square += shape.num_layers * 2 * shape.query_size
    return [float(per_token * sum(group) + per_square * sum(map(mul, group, group))) for group in groups]


def load_of(part: Sequence[int], costs: Sequence[float]) -> float:
    """The cost of a part."""
    return sum(map(costs.__getitem__, part))


def fill_lightest(
    parts: list[list[int]], items: Iterable[int], costs: Sequence[float], *, limit: float = math.inf
) -> None:
    """Add items to the parts, the costliest first, each to the lightest part; above the limit to another new part."""
    lightest = [(load_of(part, costs), len(part), number) for number, part in enumerate(parts)]
    heapq.heapify(lightest)
    for index in sorted(items, key=lambda index: (-costs[index], index)):
        load, count, number = lightest[0]
        if load + costs[index] > limit:
            number = len(parts)
            parts.append([])
            heapq.heappush(lightest, (costs[index], 1, number))
        else:
            heapq.heapreplace(lightest, (load + costs[index], count + 1, number))
        parts[number].append(index)
