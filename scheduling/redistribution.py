"""Who has which sequences, and who needs them -> direct transfers.

    locations  {"0:a": {"input_ids": {0}, "rewards": {0}}, "0:b": {"input_ids": {1}, "rewards": {1}}}
    wanted     [Demand(ranks=(2, 3), uids=("0:a", "0:b"), keys=("input_ids", "rewards"))]
        │
        ▼ plan_redistribution
    Parcel(tag=0, source=0, destinations=(2, 3), uids=("0:a",), keys=("input_ids", "rewards"))
    Parcel(tag=1, source=1, destinations=(2, 3), uids=("0:b",), keys=("input_ids", "rewards"))

There is no root: every parcel goes from a rank that owns the data to the ranks that need it. Between hosts a parcel has
one destination, which passes it on to the others of its host:

    rank 0 on host A ──Parcel(source=0, destinations=(2,))──► rank 2 on host B
                              rank 2 ──Parcel(source=2, destinations=(3, 4), is_passed_on=True)──► 3, 4 on host B
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
class Parcel:
    """One message: `source` sends all of `keys` of all of `uids` to each of the destinations."""

    tag: int
    """Its number: sender and receivers know it by that."""
    source: int
    destinations: tuple[int, ...]
    """Ranks of one host, ascending."""
    uids: tuple[str, ...]
    """Samples, ascending."""
    keys: tuple[str, ...]
    """Ascending."""
    is_passed_on: bool = False
    """Whether the source gets all of this by other parcels of the same plan."""


class _Route(NamedTuple):
    """A way that parcels go."""

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
) -> list[Parcel]:
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
        first_tag: parcels are numbered from here.

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
    return [
        Parcel(
            tag=tag,
            source=route.source,
            destinations=route.destinations,
            uids=uids,
            keys=keys,
            is_passed_on=route.is_passed_on,
        )
        for tag, (route, keys, uids) in enumerate(routes.contents(), start=first_tag)
    ]


class _Routes:
    """What goes which way, as far as it is decided."""

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

    def contents(self) -> Iterator[tuple[_Route, tuple[str, ...], tuple[str, ...]]]:
        """Each way, keys, and the samples of which exactly these keys go there; in order."""
        for route in sorted(self._keys):
            uids_by_keys: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
            for uid, keys in sorted(self._keys[route].items()):
                uids_by_keys[tuple(sorted(keys))].append(uid)
            for keys_of_all, uids in sorted(uids_by_keys.items()):
                yield route, keys_of_all, tuple(uids)

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
        if self._host_by_rank is None or len(ranks) == 1:
            return {self._host(ranks[0]): ranks}
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
    """Who wants each key of one sample, ascending and each once."""
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
