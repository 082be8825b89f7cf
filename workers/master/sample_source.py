"""Where the samples of a train step come from: rows of a dataset, or trajectories of rollout workers.

    dataset:       the master names the next rows in the order of the seed; model workers load them
    trajectories:  model workers receive them; the master picks the oldest that are fresh enough

Both hand the master a batch of uids that wait in its SequenceBuffer.

Here the staleness bound holds: no trajectory is in a batch unless `select_batch` finds all its tokens young enough, and
the lineage knows their versions. The manager's gate is an optimisation that makes rejections rare.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from corral.scheduling.policy_version import Lineage
from corral.scheduling.staleness import ReadySample, select_batch
from corral.workers.master.sequence_buffer import BufferedSample, SequenceBuffer
from corral.workers.requests.messages import Rejection

logger = logging.getLogger(__name__)


class SampleHolders(Protocol):
    """What a source asks of the model workers."""

    async def fetch(self) -> list[BufferedSample]:
        """Samples that have arrived from rollout workers since the last call."""

    async def load_rows(self, uids: Sequence[str]) -> list[BufferedSample]:
        """Load rows of the dataset."""

    async def clear(self, uids: Sequence[str]) -> None:
        """Free the tensors of samples; nobody is told."""

    async def reject(self, uids: Iterable[str], rejection: Rejection) -> None:
        """Throw samples away and tell the rollout workers why: `stale` issues the prompt again, `consumed` does not."""


class SampleSource(Protocol):
    """Gives the batch of the next train step."""

    async def poll(self, *, version: int, remaining: int) -> list[str] | None:
        """The uids of the next batch, oldest first, or None while it is not complete."""

    async def give_back(self, batch: Sequence[str]) -> None:
        """This batch was not trained on: its samples come again later."""

    def waiting_for(self) -> str:
        """What is missing, for rl-status."""

    def waits_for(self) -> Sequence[str]:
        """The workers that it has to come from."""


class DatasetSource:
    """Rows in the order of the seed, each once a pass; what was given back comes after all others."""

    def __init__(self, uids: Iterator[str], buffer: SequenceBuffer, holders: SampleHolders, *, batch_size: int) -> None:
        self._uids = uids
        self._given_back: deque[str] = deque()
        self._buffer = buffer
        self._holders = holders
        self._batch_size = batch_size

    async def poll(self, *, version: int, remaining: int) -> list[str] | None:
        wanted = min(self._batch_size, remaining)
        batch: list[str] = []
        while len(batch) < wanted:
            uid = next(self._uids, None) or self._given_back.popleft()
            if not self._buffer.is_consumed(uid):
                batch.append(uid)
        for sample in await self._holders.load_rows(batch):
            self._buffer.put(sample)
        return batch

    async def give_back(self, batch: Sequence[str]) -> None:
        self._buffer.release(batch)
        await self._holders.clear(batch)
        self._given_back.extend(batch)

    def waiting_for(self) -> str:
        return "rows of the dataset"

    def waits_for(self) -> Sequence[str]:
        return ()


class TrajectorySource:
    """Judged groups from rollout workers, under the staleness bound."""

    def __init__(
        self,
        buffer: SequenceBuffer,
        holders: SampleHolders,
        lineage: Lineage,
        *,
        input_keys: Iterable[str],
        batch_size: int,
        eta: int,
        producers: Sequence[str],
        on_drop: Callable[[str, str], None],
    ) -> None:
        self._buffer = buffer
        self._holders = holders
        self._lineage = lineage
        self._input_keys = tuple(input_keys)
        self._batch_size = batch_size
        self._eta = eta
        self._producers = tuple(producers)
        self._on_drop = on_drop
        self._missing = batch_size

    async def poll(self, *, version: int, remaining: int) -> list[str] | None:
        await self._take_in(await self._holders.fetch())
        dropped = self._buffer.dropped()
        for sample in dropped:
            self._on_drop(sample.uid, sample.dropped_because)
        remaining -= len(dropped)
        if dropped:
            self._buffer.release(sample.uid for sample in dropped)
            await self._holders.clear([sample.uid for sample in dropped])
        ready = [
            ReadySample(uid=sample.uid, order=sample.order, head_version=sample.head_version)
            for sample in self._buffer.ready(self._input_keys)
        ]
        decision = select_batch(ready, version=version, eta=self._eta, batch_size=self._batch_size, remaining=remaining)
        self._missing = decision.waiting_for
        await self._reject(decision.stale, "stale")
        return list(decision.batch) if decision.batch else None

    async def give_back(self, batch: Sequence[str]) -> None:
        await self._reject(batch, "stale")  # answered anew: the same tokens would give the same loss

    def waiting_for(self) -> str:
        return f"{self._missing} more of {self._batch_size} trajectories"

    def waits_for(self) -> Sequence[str]:
        return self._producers

    async def _take_in(self, samples: list[BufferedSample]) -> None:
        known = [sample.uid for sample in samples if not self._buffer.put(sample)]
        consumed = [uid for uid in known if self._buffer.is_consumed(uid)]
        await self._reject(consumed, "consumed")
        await self._reject([uid for uid in known if uid not in set(consumed)], "duplicate")
        orphans = self._buffer.orphaned(self._lineage.contains)
        if orphans:
            logger.warning("%d samples are from weights that a failure took back; they are issued again", len(orphans))
        await self._reject(orphans, "stale")

    async def _reject(self, uids: Sequence[str], rejection: Rejection) -> None:
        if not uids:
            return
        if rejection != "duplicate":  # the copy that arrived first stays
            self._buffer.release(uids)
        await self._holders.reject(uids, rejection)
