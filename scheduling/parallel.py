"""Parallel layout of one model: (dp, tp, pp, cp, ep) sizes -> ranks, coordinates, data-parallel heads.

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank
    dp_rank * cp + cp_rank = expert_dp_rank * ep + ep_rank      the same ranks again, as experts are spread over them

Ranks that talk more are closer, since neighbours share a node: tensor-parallel ranks talk in each half of a layer,
context-parallel ranks around each attention, data-parallel ranks once a layer; pipeline stages hand over a few rows.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import NamedTuple

from corral.scheduling.errors import RuleError
from corral.scheduling.worker_information import fold_numbers

# m is the reference system's letter for t.
_SIZE_BY_LETTER = {"d": "dp", "t": "tp", "m": "tp", "p": "pp", "c": "cp", "e": "ep"}


class ParallelCoords(NamedTuple):
    """Where a rank sits in its model's layout."""

    dp_rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int = 0


class ExpertCoords(NamedTuple):
    """Where a rank sits among those that the experts of its layers are spread over."""

    expert_dp_rank: int
    """Among the ranks that have the same experts."""
    ep_rank: int
    """Which of the experts it has, of `ep` equal shares."""
    tp_rank: int
    pp_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """Sizes of the data, tensor, pipeline, context and expert parallel dimensions.

    Expert parallelism adds no ranks: those of d x c, which have all other parameters alike, have other experts each.

    Example:
        dims = ParallelDims(dp=2, tp=2, pp=2)
        dims.world_size         # 8
        dims.coords(6)          # ParallelCoords(dp_rank=1, tp_rank=0, pp_rank=1, cp_rank=0)
        dims.dp_heads           # (4, 6)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in _NAMES:
            if getattr(self, name) < 1:
                sizes = ", ".join(f"{name}={getattr(self, name)}" for name in _NAMES)
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)} in {sizes}")
        if self.dp * self.cp % self.ep:
            raise ValueError(
                f"e{self.ep} does not divide the {self.dp * self.cp} ranks of d{self.dp} x c{self.cp}, over which "
                "experts are spread"
            )

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def coords(self, rank: int) -> ParallelCoords:
        """The coordinates of a rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {rank} in layout {self}")
        rest, tp_rank = divmod(rank, self.tp)
        rest, cp_rank = divmod(rest, self.cp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return ParallelCoords(dp_rank=dp_rank, tp_rank=tp_rank, pp_rank=pp_rank, cp_rank=cp_rank)

    def expert_coords(self, rank: int) -> ExpertCoords:
        """The same place, as experts are spread: neighbours have different ones, so that tokens stay within a node."""
        at = self.coords(rank)
        expert_dp_rank, ep_rank = divmod(at.dp_rank * self.cp + at.cp_rank, self.ep)
        return ExpertCoords(expert_dp_rank=expert_dp_rank, ep_rank=ep_rank, tp_rank=at.tp_rank, pp_rank=at.pp_rank)

    def ranks_of_dp(self, dp_rank: int) -> tuple[int, ...]:
        """All ranks that work on the data of one data-parallel rank, ascending."""
        width = self.cp * self.tp
        stages = range(dp_rank * width, self.world_size, self.dp * width)
        return tuple(rank for start in stages for rank in range(start, start + width))

    @property
    def dp_heads(self) -> tuple[int, ...]:
        """The rank that holds the outputs of each data-parallel rank, by dp rank: its first one in the last stage."""
        width = self.cp * self.tp
        return tuple(range((self.pp - 1) * self.dp * width, self.world_size, width))

    def __str__(self) -> str:
        """ "d2t1p1", and "c2" and "e2" after it where there are any, which most layouts do without."""
        return self._written(always="dtp")

    @property
    def short(self) -> str:
        """Without the sizes that are 1: "d4t2"; "d1" if all are."""
        return self._written(always="") or "d1"

    def _written(self, *, always: str) -> str:
        sizes = (("d", self.dp), ("t", self.tp), ("p", self.pp), ("c", self.cp), ("e", self.ep))
        return "".join(f"{letter}{size}" for letter, size in sizes if size > 1 or letter in always)

    @classmethod
    def parse(cls, text: str) -> "ParallelDims":
        """Read "d4t2p1c1e1": letters d, t (or m), p, c, e, each once at most, in any order; a missing one counts 1."""
        if not re.fullmatch(r"(?:[dtmpce][1-9][0-9]{0,5})+", text):
            raise ValueError(
                f"layout {text!r} must be letters d, t (or m), p, c and e, each with a size from 1 "
                "to 999999, such as d4t2p1"
            )
        sizes: dict[str, int] = {}
        for letter, digits in re.findall(r"([dtmpce])([0-9]+)", text):
            name = _SIZE_BY_LETTER[letter]
            if name in sizes:
                raise RuleError(f"layout {text!r} gives {name} twice", "write each letter once")
            sizes[name] = int(digits)
        return cls(**sizes)


_NAMES = ("dp", "tp", "pp", "cp", "ep")


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """The layers of each pipeline stage.

    Where they cannot have as many each, the first and the last, which have the model's ends besides, have fewer: 94
    layers in 4 stages are 23, 24, 24 and 23. A stage without a layer says that there are too many stages.
    """
    of_stage = -(-num_layers // stages)
    ends = num_layers - of_stage * (stages - 2)
    if stages == 1 or ends < 2:
        counts = [num_layers] + [0] * (stages - 1)
    else:
        counts = [ends - ends // 2, *[of_stage] * (stages - 2), ends // 2]
    return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


# A layout that does not fit ──► the nearest one that does: as many GPUs or more, as few more as possible.
#
# current d8 ──► d4t2, d8e2 ... of 8 GPUs, least changed first ──► of 9, 10, ... ──► the first that may run, and fits

Claim = Callable[[ParallelDims], bool]


def nearest_layout(
    current: ParallelDims, *, max_gpus: int, may_run: Claim, fits: Claim, spreads_experts: bool = False
) -> ParallelDims | None:
    """The first layout in the order of `distance` that may run and fits; None if there is none of so many GPUs.

    Args:
        max_gpus: the most that the layout may have.
        spreads_experts: whether layouts with e are looked at, too.
        may_run: whether backend and model allow a layout; asked first, since it is cheaper to say.
        fits: whether its memory does.
    """
    for num_gpus in range(current.world_size, max_gpus + 1):
        layouts = layouts_of(num_gpus, spreads_experts=spreads_experts)
        for dims in sorted(layouts, key=lambda dims: distance(dims, current)):
            if dims != current and may_run(dims) and fits(dims):
                return dims
    return None


def distance(dims: ParallelDims, current: ParallelDims) -> tuple[int, float, int, int, int]:
    """How far a layout is from another: more GPUs first, then by which factors its sizes differ.

    Of two that are as far, the one with fewer tensor-parallel ranks, which talk most, then fewer context-parallel ones,
    then fewer expert-parallel ones.
    """
    change = sum(abs(math.log2(size / before)) for size, before in zip(astuple(dims), astuple(current), strict=True))
    return dims.world_size, round(change, 9), dims.tp, dims.cp, dims.ep


def layouts_of(num_gpus: int, *, spreads_experts: bool = False) -> Iterator[ParallelDims]:
    """Every way to lay a model out over exactly so many GPUs; its experts, too, where they can be spread."""
    for dp in _divisors(num_gpus):
        for tp in _divisors(num_gpus // dp):
            for cp in _divisors(num_gpus // dp // tp):
                for ep in _divisors(dp * cp) if spreads_experts else (1,):
                    yield ParallelDims(dp=dp, tp=tp, cp=cp, pp=num_gpus // dp // tp // cp, ep=ep)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# Meshes: which model workers hold a role's model, and where in its layout each of them stands.
#
#     Mesh(ranks=(2, 3), dims=d2t1p1)     model_worker/2 is data-parallel rank 0 of the role, model_worker/3 its rank 1
#
# `rank` is always the number of a model worker; a place is the number within the mesh, which `ParallelDims` counts by.
# Meshes of several roles may be the same, apart from each other, or share some ranks.


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
