"""Sequence lengths -> micro-batches that fit a token budget, and parts that cost the same.

pack_first_fit_decreasing   memory: no micro-batch holds more than max_tokens
balanced_partition          time: data-parallel ranks get equal work; forward_flops counts attention's quadratic share
partition_near_owners       time and traffic: as good as equal work, and what need not move stays where it is
"""

import bisect
import heapq
import math
from collections import defaultdict
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
    _fill(spread, longest_first, lengths, limit=max_tokens)
    return spread


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The sizes of a decoder that decide how much work a sequence is."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    attention_size: int
    """Attention heads x size of a head; mostly, but not always, the hidden size."""
    key_value_size: int
    """Key/value heads x size of a head; less than `attention_size` with grouped-query attention."""


# Balancing needs only the ratio of linear to quadratic work: where the true shape is unknown, that of a 7-billion model
TYPICAL_SHAPE = TransformerShape(
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    vocab_size=152064,
    attention_size=3584,
    key_value_size=512,
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
        projections = 4 * shape.hidden_size * (shape.attention_size + shape.key_value_size)
        mlp = 6 * shape.hidden_size * shape.intermediate_size
        per_token += shape.num_layers * (projections + mlp) + 2 * shape.hidden_size * shape.vocab_size
        per_square += shape.num_layers * 2 * shape.attention_size
    return [float(per_token * sum(group) + per_square * sum(map(mul, group, group))) for group in groups]


def balanced_partition(costs: Sequence[float], *, num_parts: int) -> list[list[int]]:
    """Split items, such as groups of sequences, into `num_parts` parts of nearly equal cost.

    Example:
        balanced_partition([8, 7, 6, 5, 4], num_parts=2)    # [[2, 3, 4], [0, 1]]

    Returns:
        `num_parts` ascending lists of indices into `costs`, each index exactly once; none is empty if there are at
        least as many items as parts. The same input gives the same parts on every rank.
    """
    _check(costs, num_parts=num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    _fill(parts, range(len(costs)), costs)
    _refine(parts, costs, num_exchanges=_MAX_REFINEMENTS)
    return [sorted(part) for part in parts]


def partition_near_owners(
    costs: Sequence[float], owners: Sequence[int | None], *, num_parts: int, max_over_mean: float = 1.05
) -> list[list[int]]:
    """Split items such that each stays in the part that owns it, but for what the balance of the parts takes.

    The heaviest part costs at most `max_over_mean` times the mean where the items allow it, and little is moved for
    that: a part that is too heavy gives away no more than its excess, as far as its items add up to that.

    Example:
        partition_near_owners([5, 5, 1, 5, 4], [0, 0, 0, 1, 1], num_parts=2)    # [[0, 1], [2, 3, 4]]

    Args:
        costs: of each item.
        owners: the part that holds each item; None for an item that no part holds.

    Returns:
        As `balanced_partition`.
    """
    _check(costs, num_parts=num_parts)
    if len(owners) != len(costs):
        raise ValueError(f"{len(costs)} items need as many owners, got {len(owners)}")
    limit = max_over_mean * sum(costs) / num_parts
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    homeless = [index for index, owner in enumerate(owners) if owner is None]
    for index, owner in enumerate(owners):
        if owner is not None:
            parts[owner].append(index)
    for part in parts:
        homeless += _take_excess(part, costs, limit=limit)
    _fill(parts, homeless, costs)
    _fill_empty(parts, costs)
    _refine(parts, costs, num_exchanges=_MAX_REFINEMENTS + 2 * num_parts, enough=limit)
    if _heaviest(parts, costs) > limit:
        dealt_anew = balanced_partition(costs, num_parts=num_parts)
        if _heaviest(dealt_anew, costs) < _heaviest(parts, costs):
            parts = _near_owners(dealt_anew, costs, owners)
    return [sorted(part) for part in parts]


def _check(costs: Sequence[float], *, num_parts: int) -> None:
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    for index, cost in enumerate(costs):
        if not cost >= 0:
            raise ValueError(f"item {index} has the cost {cost}; costs must be 0 or more")


def _load(part: Sequence[int], costs: Sequence[float]) -> float:
    return sum(map(costs.__getitem__, part))


def _heaviest(parts: Sequence[Sequence[int]], costs: Sequence[float]) -> float:
    return max(_load(part, costs) for part in parts)


def _fill(parts: list[list[int]], items: Iterable[int], costs: Sequence[float], *, limit: float = math.inf) -> None:
    """Add items to the parts, the costliest first, each to the lightest part; above the limit to another new part."""
    lightest = [(_load(part, costs), len(part), number) for number, part in enumerate(parts)]
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


def _take_excess(part: list[int], costs: Sequence[float], *, limit: float) -> list[int]:
    """Take items out of an ascending part until it is not above the limit; they cost little more than they have to."""
    excess = _load(part, costs) - limit
    kept: list[int] = []
    taken: list[int] = []
    for index in sorted(part, key=costs.__getitem__, reverse=True):  # of items that cost the same, the first one first
        if costs[index] <= min(excess, limit):  # what is above the limit alone would be so anywhere
            taken.append(index)
            excess -= costs[index]
        else:
            kept.append(index)
    if excess > 0 and len(kept) > 1 and costs[kept[-1]] <= limit:
        taken.append(kept.pop())  # the cheapest of those that make up for the rest
    part[:] = kept
    return taken


def _fill_empty(parts: list[list[int]], costs: Sequence[float]) -> None:
    """Give each part an item, as far as there are any: a rank without work would still have to wait for the others."""
    for part in parts:
        if not part:
            donor = max(
                (other for other in parts if len(other) > 1), key=lambda other: _load(other, costs), default=part
            )
            if donor is not part:
                smallest = min(donor, key=lambda index: (costs[index], index))
                donor.remove(smallest)
                part.append(smallest)


def _near_owners(parts: Sequence[list[int]], costs: Sequence[float], owners: Sequence[int | None]) -> list[list[int]]:
    """The same parts in the order in which the most stays with its owner, as far as taking the best first finds it."""
    stays: defaultdict[tuple[int, int], float] = defaultdict(float)
    for number, part in enumerate(parts):
        for index in part:
            owner = owners[index]
            if owner is not None:
                stays[number, owner] += costs[index]
    place_by_part: dict[int, int] = {}
    used: set[int] = set()
    for number, owner in sorted(stays, key=lambda pair: (-stays[pair], pair)):
        if number not in place_by_part and owner not in used:
            place_by_part[number] = owner
            used.add(owner)
    free = iter(sorted(set(range(len(parts))) - used))
    placed: list[list[int]] = [[] for _ in parts]
    for number, part in enumerate(parts):
        placed[place_by_part[number] if number in place_by_part else next(free)] = part
    return placed


_MAX_REFINEMENTS = 64  # each one lowers the heaviest part; the first few bring nearly all of the gain
_NOTHING = -1  # in place of an item's index: the exchange is a plain move


def _refine(parts: list[list[int]], costs: Sequence[float], *, num_exchanges: int, enough: float = 0.0) -> None:
    """Move or exchange items between the heaviest and the lightest part while that lowers the heaviest.

    Args:
        num_exchanges: at most.
        enough: what the heaviest part may cost; then nothing more is moved.
    """
    loads = [_load(part, costs) for part in parts]
    for _ in range(num_exchanges):
        heavy = max(range(len(parts)), key=lambda number: (loads[number], -number))
        if loads[heavy] <= enough:
            return
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
            loads[number] = _load(parts[number], costs)


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
