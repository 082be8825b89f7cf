"""ParallelContext: this process's rank in the trainer group, its meshes, and the process groups of each mesh.

    rank 0:      host_store(host) -> address ── name service ──►  other ranks: connect_store(address)
    every rank:  init_parallel(rank=..., world_size=..., store=...) ──► the world: ParallelContext of all ranks
                 mesh_contexts(world, meshes of the plan) ──► {"actor": ParallelContext, "critic": None, ...}

The world moves data, and each mesh computes in groups of its own, so that neither waits for the other. A context is
passed as an argument; nothing reads ranks from the environment or from a module. Only tensors travel between
ranks: torch's object collectives pickle, so they are not used anywhere.
"""

import socket
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore  # re-exported by torch.distributed, but not for type checkers

from corral.scheduling.parallel import Mesh, ParallelCoords, ParallelDims
from corral.workers.backends.torch_versions import new_group

_IN_COMMON = MappingProxyType(
    {
        "dp_group": ("cp_rank", "tp_rank", "pp_rank"),
        "shard_group": ("tp_rank", "pp_rank"),
        "cp_group": ("dp_rank", "tp_rank", "pp_rank"),
        "tp_group": ("dp_rank", "cp_rank", "pp_rank"),
        "pp_group": ("dp_rank", "cp_rank", "tp_rank"),
        "model_group": ("dp_rank", "cp_rank"),
        "ep_group": ("expert_dp_rank", "tp_rank", "pp_rank"),
        "tp_ep_group": ("expert_dp_rank", "pp_rank"),
        "expert_dp_group": ("ep_rank", "tp_rank", "pp_rank"),
    }
)
"""The coordinates that the ranks of each group of a context have in common."""
DEFAULT_TIMEOUT_S = (
    600.0  # longer than any forward pass; the trainer group's supervisor notices a hung rank much earlier
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """One rank's place in one mesh, and the groups that it computes in there.

    Raises:
        ValueError: if the rank has no place in the mesh.
    """

    rank: int = 0
    """Number of this model worker in the trainer group, in whatever mesh."""
    mesh: Mesh = Mesh(ranks=(0,), dims=ParallelDims())
    device: torch.device = torch.device("cpu")
    group: dist.ProcessGroup | None = None
    """All ranks of the mesh, by mesh rank; None where there is one, as in all groups."""
    dp_group: dist.ProcessGroup | None = None
    """The ranks that do this rank's work on other shards of a batch, by data-parallel rank."""
    shard_group: dist.ProcessGroup | None = None
    """The ranks that a parameter's rows are cut over: data times context parallel, by mesh rank."""
    cp_group: dist.ProcessGroup | None = None
    """The ranks that have the other tokens of this rank's rows, by context-parallel rank."""
    tp_group: dist.ProcessGroup | None = None
    """The ranks that have the other parts of this rank's layers, by tensor-parallel rank."""
    pp_group: dist.ProcessGroup | None = None
    """The ranks that have the other layers, by pipeline stage."""
    ends_group: dist.ProcessGroup | None = None
    """The ranks of the first and the last stage, which share an embedding that is the output, too."""
    model_group: dist.ProcessGroup | None = None
    """The ranks that hold one whole model with this one, by mesh rank; with e, but for other ranks' experts."""
    ep_group: dist.ProcessGroup | None = None
    """The ranks that have the other experts of this rank's layers, by expert-parallel rank."""
    tp_ep_group: dist.ProcessGroup | None = None
    """The ranks that have the other experts, and other parts of them, by mesh rank."""
    expert_dp_group: dist.ProcessGroup | None = None
    """The ranks that have the same experts as this one, by mesh rank."""
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        self.mesh.coords(self.rank)

    @property
    def coords(self) -> ParallelCoords:
        """Where this rank stands in the mesh."""
        return self.mesh.coords(self.rank)

    @property
    def dp_rank(self) -> int:
        """Which shard of a batch this rank works on."""
        return self.coords.dp_rank

    @property
    def mesh_rank(self) -> int:
        """Number of this rank within the mesh; mesh rank 0 does what one rank does for all, such as writing a file."""
        return self.mesh.ranks.index(self.rank)

    @property
    def is_dp_head(self) -> bool:
        """Whether this rank holds the outputs of its data-parallel rank."""
        return self.mesh.dp_heads[self.dp_rank] == self.rank

    def sum_over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value added up over the data-parallel ranks, in one collective; all ranks must pass the same names."""
        return _reduce(values, dist.ReduceOp.SUM, self.dp_group)

    def sum_over_mesh(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value added up over all ranks of the mesh, those of one data-parallel rank included."""
        return _reduce(values, dist.ReduceOp.SUM, self.group)

    def max_over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """The largest of each value over the data-parallel ranks."""
        return _reduce(values, dist.ReduceOp.MAX, self.dp_group)

    def text_from(self, dp_rank: int, text: str) -> str:
        """The text of one data-parallel rank, on all of them; what the others pass is ignored."""
        return text if self.dp_group is None else broadcast_text(text, source=dp_rank, group=self.dp_group)

    def close(self) -> None:
        """Leave the trainer group with the groups of all its meshes; for the context that `init_parallel` gave."""
        if self.group is not None:
            dist.destroy_process_group()


def _reduce(
    values: Mapping[str, float], operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> dict[str, float]:
    names = sorted(values)
    if group is None or not names:
        return {name: float(values[name]) for name in names}
    # float64 holds every count up to 2^53 exactly; it stays on the CPU, where gloo adds it without a device sync.
    packed = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
    dist.all_reduce(packed, op=operation, group=group)
    return dict(zip(names, packed.tolist(), strict=True))


def broadcast_text(text: str, *, source: int, group: dist.ProcessGroup) -> str:
    """The text of one rank of a group, on all of them: its length first, since the others do not know it."""
    content = torch.tensor(list(text.encode()), dtype=torch.uint8)
    length = torch.tensor([len(content)])
    dist.broadcast(length, group=group, group_src=source)
    if group.rank() != source:
        content = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(content, group=group, group_src=source)
    return bytes(content.tolist()).decode()


def host_store(host: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[TCPStore, str]:
    """Serve a rendezvous store on one interface and a port that the system chooses; also says its address.

    torch would listen on every interface whatever host it is given; a listening socket that is already bound keeps
    strangers on other networks out.
    """
    listener = socket.create_server((host, 0))
    port: int = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}"


def connect_store(address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> TCPStore:
    """Connect to the store that rank 0 serves at `address` ("host:port").

    Raises:
        TimeoutError: if nobody answers there in time.
    """
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    except dist.DistNetworkError as error:
        raise TimeoutError(f"rank 0 did not answer at {address} within {timeout_s:.0f} s") from error


def init_parallel(
    *,
    rank: int = 0,
    world_size: int = 1,
    store: Store | None = None,
    device: torch.device | str = "cpu",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    join_timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ParallelContext:
    """Join the trainer group, as a context of all its ranks. A single rank forms no process group and needs no store.

    Args:
        timeout_s: how long a rank waits for others in a collective, of this group and of all that are formed in it.
        join_timeout_s: how long for all to be there.

    Raises:
        TimeoutError: if the other ranks do not join in time.
    """
    mesh = Mesh(ranks=tuple(range(world_size)), dims=ParallelDims(dp=world_size))
    device = torch.device(device)
    context = ParallelContext(rank=rank, mesh=mesh, device=device, timeout_s=timeout_s)
    if world_size == 1:
        return context
    assert store is not None, "host_store on rank 0, connect_store on the others"
    try:
        # Apart from the group, whose one timeout is that of its collectives, too.
        store.set(_joined_key(rank), "")
        store.wait([_joined_key(other) for other in range(world_size)], timedelta(seconds=join_timeout_s))
        dist.init_process_group(
            collectives_of(device), store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
    except dist.DistError as error:
        raise TimeoutError(
            f"rank {rank} waited {join_timeout_s:.0f} s for the other {world_size - 1} ranks of its trainer group to "
            f"join: {error}"
        ) from error
    return _with_groups(context, {mesh.ranks: dist.group.WORLD})


def _joined_key(rank: int) -> str:
    return f"joined/{rank}"


def collectives_of(device: torch.device) -> str:
    """What carries the tensors of ranks that compute on such devices, as torch names it; those on the CPU by gloo."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def mesh_contexts(world: ParallelContext, meshes: Mapping[str, Mesh]) -> dict[str, ParallelContext | None]:
    """This rank's place in each mesh, None where it has none; every rank of the world calls it with the same meshes.

    Groups form in the order of the mapping, on all ranks alike, since torch counts them. Meshes of the same ranks share
    a group, because a rank computes for one of them at a time; none has the world's, in which data moves at any time.

    Raises:
        TimeoutError: if the other ranks do not form a group in time.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for name, mesh in meshes.items():
        for ranks in (mesh.ranks, *chain.from_iterable(_groups_of(mesh).values())):
            if ranks not in groups:
                groups[ranks] = _form_group(world, name, ranks)
    return {
        name: _with_groups(replace(world, mesh=mesh), groups) if world.rank in mesh else None
        for name, mesh in meshes.items()
    }


def _form_group(world: ParallelContext, name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of these ranks, None for a single one; of no use to a rank that is not among them."""
    if len(ranks) == 1:
        return None
    try:
        # In the order of mesh ranks, not of global ranks: rank 0 of the group must be data-parallel rank 0 of the mesh.
        return new_group(ranks, timeout_s=world.timeout_s)
    except dist.DistError as error:
        raise TimeoutError(
            f"rank {world.rank} waited {world.timeout_s:.0f} s for ranks {ranks} to form a group of mesh {name!r}: "
            f"{error}"
        ) from error


def _groups_of(mesh: Mesh) -> dict[str, list[tuple[int, ...]]]:
    """The ranks of each group of a mesh's contexts, by the context's name for it; each rank is in one at most."""
    groups: dict[str, defaultdict[tuple[int, ...], list[int]]] = {name: defaultdict(list) for name in _IN_COMMON}
    for mesh_rank, rank in enumerate(mesh.ranks):
        at = mesh.dims.coords(mesh_rank)._asdict() | mesh.dims.expert_coords(mesh_rank)._asdict()
        for name, axes in _IN_COMMON.items():
            groups[name][tuple(at[axis] for axis in axes)].append(rank)
    along = {name: list(map(tuple, members.values())) for name, members in groups.items()}
    return along | {"ends_group": [tuple(dict.fromkeys((stages[0], stages[-1]))) for stages in along["pp_group"]]}


def _with_groups(
    context: ParallelContext, groups: Mapping[tuple[int, ...], dist.ProcessGroup | None]
) -> ParallelContext:
    """The context with its groups, found by their ranks."""
    own: dict[str, Any] = {
        name: next((groups.get(ranks) for ranks in all_ranks if context.rank in ranks), None)
        for name, all_ranks in _groups_of(context.mesh).items()
    }
    return replace(context, group=groups.get(context.mesh.ranks), **own)
