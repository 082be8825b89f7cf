"""Messages by gloo, as torch has it: what the data plane is set beside.

arrays ──pack──► send(peer, tag) ──► receive(size_bytes, peer, tag) ──► fresh memory
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from corral.workers.data.sequence_sample import Array
from corral.workers.model.host_memory import Bytes


class Gloo:
    """The connections of one rank."""

    def __init__(self, store: Store, *, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        gloo = cast(Any, ProcessGroupGloo)  # of its type, torch declares neither the options nor the methods
        options = gloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = self._timeout
        self._group: dist.ProcessGroup = gloo(store, rank, num_ranks, options)
        self._sent: list[tuple[dist.Work, Bytes]] = []

    def send(self, buffer: Bytes, peer: int, *, tag: int) -> None:
        self._sent.append((self._group.send([torch.from_numpy(buffer)], peer, tag), buffer))

    def receive(self, size_bytes: int, peer: int, *, tag: int) -> tuple[dist.Work, Bytes]:
        """A receive into fresh memory, and that memory."""
        received = np.empty(size_bytes, np.uint8)
        return self._group.recv([torch.from_numpy(received)], peer, tag), received

    def free(self) -> None:
        """Forget what was sent."""
        for work, _ in self._sent:
            work.wait(self._timeout)
        self._sent.clear()


def pack(arrays: Sequence[Array]) -> Bytes:
    """As one piece of memory: gloo takes no other."""
    packed = np.empty(sum(array.nbytes for array in arrays), np.uint8)
    np.concatenate([np.ascontiguousarray(array).view(np.uint8) for array in arrays], out=packed)
    return packed
