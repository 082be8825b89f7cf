"""The ranks that compute on sequences, those that hold them, and those that need them -> direct transfers.

balanced_partition          time: data-parallel ranks get equal work
partition_near_owners       time and traffic: as good as equal work, and what need not move stays where it is

    locations  {"0:a": {"input_ids": {0}, "rewards": {0}}, "0:b": {"input_ids": {1}, "rewards": {1}}}
    wanted     [Demand(ranks=(2, 3), uids=("0:a", "0:b"), keys=("input_ids", "rewards"))]
        │
        ▼ plan_redistribution
    Transfer(tag=0, source=0, destinations=(2, 3), uids=("0:a",), keys=("input_ids", "rewards"))
    Transfer(tag=1, source=1, destinations=(2, 3), uids=("0:b",), keys=("input_ids", "rewards"))

There is no root: every transfer goes from a rank that owns the data to the ranks that need it. Between hosts a transfer
has one destination, which passes it on to the other ranks of its host:

    rank 0 on host A ──Transfer(source=0, destinations=(2,))──► rank 2 on host B
                              rank 2 ──Transfer(source=2, destinations=(3, 4), is_passed_on=True)──► 3, 4 on host B
"""

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from corral.scheduling.packing import fill_lightest, load_of

Locations = Mapping[str, Mapping[str, frozenset[int]]]
"""uid -> key -> ranks that hold it."""
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Each of these ranks must hold all of these keys of all of these samples."""

    ranks: tuple[int, ...]
    uids: Sequence[str]
    keys: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One message: `source` sends all of `keys` of all of `uids` to each of the destinations."""

    tag: int
    """Its number, by which sender and receivers know it."""
    source: int
    destinations: tuple[int, ...]
    """Ranks of one host, ascending."""
    uids: tuple[str, ...]
    """Samples, ascending."""
    keys: tuple[str, ...]
    """Ascending."""
    is_passed_on: bool = False
    """Whether the source receives all of this by other transfers of the same plan."""


class _Route(NamedTuple):
    """Source and destinations of transfers."""

    is_passed_on: bool
    source: int
    destinations: tuple[int, ...]


class _Bundle(NamedTuple):
    """Ranks that hold some keys of a sample, and ranks that lack them; both ascending."""

    holders: tuple[int, ...]
    destinations: tuple[int, ...]


def plan_redistribution(
    locations: Locations,
    wanted: Sequence[Demand],
    *,
    size_bytes: Callable[[str, Sequence[str]], int],
    host_by_rank: Mapping[int, str] | None = None,
    first_tag: int = 0,
) -> list[Transfer]:
    """Plan direct transfers after which every rank holds what it wants.

    Each key of each sample reaches each rank that wants it exactly once, and never one that has it; it comes to each
    host that lacks it once. A holder on the destination's host sends it if there is one. Among several, one that sends
    other keys of the sample the same way is taken, so that they come in one message, and then the one that has least to
    send.

    Args:
        locations: of every sample that is wanted.
        wanted: what ranks must hold afterwards; a rank may be in several demands.
        size_bytes: what some keys of a sample weigh, by which the sources' loads are compared.
        host_by_rank: where each of these ranks is; None if all are on one host.
        first_tag: the tag of the first transfer; the others follow.

    Raises:
        ValueError: if nobody has something that is wanted.
    """
    routes = _Routes(host_by_rank)
    moves = [
        (size_bytes(uid, keys), uid, bundle, keys)
        for uid, bundles in _bundles_by_uid(locations, wanted)
        for bundle, keys in bundles.items()
    ]
    # What few hold leaves no choice, and the keys that many hold follow it; of these the largest come first, since the
    # small ones then even out what the large ones left uneven.
    moves.sort(key=lambda move: (len(move[2].holders), -move[0], move[1], move[2]))
    for size, uid, bundle, keys in moves:
        routes.send(uid, keys, bundle, size_bytes=size)
    return routes.transfers(first_tag=first_tag)


