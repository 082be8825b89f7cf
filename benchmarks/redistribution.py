"""Samples from the ranks that own them to the ranks that need them, beside a root, raw messages and shared memory.

    OMP_NUM_THREADS=1 python benchmarks/redistribution.py [--ranks 4] [--samples 192] [--rounds 7]

Processes of this machine hold groups of 8 answers with log-normal lengths and 6 keys, and every rank needs a random
share of them. Six ways take turns on the same batch, so that all see the same machine; a ratio is the median of the
ratios of the rounds. A way takes the wall seconds of its slowest rank, from a barrier on until it has looked at every
page, and the CPU seconds of all ranks together, which are steady on a busy machine. What comes has to stay: it is freed
when no clock runs, whatever the way.

    root      all send what they hold to rank 0, which sends each rank its share: packed and in native types, too; by
              gloo
    raw       the bytes of the plan between each two ranks, from buffers that are there into fresh ones, by gloo
    gloo      the plan's transfers, by gloo, which takes one piece of memory: copied together before and cut afterwards
    transfers the plan, by `DataPlane`, as between hosts
    curve     the same bytes as `raw`, by ZeroMQ with CURVE, as the other messages of a trial go: as received, uncopied
    shared    the plan, by `DataPlane`, as between ranks of one host: each round maps anew what it takes, as a rank does
              with samples that it has not seen before

The limit of `shared`: of 63 MB that lie in fresh memfds, mapping them and reading a byte of every page took four
processes 2 to 3 CPU ms in all with nothing else of this in between (two cores, pages of 4 KB, no huge pages for shared
memory), and `shared` 10 to 13. The rest is Python's, for each of 800 arrays. So it was 3 times as fast as `transfers`,
in CPU seconds, with 192 samples, and 5 to 6 times with 1,536 (485 MB).

At the end, the CPU seconds of planning 8,192 samples x 8 answers x 6 keys over 1,024 ranks, where all moves, and where
samples stay as far as the balance allows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier

import numpy as np
import torch.distributed as dist
import zmq
from gloo_messages import Gloo, pack
from torch._C._distributed_c10d import PrefixStore, Store

from corral.scheduling.keys import BUILT_IN_KEYS
from corral.scheduling.packing import TYPICAL_SHAPE, forward_flops
from corral.scheduling.redistribution import Demand, Locations, Transfer, partition_near_owners, plan_redistribution
from corral.workers.backends.parallel_context import connect_store, host_store
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.model.data_plane import DataPlane, IncomingTransfer, keys_in_order
from corral.workers.model.data_store import DataStore
from corral.workers.model.host_memory import Bytes

KEYS = ("input_ids", "prompt_mask", "old_logprobs", "versions", "rewards", "seq_no_eos_mask")
NUM_ANSWERS = 8
MEAN_LOG_LENGTH, SPREAD = 8.0, 0.8  # of the natural logarithm: a median of 3,000 tokens
MOST_TOKENS = 16384
WAYS = ("root", "raw", "gloo", "transfers", "curve", "shared")
GOALS = (
    ("transfers", "root", "3.0"), ("transfers", "raw", "0.8"), ("transfers", "curve", "-"),
    ("shared", "gloo", "4.0"), ("shared", "transfers", "-"),
)  # fmt: skip
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Cost:
    """Of one round: seconds of the slowest rank, and of all processors."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Batch:
    """Who holds what, and who needs it."""

    num_tokens: dict[str, list[int]]
    owner: dict[str, int]
    taker: dict[str, int]

    @classmethod
    def random(cls, num_samples: int, num_ranks: int) -> Batch:
        draw = random.Random(0)
        uids = [f"0:{number}" for number in range(num_samples)]
        return cls(
            {uid: [_length(draw) for _ in range(NUM_ANSWERS)] for uid in uids},
            {uid: draw.randrange(num_ranks) for uid in uids},
            {uid: draw.randrange(num_ranks) for uid in uids},
        )

    def located(self) -> Locations:
        return {uid: dict.fromkeys(KEYS, frozenset((owner,))) for uid, owner in self.owner.items()}

    def wanted(self) -> list[Demand]:
        uids: defaultdict[int, list[str]] = defaultdict(list)
        for uid, taker in self.taker.items():
            uids[taker].append(uid)
        return [Demand(ranks=(rank,), uids=share, keys=KEYS) for rank, share in sorted(uids.items())]

    def plan(self, *, first_tag: int = 0) -> list[Transfer]:
        return plan_redistribution(
            self.located(), self.wanted(), size_bytes=lambda uid, keys: sum(self.num_tokens[uid]), first_tag=first_tag
        )


