"""Matrices whose rows are cut over ranks, dealt out whole: each rank computes with some of them, and all have parts.

    rows of matrices 0, 1, ... of a round ──all-to-all──► rank i: matrix i, whole ──compute──► result i
    rows of the results 0, 1, ...         ◄──all-to-all── its rows ◄──────────────────────────────┘

As many matrices make a round as there are ranks, and the largest come first, so that those of a round take equally
long. Each rank makes one of them, where all ranks would make all of them alike.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from corral.workers.backends.sharding import local


def can_be_dealt(tensor: Tensor) -> bool:
    """Whether its rows, and nothing else of it, are cut over ranks."""
    return tensor.ndim == 2 and isinstance(tensor, DTensor) and tensor.placements == (Shard(0),)


def rounds_of(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Those that can be dealt out, as many at a time as there are ranks; then the others, one by one."""
    dealt = sorted((p for p in parameters if can_be_dealt(p)), key=lambda parameter: -parameter.numel())
    mesh = getattr(dealt[0], "device_mesh", None) if dealt else None
    ranks = 1 if mesh is None else mesh.size()
    for first in range(0, len(dealt), ranks):
        yield dealt[first : first + ranks]
    yield from ([parameter] for parameter in parameters if not can_be_dealt(parameter))


def compute_dealt(matrices: Sequence[DTensor], compute: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """This rank's rows of `compute(matrix)` for each of a round; a collective of the mesh that they are cut over.

    Args:
        matrices: [rows, columns] of one type; each `can_be_dealt`, and no more of them than ranks.
        compute: [rows, columns] -> the same.
    """
    mesh = matrices[0].device_mesh
    own = mesh.get_local_rank()
    rows = [local(matrix) for matrix in matrices]
    sizes = [part.numel() for part in rows] + [0] * (mesh.size() - len(rows))
    of_own = [0] * mesh.size()
    if own < len(matrices):
        total, columns = matrices[own].shape
        each = -(-total // mesh.size())  # as torch cuts them: the last ranks may have less, or nothing
        of_own = [max(0, min(each, total - rank * each)) * columns for rank in range(mesh.size())]
    given = torch.cat([part.flatten() for part in rows])
    result = _exchanged(given, sizes, of_own, mesh.get_group())
    if own < len(matrices):
        result = compute(result.view(matrices[own].shape)).to(given.dtype).flatten()
    parts = torch.split(_exchanged(result, of_own, sizes, mesh.get_group()), sizes[: len(rows)])
    return [part.view(like.shape) for part, like in zip(parts, rows, strict=True)]


def _exchanged(values: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Numbers for each rank -> numbers from each rank, laid end to end."""
    output = values.new_empty(sum(received))
    dist.all_to_all_single(output, values.contiguous(), received, sent, group=group)
    return output
