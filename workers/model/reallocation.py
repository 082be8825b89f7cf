"""Parameter reallocation: the weights of one model become those of another one, in whatever layout and place.

    source's ranks:  export_weights ──► whole tensors ──first rank broadcasts──► every rank of both meshes
    target's ranks:  import_weights ◄── one tensor at a time, each keeps its part; a moving average, if so asked

Both models have the same architecture, and with it the same tensors by Hugging Face's names; their backends may differ,
and with them the order.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from corral.scheduling.dataflow import DataflowGraph
from corral.scheduling.model_function_call import ModelName
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.backends.mesh_engine import MeshEngine
from corral.workers.backends.parallel_context import ParallelContext

_HEADER_BYTES: Final = 512  # the same for every tensor, so that no header's length has to be sent first


def reallocation_meshes(graph: DataflowGraph, meshes: Mapping[str, Mesh]) -> dict[str, Mesh]:
    """The ranks that take part in each reallocation of the graph, by its name; each needs a group of its own.

    Models on the same ranks need none: what moves there moves within a rank's own mesh.
    """
    joint: dict[str, Mesh] = {}
    for call in graph.calls:
        for source, target in graph.reallocations(call):
            giving, taking = meshes[str(source)].ranks, meshes[str(target)].ranks
            if giving != taking:
                # The source's first: its first rank is the one that has whole tensors to give.
                ranks = tuple(dict.fromkeys((*giving, *taking)))
                joint[group_name(source, target)] = Mesh(ranks=ranks, dims=ParallelDims(dp=len(ranks)))
    return joint


def group_name(source: ModelName, target: ModelName) -> str:
    return f"{source}>{target}"


def reallocate(
    source: MeshEngine | None, target: MeshEngine | None, group: ParallelContext | None, *, eta: float
) -> None:
    """Carry out this rank's part; every rank of both meshes calls it.

    Args:
        source: the model that gives; None on a rank that holds no part of it.
        target: the model that takes; None on a rank that holds no part of it.
        group: this rank among the ranks of both; None where they are the same ranks.
    """
    given = source.export_weights() if source is not None else None
    if group is None:
        if given is None or target is None:
            raise ValueError("models on the same ranks are both held by each of these ranks, and one is missing here")
        target.import_weights(given, eta=eta)
        return
    travelling = _broadcast(given, group)
    if target is not None:
        target.import_weights(travelling, eta=eta)
    else:
        for _ in travelling:  # this rank helps to make the tensors whole, and keeps nothing
            pass


def _broadcast(given: Iterable[tuple[str, Tensor]] | None, group: ParallelContext) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors on every rank of the group, one at a time, from its first rank, each with a word of what it is."""
    if given is not None:
        for name, tensor in given:
            whole = tensor.contiguous()
            _tell(_Header(name, tuple(whole.shape), str(whole.dtype).removeprefix("torch.")), group)
            dist.broadcast(whole, group_src=0, group=group.group)
            yield name, whole
        _tell(None, group)
        return
    while (header := _tell(None, group)) is not None:
        whole = torch.empty(header.shape, dtype=getattr(torch, header.dtype), device=group.device)
        dist.broadcast(whole, group_src=0, group=group.group)
        yield header.name, whole


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """The header of the next tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def _tell(header: _Header | None, group: ParallelContext) -> _Header | None:
    """The first rank's header on every rank; None is the end."""
    content = msgspec.json.encode(header).ljust(_HEADER_BYTES)
    if len(content) > _HEADER_BYTES:
        raise ValueError(f"weight {header} has a name of more than {_HEADER_BYTES} bytes")
    packed = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.broadcast(packed, group_src=0, group=group.group)
    return msgspec.json.decode(bytes(packed.tolist()), type=_Header | None)