class _Routes:
    """The routes of keys, as far as they are decided."""

    def __init__(self, host_by_rank: Mapping[int, str] | None) -> None:
        self._host_by_rank = host_by_rank
        self._bytes_sent: defaultdict[int, int] = defaultdict(int)
        self._keys: defaultdict[_Route, dict[str, list[str]]] = defaultdict(dict)

    def send(self, uid: str, keys: Sequence[str], bundle: _Bundle, *, size_bytes: int) -> None:
        """Decide who sends these keys of a sample to the bundle's destinations, host by host."""
        for host, ranks in self._by_host(bundle.destinations).items():
            local = tuple(rank for rank in bundle.holders if self._host(rank) == host)
            first = ranks if local else ranks[:1]
            source = self._choose(uid, local or bundle.holders, first)
            self._bytes_sent[source] += size_bytes
            self._add(_Route(False, source, first), uid, keys)
            if len(first) < len(ranks):
                self._add(_Route(True, ranks[0], ranks[1:]), uid, keys)

    def transfers(self, *, first_tag: int) -> list[Transfer]:
        """Of each way, one for all samples of which exactly the same keys go there; in order."""
        transfers: list[Transfer] = []
        for route in sorted(self._keys):
            uids_by_keys: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
            for uid, keys in sorted(self._keys[route].items()):
                uids_by_keys[tuple(sorted(keys))].append(uid)
            for keys_of_all, uids in sorted(uids_by_keys.items()):
                tag = first_tag + len(transfers)
                transfers.append(Transfer(**route._asdict(), tag=tag, uids=tuple(uids), keys=keys_of_all))
        return transfers

    def _choose(self, uid: str, holders: tuple[int, ...], destinations: tuple[int, ...]) -> int:
        if len(holders) == 1:
            return holders[0]

        def reluctance(rank: int) -> tuple[bool, int, int]:
            sends_other_keys = uid in self._keys.get(_Route(False, rank, destinations), ())
            return not sends_other_keys, self._bytes_sent[rank], rank

        return min(holders, key=reluctance)

    def _add(self, route: _Route, uid: str, keys: Sequence[str]) -> None:
        self._keys[route].setdefault(uid, []).extend(keys)

    def _by_host(self, ranks: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        ranks_by_host: defaultdict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            ranks_by_host[self._host(rank)].append(rank)
        return {host: tuple(of_host) for host, of_host in ranks_by_host.items()}

    def _host(self, rank: int) -> str:
        return "" if self._host_by_rank is None else self._host_by_rank[rank]


def _bundles_by_uid(locations: Locations, wanted: Sequence[Demand]) -> Iterator[tuple[str, dict[_Bundle, list[str]]]]:
    """The keys of each sample that must move, by who has and who lacks them."""
    demands_by_uid: defaultdict[str, list[Demand]] = defaultdict(list)
    for demand in wanted:
        for uid in demand.uids:
            demands_by_uid[uid].append(demand)
    unknown: list[tuple[str, str, tuple[int, ...]]] = []
    for uid, demands in demands_by_uid.items():
        of_sample = locations.get(uid, {})
        bundles: dict[_Bundle, list[str]] = {}
        bundle, known = _Bundle((), ()), None
        for key, ranks in _ranks_by_key(demands).items():
            holders = of_sample.get(key)
            if not holders:
                unknown.append((uid, key, ranks))
                continue
            if (holders, ranks) != known:  # mostly all keys of a sample are in the same place and go the same way
                known = (holders, ranks)
                bundle = _Bundle(tuple(sorted(holders)), tuple(rank for rank in ranks if rank not in holders))
            if bundle.destinations:
                bundles.setdefault(bundle, []).append(key)
        yield uid, bundles
    if unknown:
        raise ValueError(_not_held(sorted(unknown)))


def _ranks_by_key(demands: Sequence[Demand]) -> dict[str, tuple[int, ...]]:
    """The ranks that want each key of one sample, ascending and each once."""
    if len(demands) == 1:
        return dict.fromkeys(demands[0].keys, tuple(sorted(demands[0].ranks)))
    ranks: defaultdict[str, set[int]] = defaultdict(set)
    for demand in demands:
        for key in demand.keys:
            ranks[key].update(demand.ranks)
    return {key: tuple(sorted(of_key)) for key, of_key in ranks.items()}


def _not_held(unknown: Sequence[tuple[str, str, tuple[int, ...]]]) -> str:
    shown = ", ".join(f"{key!r} of {uid!r} (for ranks {list(ranks)})" for uid, key, ranks in unknown[:_MAX_SHOWN])
    more = f" and {len(unknown) - _MAX_SHOWN} more" if len(unknown) > _MAX_SHOWN else ""
    return (
        f"no rank holds {shown}{more}; the call that produces it must run before this one, "
        "or the worker that held it was lost and the sample must be issued again"
    )


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
    fill_lightest(parts, range(len(costs)), costs)
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
    fill_lightest(parts, homeless, costs)
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


def _heaviest(parts: Sequence[Sequence[int]], costs: Sequence[float]) -> float:
    return max(load_of(part, costs) for part in parts)


def _take_excess(part: list[int], costs: Sequence[float], *, limit: float) -> list[int]:
    """Take items out of an ascending part until it is not above the limit; they cost little more than they have to."""
    excess = load_of(part, costs) - limit
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
                (other for other in parts if len(other) > 1), key=lambda other: load_of(other, costs), default=part
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
    owner_by_part: dict[int, int] = {}
    used: set[int] = set()
    for number, owner in sorted(stays, key=lambda pair: (-stays[pair], pair)):
        if number not in owner_by_part and owner not in used:
            owner_by_part[number] = owner
            used.add(owner)
    free = iter(sorted(set(range(len(parts))) - used))
    placed: list[list[int]] = [[] for _ in parts]
    for number, part in enumerate(parts):
        placed[owner_by_part[number] if number in owner_by_part else next(free)] = part
    return placed


_MAX_REFINEMENTS = 64  # each one lowers the heaviest part; the first few bring nearly all of the gain
_NOTHING = -1  # in place of an item's index: the exchange is a plain move


def _refine(parts: list[list[int]], costs: Sequence[float], *, num_exchanges: int, enough: float = 0.0) -> None:
    """Move or exchange items between the heaviest and the lightest part while that lowers the heaviest.

    Args:
        num_exchanges: at most.
        enough: what the heaviest part may cost; then nothing more is moved.
    """
    loads = [load_of(part, costs) for part in parts]
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
            loads[number] = load_of(parts[number], costs)


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
