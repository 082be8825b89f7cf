"""A layout that does not fit ──► the nearest one that does: as many GPUs or more, as few more as possible.

current d8 ──► d4t2, d8e2 ... of 8 GPUs, least changed first ──► of 9, 10, ... ──► the first that may run, and fits
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple

from corral.scheduling.parallel import ParallelDims

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
