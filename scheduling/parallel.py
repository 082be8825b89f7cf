"""Parallel layout of one model: (dp, tp, pp) sizes -> ranks, coordinates, data-parallel heads.

    rank = (pp_rank * dp + dp_rank) * tp + tp_rank

Tensor-parallel ranks are neighbours, since they talk most and should share a node; pipeline stages are farthest apart.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

# m is the reference system's letter for t.
_SIZE_BY_LETTER = {"d": "dp", "t": "tp", "m": "tp", "p": "pp"}


class ParallelCoords(NamedTuple):
    """Where a rank sits in its model's layout."""

    dp_rank: int
    tp_rank: int
    pp_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """Sizes of the data, tensor and pipeline parallel dimensions.

    Example:
        dims = ParallelDims(dp=2, tp=2, pp=2)
        dims.world_size                                 # 8
        dims.rank_of(dp_rank=1, tp_rank=0, pp_rank=1)   # 6
        dims.dp_heads                                   # (4, 6)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, size in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size} in dp={self.dp}, tp={self.tp}, pp={self.pp}")

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    def rank_of(self, *, dp_rank: int, tp_rank: int, pp_rank: int) -> int:
        """The rank at these coordinates."""
        for name, rank, size in (("dp", dp_rank, self.dp), ("tp", tp_rank, self.tp), ("pp", pp_rank, self.pp)):
            if not 0 <= rank < size:
                raise ValueError(f"{name}_rank must be in [0, {size}), got {rank} in layout {self}")
        return (pp_rank * self.dp + dp_rank) * self.tp + tp_rank

    def coords(self, rank: int) -> ParallelCoords:
        """The coordinates of a rank; the inverse of `rank_of`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {rank} in layout {self}")
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return ParallelCoords(dp_rank=dp_rank, tp_rank=tp_rank, pp_rank=pp_rank)

    def ranks_of_dp(self, dp_rank: int) -> tuple[int, ...]:
        """All ranks that work on the data of one data-parallel rank, ascending."""
        first = self.rank_of(dp_rank=dp_rank, tp_rank=0, pp_rank=0)
        stage = self.dp * self.tp
        return tuple(
            rank for start in range(first, first + self.world_size, stage) for rank in range(start, start + self.tp)
        )

    def dp_head(self, dp_rank: int) -> int:
        """The rank that holds the outputs of one data-parallel rank: first tensor-parallel rank of the last stage."""
        return self.rank_of(dp_rank=dp_rank, tp_rank=0, pp_rank=self.pp - 1)

    @property
    def dp_heads(self) -> tuple[int, ...]:
        """The head of each data-parallel rank, by dp rank."""
        return tuple(range(self.dp_head(0), self.world_size, self.tp))

    def __str__(self) -> str:
        return f"d{self.dp}t{self.tp}p{self.pp}"

    @property
    def short(self) -> str:
        """Without the sizes that are 1: "d4t2"; "d1" if all are."""
        parts = [f"{letter}{size}" for letter, size in (("d", self.dp), ("t", self.tp), ("p", self.pp)) if size > 1]
        return "".join(parts) or "d1"

    @classmethod
    def parse(cls, text: str) -> "ParallelDims":
        """Read "d4t2p1": letters d, t (or m) and p, each at most once, in any order; a missing one counts 1."""
        if not re.fullmatch(r"(?:[dtmp][1-9][0-9]{0,5})+", text):
            raise ValueError(
                f"layout {text!r} must be letters d, t (or m) and p, each with a size from 1, such as d4t2p1"
            )
        sizes: dict[str, int] = {}
        for letter, digits in re.findall(r"([dtmp])([0-9]+)", text):
            name = _SIZE_BY_LETTER[letter]
            if name in sizes:
                raise ValueError(f"layout {text!r} gives {name} twice; write each letter once")
            sizes[name] = int(digits)
        return cls(**sizes)
