"""Who has which sequences, and who needs them -> direct transfers.

    locations  {("0:a", "input_ids"): {0}, ("0:b", "input_ids"): {1}}
    wanted     {2: {("0:a", "input_ids"), ("0:b", "input_ids")}}
        │
        ▼ plan_redistribution
    Transfer("input_ids", source=0, destinations=(2,), uids=("0:a",))
    Transfer("input_ids", source=1, destinations=(2,), uids=("0:b",))

There is no root: every transfer goes from a rank that owns the data to the ranks that need it.
"""

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

UidKey = tuple[str, str]
"""One key of one sample: (uid, key)."""

_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Transfer:
    """`source` sends one key of these samples to each of the destinations, packed in the order of `uids`."""

    key: str
    source: int
    destinations: tuple[int, ...]
    """Ranks, ascending."""
    uids: tuple[str, ...]
    """Samples, ascending."""


def plan_redistribution(
    locations: Mapping[UidKey, Set[int]],
    wanted: Mapping[int, Set[UidKey]],
    *,
    sizes: Mapping[UidKey, int] | None = None,
) -> list[Transfer]:
    """Plan direct transfers after which every rank holds what it wants.

    Each (uid, key) reaches each rank that wants it exactly once, and never one that has it. Where several ranks have a
    sample, the one that has least to send so far sends it. Every rank computes the same plan, in the same order.

    Args:
        locations: ranks that hold a (uid, key).
        wanted: what each rank must hold afterwards.
        sizes: bytes of a (uid, key), by which the sources' loads are compared; all count the same if it is not given.

    Raises:
        ValueError: if nobody has something that is wanted.
    """
    destinations = _missing_by_destination(locations, wanted)
    bytes_sent: dict[int, int] = defaultdict(int)
    uids: dict[tuple[str, int, tuple[int, ...]], list[str]] = defaultdict(list)
    # The largest first: the small ones then even out what the large ones left uneven.
    for size, (uid, key) in sorted((-(sizes[item] if sizes else 1), item) for item in destinations):
        ranks = destinations[uid, key]
        source = min(locations[uid, key], key=lambda rank: (bytes_sent[rank], rank))
        bytes_sent[source] += -size * len(ranks)
        uids[key, source, ranks].append(uid)
    return sorted(
        Transfer(key=key, source=source, destinations=ranks, uids=tuple(sorted(moved)))
        for (key, source, ranks), moved in uids.items()
    )


def _missing_by_destination(
    locations: Mapping[UidKey, Set[int]], wanted: Mapping[int, Set[UidKey]]
) -> dict[UidKey, tuple[int, ...]]:
    """The ranks that want an item and lack it, ascending, for every item that must move."""
    ranks_by_item: dict[UidKey, list[int]] = defaultdict(list)
    for rank in sorted(wanted):
        for item in wanted[rank]:
            if rank not in locations.get(item, ()):
                ranks_by_item[item].append(rank)
    if unknown := sorted(item for item in ranks_by_item if not locations.get(item)):
        shown = ", ".join(
            f"{key!r} of {uid!r} (for ranks {ranks_by_item[uid, key]})" for uid, key in unknown[:_MAX_SHOWN]
        )
        more = f" and {len(unknown) - _MAX_SHOWN} more" if len(unknown) > _MAX_SHOWN else ""
        raise ValueError(
            f"no rank holds {shown}{more}; the call that produces it must run before this one, "
            "or the worker that held it was lost and the sample must be issued again"
        )
    return {item: tuple(ranks) for item, ranks in ranks_by_item.items()}
