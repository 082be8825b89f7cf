"""Meshes: which model workers hold a role's model, and where in its layout each of them stands.

    Mesh(ranks=(2, 3), dims=d2t1p1)     model_worker/2 is data-parallel rank 0 of the role, model_worker/3 its rank 1

`rank` is always the number of a model worker; a place is the number within the mesh, which `ParallelDims` counts by.
Meshes of several roles may be the same, apart from each other, or share some ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from corral.scheduling.parallel import ParallelCoords, ParallelDims
from corral.scheduling.worker_information import fold_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The ranks of one model, by place.

    Example:
        mesh = Mesh(ranks=(2, 3), dims=ParallelDims(dp=2))
        mesh.dp_heads               # (2, 3)
        mesh.ranks_of_dp(1)         # (3,)
        mesh.coords(3).dp_rank      # 1
    """

    ranks: tuple[int, ...]
    """Model worker at each place."""
    dims: ParallelDims

    def __post_init__(self) -> None:
        if len(self.ranks) != self.dims.world_size:
            raise ValueError(
                f"a mesh of layout {self.dims} needs {self.dims.world_size} ranks, got {len(self.ranks)}: {self.ranks}"
            )
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"a mesh needs each of its ranks once, got {self.ranks}")

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    def coords(self, rank: int) -> ParallelCoords:
        """Where a model worker stands; ValueError if it has no part in this mesh."""
        if rank not in self.ranks:
            raise ValueError(f"model_worker/{rank} is not in the mesh of {_workers(self.ranks)}")
        return self.dims.coords(self.ranks.index(rank))

    def ranks_of_dp(self, dp_rank: int) -> tuple[int, ...]:
        """All ranks that work on the data of one data-parallel rank, by place."""
        return tuple(self.ranks[place] for place in self.dims.ranks_of_dp(dp_rank))

    @property
    def dp_heads(self) -> tuple[int, ...]:
        """The rank that holds the outputs of each data-parallel rank, by dp rank."""
        return tuple(self.ranks[place] for place in self.dims.dp_heads)

    def __str__(self) -> str:
        return f"{self.dims} on {_workers(self.ranks)}"


def _workers(ranks: Sequence[int]) -> str:
    """(4, 5, 6, 7) -> model_worker/4-7"""
    return f"model_worker/{fold_numbers(ranks)}"
