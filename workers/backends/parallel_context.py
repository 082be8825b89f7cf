"""Which rank of a training gang this process is, and the sums that the ranks form together.

    rank 0:      host_store(host) -> address ── name service ──►  other ranks: connect_store(address)
    every rank:  init_parallel(rank=..., world_size=..., store=...) -> ParallelContext

A `ParallelContext` is handed to whoever needs one; nothing reads ranks from the environment or from a module. Only
tensors travel between ranks: torch's object collectives pickle, so they are not used anywhere.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore  # re-exported by torch.distributed, but not for type checkers

DEFAULT_TIMEOUT_S = 600.0  # longer than any forward pass; the gang's supervisor notices a hung rank much earlier


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """One rank's place in its gang. Data parallelism is the only dimension yet, so `dp_rank` equals `rank`."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    device: torch.device = torch.device("cpu")
    group: dist.ProcessGroup | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S

    def sum_over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value added up over the data-parallel ranks, in one collective; all ranks must pass the same names."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max_over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """The largest of each value over the data-parallel ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Return once every rank has come here."""
        self.sum_over_ranks({"barrier": 0.0})

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def _reduce(self, values: Mapping[str, float], operation: dist.ReduceOp.RedOpType) -> dict[str, float]:
        names = sorted(values)
        if self.group is None or not names:
            return {name: float(values[name]) for name in names}
        # float64 holds every count up to 2^53 exactly; it stays on the CPU, where gloo adds it without a device sync.
        packed = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
        dist.all_reduce(packed, op=operation, group=self.group)
        return dict(zip(names, packed.tolist(), strict=True))


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
    if not host or not port.isdecimal():
        raise ValueError(f"rendezvous address {address!r} is not of the form host:port")
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
) -> ParallelContext:
    """Join the gang; a gang of one forms no process group and needs no store.

    Raises:
        ValueError: if the rank is outside the gang, or a gang of several has no store.
        TimeoutError: if the other ranks do not join in time.
    """
    device = torch.device(device)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a gang of {world_size} (ranks 0 to {world_size - 1})")
    if world_size == 1:
        return ParallelContext(device=device, timeout_s=timeout_s)
    if store is None:
        raise ValueError(
            f"a gang of {world_size} ranks needs a rendezvous store: host_store on rank 0, connect_store on the others"
        )
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
    except dist.DistError as error:
        raise TimeoutError(
            f"rank {rank} waited {timeout_s:.0f} s for the other {world_size - 1} ranks of its gang to join: {error}"
        ) from error
    return ParallelContext(
        rank=rank,
        world_size=world_size,
        dp_rank=rank,
        dp_size=world_size,
        device=device,
        group=dist.group.WORLD,
        timeout_s=timeout_s,
    )
