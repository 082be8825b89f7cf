"""Several ranks in one process: each has a store, host memory and a data plane, and a real network between them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from corral.scheduling.keys import BUILT_IN_KEYS, DeclaredKeys
from corral.scheduling.redistribution import Demand, Locations, Transfer, plan_redistribution
from corral.workers.data.sequence_sample import Array, SequenceSample
from corral.workers.model.data_plane import DataPlane
from corral.workers.model.data_store import DataStore
from corral.workers.model.network import Network

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Rank:
    """One of them."""

    store: DataStore
    plane: DataPlane


@contextmanager
def connected_ranks(
    hosts: Sequence[str], *, timeout_s: float = DEADLINE_S, epoch: int = 1, specs: DeclaredKeys = BUILT_IN_KEYS
) -> Iterator[list[Rank]]:
    """Ranks that have begun an epoch together; those of one host share memory."""
    rendezvous = dist.HashStore()
    ranks = []
    for number, host in enumerate(hosts):
        store = DataStore(specs)
        plane = DataPlane(
            store,
            rendezvous,
            rank=number,
            world_size=len(hosts),
            address="127.0.0.1",
            host=host,
            timeout_s=timeout_s,
        )
        ranks.append(Rank(store, plane))
    try:
        on_all(ranks, lambda _, rank: rank.plane.begin(epoch))
        yield ranks
    finally:
        on_all(ranks, lambda _, rank: rank.plane.close())


@contextmanager
def counted_bytes() -> Iterator[Callable[[], list[int]]]:
    """Gives what each rank of this process has sent over the network since the block began, be it only where values
    lie."""
    sent: Counter[int] = Counter()
    send = Network.send

    def count(network: Network, buffers: Sequence[Array], peer: int, *, tag: int) -> None:
        sent[network.rank] += sum(buffer.nbytes for buffer in buffers)
        send(network, buffers, peer, tag=tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "send", count)
        yield lambda: [sent[rank] for rank in range(4)]


def on_all(ranks: Sequence[Rank], act: Callable[[int, Rank], None]) -> None:
    """Let every rank do something at the same time."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        pending: list[Future[None]] = [threads.submit(act, number, rank) for number, rank in enumerate(ranks)]
        for future in pending:
            future.result(DEADLINE_S)


def random_sample(
    uid: str, lengths: Sequence[int], keys: Sequence[str], specs: DeclaredKeys = BUILT_IN_KEYS
) -> SequenceSample:
    """Bits of every kind: not-a-numbers, huge token ids, and true where a bool is."""
    rng = np.random.default_rng(abs(hash((uid, *lengths))) % 2**32)
    seqlens = {key: [[specs[key].length(tokens) for tokens in lengths]] for key in keys}
    data = {key: _bits(rng, np.dtype(specs[key].dtype), sum(seqlens[key][0])) for key in keys}
    return SequenceSample([uid], seqlens, data, specs)


def _bits(rng: np.random.Generator, dtype: np.dtype[Any], count: int) -> Array:
    if dtype == np.bool_:
        return rng.random(count) < 0.5
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype)


def redistribute(
    ranks: Sequence[Rank],
    plan: Sequence[Transfer],
    num_tokens: Mapping[str, Sequence[int]],
    *,
    takes_first: Sequence[int] = (),
) -> None:
    """Let every rank play its part of a plan; some take before anybody gives."""

    def play(number: int, rank: Rank) -> None:
        mine = [transfer for transfer in plan if number in transfer.destinations or _passes_on(transfer, number)]
        given = [transfer for transfer in plan if transfer.source == number and not transfer.is_passed_on]
        if number in takes_first:
            with ThreadPoolExecutor(1) as thread:
                taken = thread.submit(rank.plane.take, mine, num_tokens)
                rank.plane.give(given)
                taken.result(DEADLINE_S)
        else:
            rank.plane.give(given)
            rank.plane.take(mine, num_tokens)

    on_all(ranks, play)


def _passes_on(transfer: Transfer, rank: int) -> bool:
    return transfer.source == rank and transfer.is_passed_on


def plan_for(
    ranks: Sequence[Rank], wanted: Sequence[Demand], hosts: Sequence[str] | None, *, first_tag: int = 0
) -> list[Transfer]:
    """The plan for what the stores really hold."""
    return plan_redistribution(
        locations_of(ranks, wanted),
        wanted,
        size_bytes=lambda uid, keys: len(keys),
        host_by_rank=None if hosts is None else dict(enumerate(hosts)),
        first_tag=first_tag,
    )


def locations_of(ranks: Sequence[Rank], wanted: Sequence[Demand]) -> Locations:
    places = {(uid, key) for demand in wanted for uid in demand.uids for key in demand.keys}
    locations: dict[str, dict[str, frozenset[int]]] = {uid: {} for demand in wanted for uid in demand.uids}
    for uid, key in places:
        locations[uid][key] = frozenset(number for number, rank in enumerate(ranks) if rank.store.holds(uid, key))
    return locations