def _length(draw: random.Random) -> int:
    return min(MOST_TOKENS, 16 + int(draw.lognormvariate(MEAN_LOG_LENGTH, SPREAD)))


def make_sample(uid: str, lengths: Sequence[int]) -> SequenceSample:
    return SequenceSample.from_group(
        uid,
        {
            "input_ids": [np.arange(length) for length in lengths],
            "prompt_mask": [np.arange(length) < 100 for length in lengths],
            "old_logprobs": [np.full(length - 1, -0.5) for length in lengths],
            "versions": [np.zeros(length - 1) for length in lengths],
            "rewards": [1.0] * len(lengths),
            "seq_no_eos_mask": [False] * len(lengths),
        },
    )


@dataclass(frozen=True)
class Meeting:
    """How the processes find each other, and wait for each other at little cost."""

    num_ranks: int
    address: str
    barrier: Barrier


class Rank:
    """One process: its samples, and the six ways."""

    def __init__(self, rank: int, batch: Batch, meeting: Meeting, stack: ExitStack) -> None:
        self.rank, self.num_ranks, self.batch, self.barrier = rank, meeting.num_ranks, batch, meeting.barrier
        rendezvous = connect_store(meeting.address, timeout_s=DEADLINE_S)
        self.gloo = Gloo(PrefixStore("gloo", rendezvous), rank=rank, num_ranks=self.num_ranks, timeout_s=DEADLINE_S)
        self.came: list[object] = []
        self.stores, self.planes = {}, {}
        for way, host in (("transfers", f"host {rank}"), ("shared", "one host")):
            self.stores[way] = DataStore()
            plane = DataPlane(
                self.stores[way],
                PrefixStore(way, rendezvous),
                rank=rank,
                world_size=self.num_ranks,
                address="127.0.0.1",
                host=host,
                timeout_s=DEADLINE_S,
            )
            self.planes[way] = stack.enter_context(closing(plane))
            plane.begin(1)
            for uid, owner in batch.owner.items():
                if owner == rank:
                    self.stores[way].put(make_sample(uid, batch.num_tokens[uid]))
        self.raw: dict[tuple[int, int], Bytes] = self._raw_buffers()
        self.router, self.dealers = self._curve_sockets(PrefixStore("curve", rendezvous), stack)

    def run(self, way: str, plan: Sequence[Transfer]) -> tuple[float, float]:
        """Wall and CPU seconds that this rank takes; what has come is dropped again."""
        ways: dict[str, Callable[[Sequence[Transfer]], None]] = {
            "root": self._by_root, "raw": self._raw, "gloo": self._by_gloo, "curve": self._by_curve,
            "transfers": self._by_plane("transfers"), "shared": self._by_plane("shared"),
        }  # fmt: skip
        self.barrier.wait(DEADLINE_S)
        wall, cpu = time.perf_counter(), time.process_time()
        ways[way](plan)
        wall = time.perf_counter() - wall
        self.barrier.wait(DEADLINE_S)  # until here this rank may still be sending
        cpu = time.process_time() - cpu
        self.gloo.free()
        self.came.clear()
        for store in self.stores.values():
            store.drop([uid for uid, owner in self.batch.owner.items() if owner != self.rank])
        return wall, cpu

    def _by_plane(self, way: str) -> Callable[[Sequence[Transfer]], None]:
        def move(plan: Sequence[Transfer]) -> None:
            self.planes[way].give([transfer for transfer in plan if transfer.source == self.rank])
            taken = [transfer for transfer in plan if self.rank in transfer.destinations]
            self.planes[way].take(taken, self.batch.num_tokens)
            _look_at(self.stores[way], [uid for transfer in taken for uid in transfer.uids])

        return move

    def _raw(self, plan: Sequence[Transfer]) -> None:
        tag, pending = plan[0].tag, []
        for (source, taker), buffer in self.raw.items():
            if taker == self.rank:
                pending.append(self.gloo.receive(buffer.size, source, tag=tag))
            else:
                self.gloo.send(buffer, taker, tag=tag)
        for receiving, received in pending:
            receiving.wait(timedelta(seconds=DEADLINE_S))
            np.ascontiguousarray(received[::4096])
        self.came += pending

    def _by_curve(self, plan: Sequence[Transfer]) -> None:
        sources = [source for source, taker in self.raw if taker == self.rank]
        for source in sources:
            self.dealers[source].send(b"")
        for _ in range(len(self.raw) - len(sources)):
            identity, _ = self.router.recv_multipart()
            self.router.send_multipart([identity, self.raw[self.rank, int(identity)]], copy=False)
        for source in sources:
            frame = self.dealers[source].recv(copy=False)
            np.ascontiguousarray(np.frombuffer(frame.buffer, np.uint8)[::4096])
            self.came.append(frame)

    def _by_gloo(self, plan: Sequence[Transfer]) -> None:
        store = DataStore()
        taken = [transfer for transfer in plan if self.rank in transfer.destinations]
        pending = self._post(taken)
        for transfer in plan:
            if transfer.source == self.rank:
                self._send(transfer, self.stores["transfers"])
        self._wait(pending, store)
        _look_at(store, [uid for transfer in taken for uid in transfer.uids])
        self.came.append(store)

    def _by_root(self, plan: Sequence[Transfer]) -> None:
        """Two hops: everything to rank 0, and from there to where it is needed."""
        first_tag, store = plan[0].tag, DataStore()
        held = self.stores["transfers"]
        to_root = self._shares(self.batch.owner, takers=[0] * self.num_ranks, first_tag=first_tag)
        from_root = self._shares(self.batch.taker, takers=list(range(self.num_ranks)), first_tag=first_tag + 500)
        if self.rank == 0:
            self._receive(to_root[1:], store)
            store.adopt([held.gather([uid], KEYS) for uid in to_root[0].uids])
            for transfer in from_root[1:]:
                self._send(transfer, store)
        else:
            self._send(to_root[self.rank], held)
            self._receive([from_root[self.rank]], store)
        _look_at(store, from_root[self.rank].uids)
        self.came.append(store)

    def _send(self, transfer: Transfer, store: DataStore) -> None:
        packed = pack(store.arrays(transfer.uids, keys_in_order(transfer, BUILT_IN_KEYS)))
        self.gloo.send(packed, transfer.destinations[0], tag=transfer.tag)

    def _receive(self, transfers: Sequence[Transfer], store: DataStore) -> None:
        self._wait(self._post(transfers), store)

    def _post(self, transfers: Sequence[Transfer]) -> list[tuple[IncomingTransfer, dist.Work, Bytes]]:
        expected = [IncomingTransfer.expected(transfer, self.batch.num_tokens, BUILT_IN_KEYS) for transfer in transfers]
        return [(i, *self.gloo.receive(i.size_bytes, i.transfer.source, tag=i.transfer.tag)) for i in expected]

    def _wait(self, pending: Sequence[tuple[IncomingTransfer, dist.Work, Bytes]], store: DataStore) -> None:
        for incoming, receiving, packed in pending:
            receiving.wait(timedelta(seconds=DEADLINE_S))
            store.adopt(incoming.samples(incoming.cut(packed)))

    def _shares(self, rank_by_uid: dict[str, int], *, takers: Sequence[int], first_tag: int) -> list[Transfer]:
        """By rank: one transfer of its samples, from it to root or from root to it."""
        return [
            Transfer(
                tag=first_tag + rank,
                source=rank if takers[rank] == 0 else 0,
                destinations=(takers[rank],),
                uids=tuple(uid for uid, of_uid in rank_by_uid.items() if of_uid == rank),
                keys=KEYS,
            )
            for rank in range(self.num_ranks)
        ]

    def _curve_sockets(self, store: Store, stack: ExitStack) -> tuple[zmq.Socket[bytes], dict[int, zmq.Socket[bytes]]]:
        """A bound socket, and by rank a socket that is connected to that rank's; both end with the stack."""
        context = stack.enter_context(zmq.Context())
        public, secret = zmq.curve_keypair()
        router = stack.enter_context(context.socket(zmq.ROUTER))
        router.curve_server, router.curve_secretkey = True, secret
        store.set(str(self.rank), json.dumps([router.bind_to_random_port("tcp://127.0.0.1"), public.decode()]))
        dealers = {}
        for rank in range(self.num_ranks):
            if rank != self.rank:
                port, key = json.loads(store.get(str(rank)))
                dealers[rank] = dealer = stack.enter_context(context.socket(zmq.DEALER))
                dealer.identity, dealer.curve_serverkey = str(self.rank).encode(), key.encode()
                dealer.curve_publickey, dealer.curve_secretkey = public, secret
                dealer.connect(f"tcp://127.0.0.1:{port}")
        return router, dealers

    def _raw_buffers(self) -> dict[tuple[int, int], Bytes]:
        """By source and taker: as many bytes as the plan moves between them."""
        sizes: defaultdict[tuple[int, int], int] = defaultdict(int)
        for transfer in self.batch.plan():
            size = IncomingTransfer.expected(transfer, self.batch.num_tokens, BUILT_IN_KEYS).size_bytes
            sizes[transfer.source, transfer.destinations[0]] += size
        return {pair: np.ones(size, np.uint8) for pair, size in sizes.items() if self.rank in pair}


