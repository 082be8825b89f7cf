"""DataPlane: carries out redistribution plans; samples go from the ranks that hold them to the ranks that need them.

    master ──Give──► give ──► Network ──┬─ to ranks of this host: where the values lie ─┐
                                        └─ to others: the values themselves ────────────┴──► network ──┐
    master ──with a call─────────► take: post, wait, put in the store, pass on ◄───────────────────────┘

Samples stay on the host as numpy, and a thread and a network of their own carry them: a rank whose main thread computes
still gives away what it holds, and a call never waits for a computation on other ranks to get its inputs.

Both ends know the order of the values in a transfer, so that nothing but values travels.

    key 1 of uid 1 | key 1 of uid 2 | ... | key 2 of uid 1 | key 2 of uid 2 | ...      wide types first: no gaps needed

The sender gathers the arrays in this order; the receiver knows the number of tokens of each answer from the request,
and with the declared layout and type of each key all lengths.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from torch._C._distributed_c10d import PrefixStore, Store  # re-exported by torch.distributed, but not for type checkers

from corral.scheduling.keys import DeclaredKeys, find_declared
from corral.scheduling.redistribution import Transfer
from corral.workers.data.sequence_sample import Array, SequenceSample
from corral.workers.model.data_store import DataStore
from corral.workers.model.host_memory import Bytes, HostMemory, NotSharedError, meet_neighbours
from corral.workers.model.network import Network, TransferError


def keys_in_order(transfer: Transfer, specs: DeclaredKeys) -> list[str]:
    """The transfer's keys as they travel."""
    return sorted(transfer.keys, key=lambda key: (-find_declared(key, specs).itemsize, key))


@dataclass(frozen=True, slots=True)
class IncomingTransfer:
    """A transfer that its receiver expects, with the lengths and types of its arrays."""

    transfer: Transfer
    seqlens: dict[str, list[list[int]]]
    """By key and sample, the lengths of the answers; the keys in the order in which they travel."""
    kinds: list[tuple[np.dtype[Any], int]]
    """The type and the number of values of each array, in the order in which they travel."""
    specs: DeclaredKeys
    """Of all keys that are declared."""

    @classmethod
    def expected(
        cls, transfer: Transfer, num_tokens: Mapping[str, Sequence[int]], declared: DeclaredKeys
    ) -> "IncomingTransfer":
        """
        Raises:
            ValueError: if the length of a sample is not stated.
        """
        if unknown := [uid for uid in transfer.uids if uid not in num_tokens]:
            raise ValueError(f"samples {unknown[:3]} from rank {transfer.source} have no stated length")
        specs = {key: declared[key] for key in keys_in_order(transfer, declared)}
        # Once for each way to count: there are few, and many samples.
        counting = {(spec.layout, spec.shape): spec for spec in specs.values()}
        lengths = {way: [spec.lengths(num_tokens[uid]) for uid in transfer.uids] for way, spec in counting.items()}
        seqlens = {key: lengths[spec.layout, spec.shape] for key, spec in specs.items()}
        dtypes = {key: np.dtype(spec.dtype) for key, spec in specs.items()}
        kinds = [(dtypes[key], sum(of_uid)) for key, of_key in seqlens.items() for of_uid in of_key]
        return cls(transfer, seqlens, kinds, declared)

    @property
    def size_bytes(self) -> int:
        """Of all values."""
        return sum(self._sizes_bytes())

    def cut(self, packed: Bytes) -> list[Array]:
        """Each array, as a view."""
        starts = accumulate(self._sizes_bytes(), initial=0)
        return [np.ndarray((n,), dtype, packed, start) for (dtype, n), start in zip(self.kinds, starts, strict=False)]

    def samples(self, arrays: Sequence[Array]) -> list[SequenceSample]:
        """The samples, given the arrays in the order in which they travel."""
        num_uids = len(self.transfer.uids)
        return [
            SequenceSample(
                [uid],
                {key: [of_key[index]] for key, of_key in self.seqlens.items()},
                dict(zip(self.seqlens, arrays[index::num_uids], strict=True)),
                self.specs,
            )
            for index, uid in enumerate(self.transfer.uids)
        ]

    def _sizes_bytes(self) -> list[int]:
        return [dtype.itemsize * length for dtype, length in self.kinds]


