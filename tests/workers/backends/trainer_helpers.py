"""Ranks as processes: each joins a trainer group of its own start over loopback and plays its part."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from corral.workers.backends.parallel_context import ParallelContext, connect_store, host_store, init_parallel

DEADLINE_S = 120.0

Part = Callable[..., None]
"""(world, *arguments) -> nothing: what one rank does; what it saw it writes to files."""


def play(
    part: Part,
    *arguments: Any,
    world_size: int,
    directory: Path,
    device: str = "cpu",
    deadline_s: float = DEADLINE_S,
) -> None:
    """Have `world_size` processes play the part together, and end them with the deadline at the latest.

    Args:
        device: "cpu", or "cuda" for a GPU each.
        deadline_s: for all of it, and for each wait of one for another.

    Raises:
        AssertionError: if one of them did not come to its end.
    """
    # The server pays once for the imports that all ranks share.
    context = multiprocessing.get_context("forkserver")
    pretended = [name for name in ("tests.pretended_gpu.installed",) if name in sys.modules]
    context.set_forkserver_preload([*pretended, "tests.workers.backends.imports_of_a_rank"])
    ranks = [
        context.Process(target=_play_rank, args=(part, rank, world_size, directory, device, deadline_s, arguments))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + deadline_s
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    exit_codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    assert exit_codes == [0] * world_size, f"exit codes by rank: {exit_codes}"


def _play_rank(
    part: Part,
    rank: int,
    world_size: int,
    directory: Path,
    device: str,
    deadline_s: float,
    arguments: tuple[Any, ...],
) -> None:
    if device != "cpu":  # a rank sees one GPU, as the launcher has it
        all_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(world_size)))
        os.environ["CUDA_VISIBLE_DEVICES"] = all_gpus.split(",")[rank]
        device = "cuda:0"
    c10d._object_to_tensor = _refuse_objects
    torch.set_num_threads(1)
    world = _rendezvous(rank, world_size, directory, device, deadline_s)
    part(world, *arguments)
    if c10d.is_initialized():  # else the part has left it
        world.close()


def _rendezvous(rank: int, world_size: int, directory: Path, device: str, timeout_s: float) -> ParallelContext:
    address_file = directory / "address"
    if rank == 0:
        store, address = host_store("127.0.0.1", timeout_s=timeout_s)
        (directory / "address.part").write_text(address)
        (directory / "address.part").rename(address_file)
        return init_parallel(rank=0, world_size=world_size, store=store, device=device, timeout_s=timeout_s)
    deadline = time.monotonic() + timeout_s
    while not address_file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("rank 0 published no address")
        time.sleep(0.02)
    store = connect_store(address_file.read_text(), timeout_s=timeout_s)
    return init_parallel(rank=rank, world_size=world_size, store=store, device=device, timeout_s=timeout_s)


def _refuse_objects(*_: Any, **__: Any) -> None:
    raise RuntimeError("an object collective was used: it pickles")