def _look_at(store: DataStore, uids: Sequence[str]) -> None:
    np.concatenate([array.view(np.uint8)[::4096] for array in store.arrays(uids, KEYS)])


def play(rank: int, meeting: Meeting, num_samples: int, num_rounds: int, results: Connection) -> None:
    """What one process does: every way in every round, in the same order as the others."""
    batch = Batch.random(num_samples, meeting.num_ranks)
    with ExitStack() as stack:
        here = Rank(rank, batch, meeting, stack)
        seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for number in range(num_rounds + 1):
            for position, way in enumerate(WAYS):
                plan = batch.plan(first_tag=1000 * (len(WAYS) * number + position))
                taken_s = here.run(way, plan)
                if number > 0:  # the first round warms up
                    seconds[way].append(taken_s)
        results.send_bytes(json.dumps(seconds).encode())
        results.recv_bytes()  # nobody leaves before all are done


def measure(num_ranks: int, num_samples: int, num_rounds: int) -> dict[str, list[Cost]]:
    """What each round of each way takes."""
    spawn = multiprocessing.get_context("spawn")
    store, address = host_store("127.0.0.1", timeout_s=DEADLINE_S)
    meeting = Meeting(num_ranks, address, spawn.Barrier(num_ranks))
    pipes = [spawn.Pipe() for _ in range(num_ranks)]
    processes = [
        spawn.Process(target=play, args=(rank, meeting, num_samples, num_rounds, pipes[rank][1]), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    by_rank = []
    for rank, (ours, _) in enumerate(pipes):
        if ours not in wait([ours, processes[rank].sentinel], DEADLINE_S):
            raise TimeoutError(f"rank {rank} did not finish within {DEADLINE_S:.0f} s, or died")
        by_rank.append(json.loads(ours.recv_bytes()))
    for ours, _ in pipes:
        ours.send_bytes(b"done")
    for process in processes:
        process.join(DEADLINE_S)
    del store
    return {
        way: [
            Cost(max(wall for wall, _ in of_round), sum(cpu for _, cpu in of_round))
            for of_round in zip(*(of_rank[way] for of_rank in by_rank), strict=True)
        ]
        for way in WAYS
    }


def report_movement(num_ranks: int, num_samples: int, num_rounds: int) -> None:
    batch = Batch.random(num_samples, num_ranks)
    plan = batch.plan()
    moved = sum(IncomingTransfer.expected(transfer, batch.num_tokens, BUILT_IN_KEYS).size_bytes for transfer in plan)
    print(
        f"{num_ranks} ranks, {num_samples} groups of {NUM_ANSWERS}, {moved / 1e6:.0f} MB lacking, {num_rounds} rounds\n"
    )
    costs = measure(num_ranks, num_samples, num_rounds)
    print(f"{'WAY':<10}{'WALL':>10}{'GB/s':>8}{'CPU':>13}{'GB/s':>8}")
    for way in WAYS:
        wall, cpu = (
            statistics.median(of_round) for of_round in ([c.wall for c in costs[way]], [c.cpu for c in costs[way]])
        )
        print(f"{way:<10}{wall * 1e3:>7.1f} ms{moved / wall / 1e9:>8.2f}{cpu * 1e3:>10.1f} ms{moved / cpu / 1e9:>8.2f}")
    print(f"\n{'TIMES AS FAST':<22}{'WALL':>6}{'CPU':>6}{'GOAL':>6}")
    for way, base, goal in GOALS:
        pairs = list(zip(costs[way], costs[base], strict=True))
        wall, cpu = (
            statistics.median(b.wall / w.wall for w, b in pairs),
            statistics.median(b.cpu / w.cpu for w, b in pairs),
        )
        print(f"{way + ' beside ' + base:<22}{wall:>6.2f}{cpu:>6.2f}{goal:>6}")


def report_planning(num_ranks: int = 1024, num_samples: int = 8192) -> None:
    batch = Batch.random(num_samples, num_ranks)
    num_transfers, seconds = _planning(batch)
    print(f"\n{num_samples} samples on {num_ranks} ranks, all anywhere: {num_transfers} transfers, {seconds:.2f} CPU s")
    started = time.process_time()
    costs = forward_flops(batch.num_tokens.values(), [TYPICAL_SHAPE])
    parts = partition_near_owners(costs, list(batch.owner.values()), num_parts=num_ranks)
    dealing_s = time.process_time() - started
    uids = list(batch.num_tokens)
    taker = {uids[index]: rank for rank, part in enumerate(parts) for index in part}
    near = Batch(batch.num_tokens, batch.owner, taker)
    moving = sum(taker[uid] != owner for uid, owner in batch.owner.items())
    print(
        f"dealt near the owners: {moving} samples move, {dealing_s:.2f} CPU s, and planned in {_planning(near)[1]:.2f}"
    )


def _planning(batch: Batch) -> tuple[int, float]:
    """Number of transfers, and the CPU seconds of the planner alone."""
    located, wanted = batch.located(), batch.wanted()
    weight = {uid: sum(tokens) for uid, tokens in batch.num_tokens.items()}
    started = time.process_time()
    plan = plan_redistribution(located, wanted, size_bytes=lambda uid, keys: weight[uid])
    return len(plan), time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    report_movement(options.ranks, options.samples, options.rounds)
    report_planning()


if __name__ == "__main__":
    main()
