"""Names that differ between torch 2.11, 2.12 and 2.13; every other name that is used here is the same in all of them.

`tests/torch_names.py` compares the names and keywords in use with a list of each of these versions.
"""

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

# The second is its name before 2.13.
gather_equal_parts: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather of parts of one shape [n, ...] into its first argument [ranks * n, ...], in the group's order."""
_TAKES_ORDER: Final = "sort_ranks" in inspect.signature(dist.new_group).parameters


def new_group(ranks: Sequence[int], *, timeout_s: float, takes_order: bool = _TAKES_ORDER) -> dist.ProcessGroup:
    """A group whose rank i is `ranks[i]`, whichever global number that rank has; a collective of the world."""
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
    if takes_order:
        options["sort_ranks"] = False
    group: dist.ProcessGroup = dist.new_group([_PlacedRank(rank, place) for place, rank in enumerate(ranks)], **options)
    return group


class _PlacedRank(int):
    """A rank that sorts by its place: torch 2.11 sorts what it is given, and has no flag against it."""

    place: int

    def __new__(cls, rank: int, place: int) -> "_PlacedRank":
        placed = super().__new__(cls, rank)
        placed.place = place
        return placed

    def __lt__(self, other: int) -> bool:
        return self.place < other.place if isinstance(other, _PlacedRank) else int(self) < other
