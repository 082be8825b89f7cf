"""Where the samples of a train step come from: rows of a dataset, or trajectories of rollout workers.

    dataset:       the master names the next rows in the order of the seed; model workers load them
    trajectories:  model workers receive them; the master picks the oldest that are fresh enough

Both hand the master a batch of uids that wait in its SequenceBuffer.

Here the staleness bound holds: no trajectory is in a batch unless `ReadySamples` finds all its tokens young enough, and
the lineage knows their versions. The manager's gate is an optimisation that makes rejections rare.
"""

import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from corral.scheduling.policy_version import Lineage, PolicyVersion
from corral.scheduling.staleness import ReadySamples
from corral.workers.master.sequence_buffer import BufferedSample, SequenceBuffer
from corral.workers.requests.messages import Rejection

logger = logging.getLogger(__name__)


class SampleHolders(Protocol):
    """What a source asks of the model workers."""

    async def fetch(self) -> list[BufferedSample]:
        """Samples that have arrived from rollout workers since the last call; does not wait for any."""

    async def load_rows(self, uids: Sequence[str]) -> list[BufferedSample]:
        """Load rows of the dataset."""

    def clear(self, uids_by_rank: Mapping[int, list[str]]) -> None:
        """Free the tensors of samples where they are, sooner or later; nobody is told."""

    async def reject(self, uids_by_rank: Mapping[int, Sequence[str]], rejection: Rejection) -> None:
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


@dataclass(slots=True)
class DatasetSource:
    """Rows in the order of the seed, each once a pass; what was given back comes after all others."""

    uids: Iterator[str]
    buffer: SequenceBuffer
    holders: SampleHolders
    _: KW_ONLY
    batch_size: int
    next_order: int | None = None
    """Of prompts, which a call of the graph turns into samples: the number of the next one. None for rows as they are.

    Every issue of a prompt has an order of its own, and with it other answers; the first of a trial has 0, as the first
    that rollout workers are admitted with.
    """
    _given_back: deque[str] = field(default_factory=deque, init=False)

    async def poll(self, *, version: int, remaining: int) -> list[str] | None:
        batch: list[str] = []
        while len(batch) < min(self.batch_size, remaining):
            uid = next(self.uids, None) or self._given_back.popleft()
            if not self.buffer.is_consumed(uid):
                batch.append(uid)
        if self.next_order is None:
            samples = await self.holders.load_rows(batch)
        else:
            samples = list(map(_prompt, batch, itertools.count(self.next_order)))
            self.next_order += len(batch)
        for sample in samples:
            self.buffer.put(sample)
        return batch

    async def give_back(self, batch: Sequence[str]) -> None:
        self.holders.clear(self.buffer.release(batch))
        self._given_back.extend(batch)

    def waiting_for(self) -> str:
        return "rows of the dataset"

    def waits_for(self) -> Sequence[str]:
        return ()


def _prompt(uid: str, order: int) -> BufferedSample:
    """A prompt without answers: no rank holds anything of it."""
    return BufferedSample(uid=uid, order=order, owner=0, num_tokens=[], versions=frozenset(), keys=frozenset())


@dataclass(slots=True)
class TrajectorySource:
    """Judged groups from rollout workers, under the staleness bound."""

    buffer: SequenceBuffer
    holders: SampleHolders
    lineage: Lineage
    _: KW_ONLY
    input_keys: Set[str]
    batch_size: int
    eta: int
    producers: Sequence[str]
    on_drop: Callable[[str, str], None]
    _ready: ReadySamples = field(default_factory=ReadySamples, init=False)
    _missing: int = field(init=False)

    def __post_init__(self) -> None:
        self._missing = self.batch_size

    async def poll(self, *, version: int, remaining: int) -> list[str] | None:
        remaining -= await self._take_in(await self.holders.fetch())
        decision = self._ready.take(version=version, eta=self.eta, batch_size=self.batch_size, remaining=remaining)
        self._missing = decision.waiting_for
        await self._give_up(decision.stale)
        return list(decision.batch) if decision.batch else None

    async def give_back(self, batch: Sequence[str]) -> None:
        await self._give_up(batch)  # answered anew: the same tokens would give the same loss

    def waiting_for(self) -> str:
        return f"{self._missing} more of {self.batch_size} trajectories"

    def waits_for(self) -> Sequence[str]:
        return self.producers

    async def _take_in(self, samples: Iterable[BufferedSample]) -> int:
        """Decide about what has arrived, each sample once; says how many were given up before they came here."""
        copies, dropped, orphans = list[BufferedSample](), list[str](), list[str]()
        alike: defaultdict[tuple[frozenset[PolicyVersion], frozenset[str]], list[BufferedSample]] = defaultdict(list)
        for sample in samples:
            if not self.buffer.put(sample):
                copies.append(sample)
            elif sample.dropped_because:
                dropped.append(sample.uid)
                self.on_drop(sample.uid, sample.dropped_because)
            else:
                alike[sample.versions, sample.keys].append(sample)
        for (versions, keys), group in alike.items():  # few: what they have in common is looked at once
            if all(map(self.lineage.contains, versions)):
                self._note_ready(group, keys)
            else:
                orphans += [sample.uid for sample in group]
        await self._turn_away([copy for copy in copies if self.buffer.is_consumed(copy.uid)], "consumed")
        await self._turn_away([copy for copy in copies if not self.buffer.is_consumed(copy.uid)], "duplicate")
        if dropped:
            self.holders.clear(self.buffer.release(dropped))
        if orphans:
            logger.warning("%d samples are from weights that a failure took back; they are issued again", len(orphans))
        await self._give_up(orphans)
        return len(dropped)

    def _note_ready(self, samples: Sequence[BufferedSample], keys: frozenset[str]) -> None:
        """These have the same keys, and are from the same versions."""
        if not self.input_keys <= keys:
            lacking = ", ".join(sorted(self.input_keys - keys))
            raise ValueError(
                f"sample {samples[0].uid} came without {lacking}, which the calls of the dataflow graph "
                f"read and none of them makes; it has {', '.join(sorted(keys))}"
            )
        head_version = samples[0].head_version
        for sample in samples:
            self._ready.add(sample.uid, order=sample.order, head_version=head_version)

    async def _turn_away(self, copies: Iterable[BufferedSample], rejection: Rejection) -> None:
        """Refuse what the buffer did not take, where it arrived; the copy that came first stays where it is."""
        uids_by_rank: defaultdict[int, list[str]] = defaultdict(list)
        for copy in copies:
            uids_by_rank[copy.owner].append(copy.uid)
        if uids_by_rank:
            await self.holders.reject(uids_by_rank, rejection)

    async def _give_up(self, uids: Sequence[str]) -> None:
        """These prompts are answered anew."""
        if uids:
            await self.holders.reject(self.buffer.release(uids), "stale")