@dataclass(slots=True)
class DataPlane:
    """Moves samples between the stores of the ranks of a trainer group; a store keeps them where it has to.

    Example:
        plane.begin(epoch)                     # on all ranks, before anything else
        plane.give(transfers)                  # any thread of a rank that holds their samples
        plane.take(transfers, num_tokens)      # the main thread of a rank that needs them
    """

    store: DataStore
    rendezvous: Store | None
    """All ranks meet here; None for a trainer group of one."""
    _: KW_ONLY
    rank: int
    world_size: int
    address: str
    """IP address of the interface to listen on."""
    host: str
    """Equal for ranks that may be able to share memory; see `host_identity`."""
    timeout_s: float
    """How long a peer is waited for."""
    _memory: HostMemory = field(default_factory=HostMemory, init=False)
    _network: Network | None = field(default=None, init=False)
    _pid_by_neighbour: Mapping[int, int] = field(default_factory=dict, init=False)
    """Of the ranks that share memory with this one."""

    def begin(self, epoch: int) -> None:
        """Meet the other ranks for a new epoch of the master; what was under way in an earlier one is given up.

        The store must be empty: how it keeps samples depends on who is met.

        Raises:
            TransferError: if another rank does not come in time.
        """
        self.close()
        if self.rendezvous is None:
            return
        store = PrefixStore(f"data plane {epoch}", self.rendezvous)
        self._network = Network(
            PrefixStore("network", store),
            rank=self.rank,
            world_size=self.world_size,
            address=self.address,
            timeout_s=self.timeout_s,
        )
        self._pid_by_neighbour = meet_neighbours(
            store, self._memory, rank=self.rank, host=self.host, barrier=self._network.barrier
        )
        self.store.memory = self._memory if self._pid_by_neighbour else None

    def give(self, transfers: Sequence[Transfer]) -> None:
        """Send what this rank holds, as it is now, or to ranks of this host where it lies; returns at once.

        Raises:
            ValueError: if something of it is not here; then nothing is sent.
        """
        network, neighbours = self._begun(), self._pid_by_neighbour
        values = [self.store.arrays(transfer.uids, keys_in_order(transfer, self.store.specs)) for transfer in transfers]
        for transfer, arrays in zip(transfers, values, strict=True):
            is_mapped = any(rank in neighbours for rank in transfer.destinations)
            addresses = [self._memory.addresses_of(arrays)] if is_mapped else []
            for rank in transfer.destinations:
                network.send(addresses if rank in neighbours else arrays, rank, tag=transfer.tag)

    def take(self, transfers: Sequence[Transfer], num_tokens: Mapping[str, Sequence[int]]) -> None:
        """Wait for the transfers that have this rank as a destination, and pass on those that have it as their source.

        Everything is posted before anything is waited for, and what others pass on is asked for, and waited for, last:
        no order of gives and takes of any ranks can deadlock.

        Args:
            num_tokens: of each answer of every sample that comes, by uid.

        Raises:
            TransferError: if a peer does not play its part before the deadline.
            ValueError: if the length of a sample is not stated.
        """
        network, rank = self._begun(), self.rank
        deadline = time.monotonic() + self.timeout_s
        own = sorted((p for p in transfers if rank in p.destinations), key=lambda transfer: transfer.is_passed_on)
        coming = [IncomingTransfer.expected(transfer, num_tokens, self.store.specs) for transfer in own]
        for transfer in own:
            network.ask(transfer.source, tag=transfer.tag)
        for is_passed_on in (False, True):
            for incoming in coming:
                if incoming.transfer.is_passed_on is is_passed_on:
                    self.store.adopt(incoming.samples(self._receive(incoming, deadline=deadline)))
            if not is_passed_on:
                self.give([transfer for transfer in transfers if transfer.source == rank])

    def close(self) -> None:
        """Leave the other ranks; what nobody has taken is not sent any more."""
        if self._network is not None:
            self._network.close()
            self._network = None

    def _begun(self) -> Network:
        assert self._network is not None, "no epoch has begun"
        return self._network

    def _receive(self, incoming: IncomingTransfer, *, deadline: float) -> list[Array]:
        """The arrays of a transfer that was asked for, once they are here."""
        transfer, pid = incoming.transfer, self._pid_by_neighbour.get(incoming.transfer.source)
        what = f"{', '.join(transfer.keys)} of {len(transfer.uids)} samples"
        receive = partial(self._begun().receive, peer=transfer.source, tag=transfer.tag, what=what, deadline=deadline)
        if pid is not None:
            addresses = np.empty((len(incoming.kinds), 3), np.int64)
            receive(addresses)
            try:
                return self._memory.open(pid, addresses, incoming.kinds)
            except NotSharedError as error:
                raise TransferError(
                    f"rank {transfer.source} has dropped samples before they were taken: {error}"
                ) from error
        if self._pid_by_neighbour:  # received where they can map it, since it may have to be passed on
            target, values = self._memory.allocate(incoming.size_bytes)
        else:
            target = values = np.empty(incoming.size_bytes, np.uint8)
        receive(target)
        return incoming.cut(values)
