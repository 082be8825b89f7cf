"""Sequence lengths -> micro-batches that fit a token budget, and parts that cost the same.

pack_first_fit_decreasing   memory: no micro-batch holds more than max_tokens
balanced_partition          time: data-parallel ranks get equal work; sequence_flops counts attention's quadratic share
"""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from corral.scheduling.frozen import FrozenModel


class MicroBatchSpec(FrozenModel):
    """How one call's sequences are split into micro-batches."""

    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Most tokens in one micro-batch; None puts all of them into `n_min` micro-batches."""
    n_min: int = Field(default=1, ge=1)
    """Fewest micro-batches, as far as there are sequences (a pipeline needs at least its number of stages)."""


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
    return _spread(longest_first, lengths, max_tokens=max_tokens, num_bins=min(min_bins, len(lengths)))


def _first_fit(order: Sequence[int], lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """First fit in O(n log n): a tree over bins, in which every node knows the most room below it."""
    num_leaves = 1
    while num_leaves < len(order):
        num_leaves *= 2
    room = [max_tokens] * (2 * num_leaves)
    bins: list[list[int]] = []
    for index in order:
        node = 1
        while node < num_leaves:
            node = 2 * node if room[2 * node] >= lengths[index] else 2 * node + 1
        leaf = node - num_leaves
        if leaf == len(bins):
            bins.append([])
        bins[leaf].append(index)
        room[node] -= lengths[index]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def _spread(order: Sequence[int], lengths: Sequence[int], *, max_tokens: int, num_bins: int) -> list[list[int]]:
    """Each sequence goes to the least filled bin; one that fits nowhere opens another bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    least_filled = [(0, 0, number) for number in range(num_bins)]  # tokens, sequences, bin
    for index in order:
        tokens, count, number = least_filled[0]
        if tokens + lengths[index] > max_tokens:
            number, tokens, count = len(bins), 0, 0
            bins.append([])
            heapq.heappush(least_filled, (tokens + lengths[index], count + 1, number))
        else:
            heapq.heapreplace(least_filled, (tokens + lengths[index], count + 1, number))
        bins[number].append(index)
    return bins


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The sizes of a decoder that decide how much work a sequence is."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    key_value_share: float = 1.0
    """Key/value heads per attention head: 1 without grouped-query attention."""


# Balancing needs only the ratio of linear to quadratic work: where the true shape is unknown, that of a 7-billion model
TYPICAL_SHAPE = TransformerShape(
    num_layers=28, hidden_size=3584, intermediate_size=18944, vocab_size=152064, key_value_share=1 / 7
)


def sequence_flops(length: int, *, shape: TransformerShape = TYPICAL_SHAPE) -> float:
    """Floating-point operations of one forward pass over a sequence of `length` tokens (causal; training is 3x).

    Per layer and token: 2 * (2 + 2 * key_value_share) * hidden^2 for the projections of queries, outputs, keys and
    values, 6 * hidden * intermediate for the gated MLP, and 2 * length * hidden for attention (the unmasked half).
    """
    hidden = shape.hidden_size
    linear = 4 * (1 + shape.key_value_share) * hidden**2 + 6 * hidden * shape.intermediate_size
    per_layer = length * linear + 2 * length**2 * hidden
    return float(shape.num_layers * per_layer + 2 * length * hidden * shape.vocab_size)


def balanced_partition(costs: Sequence[float], *, num_parts: int) -> list[list[int]]:
    """Split items, such as groups of sequences, into `num_parts` parts of nearly equal cost.

    Example:
        balanced_partition([8, 7, 6, 5, 4], num_parts=2)    # [[2, 3, 4], [0, 1]]

    Returns:
        `num_parts` ascending lists of indices into `costs`, each index exactly once; none is empty if there are at
        least as many items as parts. The same input gives the same parts on every rank.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    for index, cost in enumerate(costs):
        if not cost >= 0:
            raise ValueError(f"item {index} has the cost {cost}; costs must be 0 or more")
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    lightest = [(0.0, 0, number) for number in range(num_parts)]  # cost, items, part
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, count, number = lightest[0]
        parts[number].append(index)
        heapq.heapreplace(lightest, (load + costs[index], count + 1, number))
    _refine(parts, costs)
    return [sorted(part) for part in parts]


_MAX_REFINEMENTS = 64  # each one lowers the heaviest part; the first few bring nearly all of the gain
_NOTHING = -1  # in place of an item's index: the exchange is a plain move


def _refine(parts: list[list[int]], costs: Sequence[float]) -> None:
    """Move or exchange items between the heaviest and the lightest part while that lowers the heaviest."""
    loads = [sum(costs[index] for index in part) for part in parts]
    for _ in range(_MAX_REFINEMENTS):
        heavy = max(range(len(parts)), key=lambda number: (loads[number], -number))
        light = min(range(len(parts)), key=lambda number: (loads[number], number))
        exchange = _best_exchange(parts[heavy], parts[light], costs, gap=loads[heavy] - loads[light])
        if exchange is None:
            return
        given, taken = exchange
        parts[heavy].remove(given)
        parts[light].append(given)
        if taken is not None:
            parts[light].remove(taken)
            parts[heavy].append(taken)
        for number in (heavy, light):
            loads[number] = sum(costs[index] for index in parts[number])


def _best_exchange(
    heavy: Sequence[int], light: Sequence[int], costs: Sequence[float], *, gap: float
) -> tuple[int, int | None] | None:
    """What the heavy part gives and takes so that their difference shrinks most; None if nothing shrinks it clearly."""
    best: tuple[int, int | None] | None = None
    best_gap = gap * (1 - 1e-9)  # rounding must not keep the refinement going
    # Giving away the only item for nothing never wins: the difference would not shrink, so that no part becomes empty.
    offers: list[tuple[float, int]] = [(0.0, _NOTHING), *sorted((costs[index], index) for index in light)]
    for given in sorted(heavy):
        position = bisect.bisect(offers, (costs[given] - gap / 2, _NOTHING))
        for offered, taken in offers[max(0, position - 1) : position + 1]:
            new_gap = abs(gap - 2 * (costs[given] - offered))
            if new_gap < best_gap:
                best, best_gap = (given, None if taken == _NOTHING else taken), new_gap
    return best
