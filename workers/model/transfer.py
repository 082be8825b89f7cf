"""Executes the redistribution plan: raw bytes from the rank that owns a sample to the ranks that need it.

    plan (equal on all ranks) ─► post every send and receive of this rank ─► wait for all ─► put what came in the store

Nothing but the values travels: receivers know lengths from the request's metadata and types from `KEY_LAYOUTS`. Every
send and receive is posted before any is waited for, so that no order of transfers can deadlock.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from corral.scheduling.redistribution import Transfer
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample, key_spec
from corral.workers.model.data_store import DataStore


class TransferError(RuntimeError):
    """A peer did not send or take its part of the plan; the gang cannot go on together."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one rank moved in one execution."""

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class _Operation:
    """One posted send or receive, and the memory that it uses until it is done."""

    transfer: Transfer
    peer: int
    work: dist.Work | None
    buffer: npt.NDArray[Any]
    is_receive: bool


class DataManager:
    """Moves samples between the stores of the ranks of one group."""

    def __init__(self, store: DataStore, context: ParallelContext) -> None:
        self._store = store
        self._context = context

    def execute(self, transfers: Sequence[Transfer], metadata: SequenceSample) -> TransferStats:
        """Carry out this rank's part; all ranks that a transfer names must call this with the same plan.

        Args:
            transfers: the plan, in the planner's order.
            metadata: lengths of every sample and key that this rank receives; no data needed.

        Raises:
            TransferError: if a peer does not play its part before the deadline.
            ValueError: if this rank lacks what it must send, or the lengths of what it receives.
        """
        incoming = self._incoming(transfers, metadata)
        operations = [op for tag, transfer in enumerate(transfers) for op in self._post(tag, transfer, incoming)]
        sent = received = 0
        for operation in operations:
            self._wait(operation)
            if operation.is_receive:
                received += operation.buffer.nbytes
            else:
                sent += operation.buffer.nbytes
        for operation in operations:
            if operation.is_receive:
                self._keep(operation, incoming)
        return TransferStats(sent, received)

    def _incoming(self, transfers: Sequence[Transfer], metadata: SequenceSample) -> dict[str, SequenceSample]:
        """Metadata of the samples that this rank receives, by uid."""
        rank = self._context.rank
        uids = {uid for transfer in transfers if rank in transfer.destinations for uid in transfer.uids}
        described = {sample.uids[0]: sample for sample in metadata.without_data().unpack() if sample.uids[0] in uids}
        if unknown := sorted(uids - described.keys()):
            raise ValueError(
                f"rank {rank} is to receive samples {unknown[:3]} whose lengths the request does not state"
            )
        return described

    def _post(self, tag: int, transfer: Transfer, incoming: Mapping[str, SequenceSample]) -> list[_Operation]:
        """Start this rank's side of one transfer."""
        rank = self._context.rank
        if transfer.source == rank:
            packed = self._store.gather(transfer.uids, [transfer.key]).data[transfer.key]
            buffer = np.ascontiguousarray(np.asarray(packed, dtype=key_spec(transfer.key).dtype))
            return [self._start(tag, transfer, peer, buffer, is_receive=False) for peer in transfer.destinations]
        if rank in transfer.destinations:
            length = sum(incoming[uid].total_length(transfer.key) for uid in transfer.uids)
            buffer = np.empty(length, dtype=key_spec(transfer.key).dtype)
            return [self._start(tag, transfer, transfer.source, buffer, is_receive=True)]
        return []

    def _start(
        self, tag: int, transfer: Transfer, peer: int, buffer: npt.NDArray[Any], *, is_receive: bool
    ) -> _Operation:
        if peer == self._context.rank:
            raise ValueError(f"{transfer} sends from rank {peer} to itself")
        work: dist.Work | None = None
        if buffer.size:  # both sides know when there is nothing to send
            raw = torch.from_numpy(buffer.view(np.uint8))
            post = dist.irecv if is_receive else dist.isend
            with self._naming_the_peer(transfer, peer):
                work = post(raw, peer, group=self._context.group, tag=tag)
        return _Operation(transfer, peer, work, buffer, is_receive)

    def _wait(self, operation: _Operation) -> None:
        if operation.work is not None:
            with self._naming_the_peer(operation.transfer, operation.peer):
                operation.work.wait(timedelta(seconds=self._context.timeout_s))

    @contextmanager
    def _naming_the_peer(self, transfer: Transfer, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            direction = "from" if transfer.source == peer else "to"
            raise TransferError(
                f"rank {self._context.rank} could not move {transfer.key!r} of {len(transfer.uids)} samples "
                f"{direction} rank {peer} within {self._context.timeout_s:.0f} s; that rank died, hangs, or follows "
                "another plan"
            ) from error

    def _keep(self, operation: _Operation, incoming: Mapping[str, SequenceSample]) -> None:
        key = operation.transfer.key
        described = SequenceSample.gather([incoming[uid] for uid in operation.transfer.uids], keys=[key])
        self._store.put(SequenceSample(described.uids, described.seqlens, {key: operation.buffer}))
