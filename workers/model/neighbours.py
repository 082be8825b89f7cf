"""Which ranks of this host can show each other their memory: tried once, by all of them, before anything depends on it.

    each rank ──"rank pid fd inode offset"──► store ──► each opens what the others of its host show ──► all, or none

Containers, namespaces and security modules have the last word on who may open what, so that it is tried; and a sender
and a receiver must be of one opinion, so that one refusal counts for the host.
"""

import logging
import os
from collections.abc import Callable, Mapping

import numpy as np
from torch._C._distributed_c10d import Store  # re-exported by torch.distributed, but not for type checkers

from corral.workers.model.host_memory import HostMemory, NotSharedError, Places

logger = logging.getLogger(__name__)


def meet_neighbours(
    store: Store, memory: HostMemory, *, rank: int, host: str, barrier: Callable[[], None]
) -> Mapping[int, int]:
    """Process ids of the other ranks of this host, by rank; empty if they cannot share memory.

    Args:
        store: in which these ranks have not met before.
        host: equal for ranks that may be able to share memory.
        barrier: returns once every rank has called it.
    """
    count_key, refusal_key = f"number of ranks on {host}", f"refusal on {host}"
    shown = memory.store({"rank": np.array([rank], np.int64)})["rank"]
    ((fd, inode, offset),) = memory.places_of([shown]).tolist()
    number = store.add(count_key, 1)
    store.set(f"{number} on {host}", f"{rank} {os.getpid()} {fd} {inode} {offset}")
    barrier()  # all have written down what they show
    pid_by_rank: dict[int, int] = {}
    members = store.multi_get([f"{number} on {host}" for number in range(1, store.add(count_key, 0) + 1)])
    for other, pid, its_places in map(_member, members):
        if other != rank:
            pid_by_rank[other] = pid
            if (refusal := _refusal(memory, other, pid, its_places)) is not None:
                logger.warning("rank %d shares no memory with others of its host: %s", rank, refusal)
                store.set(refusal_key, refusal)
    barrier()  # all have looked; only now may `shown` go
    del shown
    return {} if store.check([refusal_key]) else pid_by_rank


def _member(text: bytes) -> tuple[int, int, Places]:
    """Rank, process id, and what it shows."""
    rank, pid, *place = map(int, text.split())
    return rank, pid, np.array([place], np.int64)


def _refusal(memory: HostMemory, rank: int, pid: int, places: Places) -> str | None:
    """Why another rank's memory cannot be seen; None if it can."""
    try:
        seen = int(memory.open(pid, places, [np.dtype(np.int64)], [1])[0][0])
    except NotSharedError as error:
        return str(error)
    return None if seen == rank else f"process {pid} shows the memory of rank {seen}, and not of rank {rank}"
