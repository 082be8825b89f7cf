"""Messages between the ranks of a gang, apart from the group that computes: numbered, in any order, from any thread.

    send(bytes, peer, tag) ──► posted ──► waits there until the peer receives ──► its memory is free again
    receive(peer, tag, into) ──► posted ──► wait(deadline)

Gloo moves the bytes when both sides have posted, in threads of its own. So a rank that computes still sends, and no
order of sends and receives can deadlock, as long as everything is posted before anything is waited for.
"""

import logging
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store  # re-exported by torch.distributed, but untyped there

logger = logging.getLogger(__name__)

Buffer = npt.NDArray[Any]


_UNTIL_CLOSED = timedelta(days=365)
_NEVER_SENT = 2**31 - 1  # a tag; parcels are numbered below it


class TransferError(RuntimeError):
    """A peer did not send or take its part of the plan; the gang cannot go on together."""


@dataclass(frozen=True, slots=True)
class _Posted:
    """A send, and the memory that it uses until it is done."""

    work: dist.Work
    buffer: Buffer
    peer: int


class Receiving:
    """A receive that was posted."""

    def __init__(self, work: dist.Work | None, peer: int, *, rank: int, timeout_s: float) -> None:
        self._work = work
        self._peer = peer
        self._rank = rank
        self._timeout_s = timeout_s

    def wait(self, what: str, *, deadline: float) -> None:
        """Return when all is there.

        Args:
            what: for the message of the error.
            deadline: of `time.monotonic`.

        Raises:
            TransferError: if the peer is gone, or has not sent it in time.
        """
        if self._work is None:
            return
        remaining_s = max(0.001, deadline - time.monotonic())  # gloo takes 0 for its default
        try:
            self._work.wait(timedelta(seconds=remaining_s))
        except RuntimeError as error:
            raise TransferError(
                f"rank {self._rank} did not get {what} from rank {self._peer} within {self._timeout_s:.0f} s; that "
                f"rank died, hangs, or follows another plan: {error}"
            ) from error


class Network:
    """The connections of one rank to all others."""

    def __init__(self, store: Store, *, rank: int, world_size: int, address: str, timeout_s: float) -> None:
        """Connect to the other ranks, which do the same.

        Args:
            store: in which no network has met before.
            address: IP address of the interface to listen on.
            timeout_s: how long others are waited for, but for sends: those wait until the network is closed, since a
                receiver may have to end a long computation first.

        Raises:
            TransferError: if the others do not come in time.
        """
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        gloo = cast(Any, ProcessGroupGloo)  # of its type, torch declares neither the options nor the methods
        options = gloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._group: dist.ProcessGroup = gloo(store, rank, world_size, options)
        except RuntimeError as error:
            raise TransferError(
                f"rank {rank} waited {timeout_s:.0f} s for the other {world_size - 1} ranks to connect: {error}"
            ) from error
        self._posted: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._is_closed = False
        self._reaper = threading.Thread(target=self._reap, name=f"sends of rank {rank}", daemon=True)
        self._reaper.start()

    def send(self, buffer: Buffer, peer: int, *, tag: int) -> None:
        """Post a send; the buffer must not change any more. Nothing travels if it is empty.

        Raises:
            TransferError: if the peer is gone.
        """
        if not buffer.size:
            return
        try:
            work = self._group.send([torch.from_numpy(buffer)], peer, tag)
        except RuntimeError as error:
            raise TransferError(f"rank {self._rank} cannot send to rank {peer}: {error}") from error
        self._posted.put(_Posted(work, buffer, peer))

    def receive(self, buffer: Buffer, peer: int, *, tag: int) -> Receiving:
        """Post a receive into `buffer`.

        Raises:
            TransferError: if the peer is gone.
        """
        work = None
        if buffer.size:
            try:
                work = self._group.recv([torch.from_numpy(buffer)], peer, tag)
            except RuntimeError as error:
                raise TransferError(f"rank {self._rank} cannot receive from rank {peer}: {error}") from error
        return Receiving(work, peer, rank=self._rank, timeout_s=self._timeout_s)

    def barrier(self) -> None:
        """Return once every rank has come here.

        Raises:
            TransferError: if one does not come in time.
        """
        try:
            self._group.barrier().wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise TransferError(
                f"rank {self._rank} waited {self._timeout_s:.0f} s for the other ranks at a barrier: {error}"
            ) from error

    def close(self) -> None:
        """Break all connections, also under sends that nobody has taken."""
        self._is_closed = True
        self._posted.put(None)
        # A wait that times out is how gloo is told to give up all connections of a group; dropping the group would
        # leave them to sends that still wait.
        with suppress(RuntimeError):
            unsent = self._group.recv([torch.empty(1)], (self._rank + 1) % self._world_size, _NEVER_SENT)
            unsent.wait(timedelta(milliseconds=1))
        self._reaper.join()

    def _reap(self) -> None:
        while self._reap_next():
            pass

    def _reap_next(self) -> bool:
        """Keep what is sent, and no longer than until it is taken; False at the end."""
        posted = self._posted.get()
        if posted is None:
            return False
        try:
            posted.work.wait(_UNTIL_CLOSED)
        except RuntimeError as error:
            if not self._is_closed:
                logger.warning("rank %d could not send to rank %d: %s", self._rank, posted.peer, error)
        return True
