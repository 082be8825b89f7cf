"""The sources of the samples of a train step, and the buffer that knows the state and location of each sample.

    dataset:       the master names the next rows in the order of the seed; model workers load them
    trajectories:  model workers receive them; the master picks the oldest that are fresh enough

Both hand the master a batch of uids that wait in its SequenceBuffer, which has metadata only; tensors stay on the model
workers.

    put (fetched) ──► READY ──select──► IN BATCH ──note_held (of calls)──► consumed (trained) ──┐
                        │                                                                           ▼
                        └──► stale, orphaned: its prompt is issued again ────────────────────► released: which ranks
                                                                                               have to forget it

The buffer is pure: events go in, decisions come out. That a second copy is turned away there saves a train step; what
keeps it from counting twice is the ledger.

Here the staleness bound holds: no trajectory is in a batch unless all its tokens are young enough, and the lineage
knows their versions. `require_trainable` carries that guarantee; that `ReadySamples` chooses so, and the manager's
gate, are optimisations that make rejections rare.
"""

import logging
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from corral.scheduling.policy_version import Lineage, PolicyVersion
from corral.scheduling.staleness import ReadySamples, ReorderWindow, require_trainable
from corral.workers.data.prompts import GROUP_REWARD, source_of
from corral.workers.data.side_numbers import finite_means
from corral.workers.master.dealt_prompts import DealtPrompts
from corral.workers.requests.messages import MetadataReply, Rejection

logger = logging.getLogger(__name__)


RanksByKey = Mapping[str, frozenset[int]]
"""key -> ranks that hold it. Never changed, and shared by samples of one owner of which it is true: a step has
thousands of samples with few such mappings, and a finding about one mapping holds for all of its samples."""
_NOWHERE: RanksByKey = MappingProxyType({})


class BufferedSample(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """The master's record of one sample (one prompt with its group of answers).

    It is small, and the garbage collector does not know it: a step looks at thousands of them several times, and more
    of them than fit into a processor's cache cost more each. For the same reason the parts of a step hand on samples
    and not their uids, which would have to be looked up.
    """

    uid: str
    order: int
    """Admission number; older samples are trained first."""
    owner: int
    """Rank of the DP head that holds the tensors."""
    num_tokens: Sequence[int]
    """Tokens of each answer, prompt included."""
    versions: frozenset[PolicyVersion]
    """Every version that made one of its tokens; empty for rows of a dataset."""
    keys: frozenset[str]
    """Data that exists for it at its owner."""
    dropped_because: str = ""
    """Reason of a sample that has no answers to train on, such as a failed reward."""
    scalars: Mapping[str, float] = {}
    """Statistics of its episodes, if it has any."""
    tries: int = 0
    """How often answers to it, a prompt, have had no finite loss."""
    ranks_by_key: RanksByKey = _NOWHERE
    """The ranks that hold each key. Only this field changes, and only the buffer and `note_held` change it."""

    @property
    def head_version(self) -> int:
        """Step number of the oldest weights that made one of its tokens."""
        return min((version.step for version in self.versions), default=0)


@dataclass
class SequenceBuffer:
    """Samples that have arrived and are not yet trained on. Each event costs what it is about, not what is held."""

    is_consumed: Callable[[str], bool]
    """Whether a uid is in the ledger already (trained or dropped, committed or not)."""
    samples: dict[str, BufferedSample] = field(default_factory=dict)
    """By uid."""
    duplicates: int = 0
    """Samples that arrived a second time and were turned away."""
    _copies: dict[str, set[int]] = field(default_factory=dict)
    """Ranks where a second copy of a sample has arrived, which is neither read nor counted."""
    _ranks_of_new: dict[tuple[frozenset[str], int], RanksByKey] = field(default_factory=dict)

    def put(self, sample: BufferedSample) -> bool:
        """Take a sample in; False if it is here or consumed already: the copy that came first counts.

        A second copy may lie where the first one does, and both go when the sample is released.
        """
        is_held = sample.uid in self.samples
        if is_held or self.is_consumed(sample.uid):
            self.duplicates += 1
            if is_held:
                self._copies.setdefault(sample.uid, set()).add(sample.owner)
            return False
        self.fill(sample)
        return True

    def fill(self, sample: BufferedSample) -> None:
        """What was a prompt has answers now, where they were made."""
        self.samples[sample.uid] = sample
        kind = (sample.keys, sample.owner)
        ranks_by_key = self._ranks_of_new.get(kind)
        if ranks_by_key is None:
            ranks_by_key = self._ranks_of_new[kind] = dict.fromkeys(sample.keys, frozenset((sample.owner,)))
        sample.ranks_by_key = ranks_by_key

    def find(self, uids: Iterable[str]) -> list[BufferedSample]:
        """The samples of these uids, all of which are here."""
        samples = self.samples
        return [samples[uid] for uid in uids]

    def release(self, uids: Iterable[str]) -> dict[int, list[str]]:
        """Forget samples: trained, stale, or given up. Returns what each rank has to forget, by rank."""
        uids_by_rank: defaultdict[int, list[str]] = defaultdict(list)
        known: dict[int, tuple[RanksByKey, frozenset[int]]] = {}  # by id, which is one's own as long as one is held
        for uid in uids:
            sample = self.samples.pop(uid, None)
            if sample is None:
                continue
            ranks_by_key = sample.ranks_by_key
            if id(ranks_by_key) not in known:
                # The owner may hold no key of it, but remembers who sent it.
                known[id(ranks_by_key)] = ranks_by_key, frozenset((sample.owner,)).union(*ranks_by_key.values())
            ranks = known[id(ranks_by_key)][1]
            for rank in ranks.union(self._copies.pop(uid)) if uid in self._copies else ranks:
                uids_by_rank[rank].append(uid)
        return dict(uids_by_rank)


def note_held(samples: Iterable[BufferedSample], keys: Iterable[str], ranks: Iterable[int]) -> None:
    """Record that some keys of these samples are on further ranks, too: computed there, or moved."""
    names, further = tuple(keys), frozenset(ranks)
    known: dict[int, tuple[RanksByKey, RanksByKey]] = {}  # before and after, by id as above
    for sample in samples:
        before = sample.ranks_by_key
        if id(before) not in known:
            added = {key: before.get(key, further) | further for key in names}
            known[id(before)] = before, {**before, **added}
        sample.ranks_by_key = known[id(before)][1]


def buffered(reply: MetadataReply, *, owner: int) -> list[BufferedSample]:
    """The master's records of the samples that a rank has described."""
    samples: list[BufferedSample] = []
    for group in reply.groups:
        versions, keys = _versions(group.versions), _keys(group.keys)
        samples += [
            BufferedSample(
                uid=uid,
                order=order,
                owner=owner,
                num_tokens=array("I", num_tokens),
                versions=versions,
                keys=keys,
                dropped_because=group.dropped_because,
            )
            for uid, order, num_tokens in zip(group.uids, group.orders, group.num_tokens, strict=True)
        ]
        for sample, scalars in zip(samples[len(samples) - len(group.scalars) :], group.scalars, strict=True):
            sample.scalars = scalars
    return samples


@lru_cache(maxsize=1024)  # the samples of a step share a few combinations
def _versions(tags: tuple[str, ...]) -> frozenset[PolicyVersion]:
    return frozenset(PolicyVersion.parse(tag) for tag in tags)


@lru_cache(maxsize=64)
def _keys(keys: tuple[str, ...]) -> frozenset[str]:
    return frozenset(keys)


def mean_scalars(samples: Iterable[BufferedSample]) -> dict[str, float]:
    """Of each statistic, over the samples that have it; the largest of one whose name ends in /max."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.scalars.items():
            values[name].append(value)
    largest = {name: max(values.pop(name)) for name in [*values] if name.endswith("/max")}
    return dict(sorted((finite_means(values) | largest).items()))


@dataclass(frozen=True, slots=True)
class Drops:
    """Prompts of which nothing is learned: written into the ledger, and counted for the metrics."""

    write: Callable[[str, str], None]
    """`Ledger.drop`."""
    sources: Collection[str] = ()
    """Names of `dataset.sources`."""
    counts: Counter[str] = field(default_factory=Counter)
    """By metric: for each kind of reason, and of each source, where there are several."""
    since_step: Counter[str] = field(default_factory=Counter)
    """By reason, since the last train step."""

    def __call__(self, uid: str, reason: str) -> None:
        """The kind of a reason stands before its colon."""
        self.write(uid, reason)
        self.since_step[reason] += 1
        name = f"data/dropped/{reason.partition(':')[0]}"
        self.counts.update([name, f"{name}/source/{source_of(uid)}"] if source_of(uid) in self.sources else [name])

    def describe(self) -> str:
        """`40 prompts dropped since the last train step, 38 of them: filtered: ...`; "" where none was."""
        if not self.since_step:
            return ""
        (reason, most), *others = self.since_step.most_common(2)
        reasons = f"{most} of them: {reason}" if others else reason
        return f"{self.since_step.total()} prompts dropped since the last train step, {reasons}"


class SampleHolders(Protocol):
    """The requests of a source to the model workers."""

    async def fetch(self) -> list[BufferedSample]:
        """Samples that have arrived from rollout workers since the last call; does not wait for any."""

    async def load_rows(self, uids: Sequence[str]) -> list[BufferedSample]:
        """Load rows of the dataset."""

    def clear(self, uids_by_rank: Mapping[int, list[str]]) -> None:
        """Free the tensors of samples where they are, sooner or later; their senders get no message."""

    async def reject(self, uids_by_rank: Mapping[int, Sequence[str]], rejection: Rejection) -> None:
        """Throw samples away and tell the rollout workers why: `stale` issues the prompt again, `consumed` does not."""


class SampleSource(Protocol):
    """Gives the batch of the next train step."""

    async def poll(self, *, version: int, remaining: int) -> list[str] | None:
        """The uids of the next batch, oldest first, or None while it is not complete."""

    async def give_back(self, batch: Sequence[str]) -> None:
        """This batch was not trained on: its samples come again later."""

    async def note_trained(self, batch: Sequence[str]) -> None:
        """This batch was trained on, and the ledger has it."""

    def waiting_for(self) -> str:
        """What is missing, for rl-status."""

    def waits_for(self) -> Sequence[str]:
        """The workers that it has to come from."""


@dataclass(slots=True)
class DatasetSource:
    """Rows in the order of the seed, each once a pass; what was given back comes after all others, and what is no row
    that can be learned from, as nobody saw before its turn, is dropped."""

    uids: Iterator[str]
    buffer: SequenceBuffer
    holders: SampleHolders
    _: KW_ONLY
    batch_size: int
    on_drop: Callable[[str, str], None]
    next_order: int | None = None
    """Of prompts, which a call of the graph turns into samples: the number of the next one. None for rows as they are.

    Every issue of a prompt has an order of its own; the first of a trial has 0, as the first that rollout workers are
    admitted with.
    """
    _given_back: deque[str] = field(default_factory=deque, init=False)
    _tries: Counter[str] = field(default_factory=Counter, init=False)

    async def poll(self, *, version: int, remaining: int) -> list[str] | None:
        batch: list[str] = []
        while len(batch) < min(self.batch_size, remaining):
            taken = self._take(min(self.batch_size, remaining) - len(batch))
            if self.next_order is None:
                found = await self.holders.load_rows(taken)
            else:
                numbered = enumerate(taken, start=self.next_order)
                self.next_order += len(taken)
                found = [_prompt(uid, order, tries=self._tries[uid]) for order, uid in numbered]
            samples = {sample.uid: sample for sample in found}
            for sample in map(samples.__getitem__, taken):
                if sample.dropped_because:
                    self.on_drop(sample.uid, sample.dropped_because)
                    remaining -= 1
                else:
                    self.buffer.put(sample)
                    batch.append(sample.uid)
        return batch or None

    def _take(self, num: int) -> list[str]:
        taken: list[str] = []
        while len(taken) < num:
            uid = next(self.uids, None) or self._given_back.popleft()
            if not self.buffer.is_consumed(uid):
                taken.append(uid)
        return taken

    async def give_back(self, batch: Sequence[str]) -> None:
        self.holders.clear(self.buffer.release(batch))
        self._given_back.extend(batch)
        self._tries.update(batch)

    async def note_trained(self, batch: Sequence[str]) -> None:
        """The order of rows does not follow from it."""

    def waiting_for(self) -> str:
        return "rows of the dataset"

    def waits_for(self) -> Sequence[str]:
        return ()


def _prompt(uid: str, order: int, *, tries: int) -> BufferedSample:
    """A prompt without answers: no rank holds anything of it."""
    nothing = frozenset[Any]()
    return BufferedSample(uid=uid, order=order, owner=0, num_tokens=[], versions=nothing, keys=nothing, tries=tries)


@dataclass(slots=True)
class TrajectorySource:
    """Judged groups from rollout workers, under the staleness bound."""

    buffer: SequenceBuffer
    holders: SampleHolders
    lineage: Lineage
    window: ReorderWindow | None = None
    _: KW_ONLY
    input_keys: Set[str]
    batch_size: int
    eta: int
    producers: Sequence[str]
    on_drop: Callable[[str, str], None]
    is_dropped: Callable[[str], bool]
    """Whether a uid is in the ledger as one that is not trained on."""
    dealt: DealtPrompts | None = None
    """What decides which prompts there are, where that follows from what was trained."""
    _ready: ReadySamples = field(init=False)
    _missing: int = field(init=False)
    _behind: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._ready = ReadySamples(self.window)
        self._missing = self.batch_size

    async def poll(self, *, version: int, remaining: int) -> list[str] | None:
        remaining -= await self._take_in(await self.holders.fetch())
        decision = self._ready.take(version=version, eta=self.eta, batch_size=self.batch_size, remaining=remaining)
        self._missing, self._behind = decision.waiting_for, decision.behind
        await self._give_up(decision.stale)
        for sample in self.buffer.find(decision.batch or ()):
            require_trainable(sample.uid, oldest=sample.head_version, trainer_version=version, eta=self.eta)
        return list(decision.batch) if decision.batch else None

    async def give_back(self, batch: Sequence[str]) -> None:
        await self.holders.reject(self.buffer.release(batch), "not_finite")

    async def note_trained(self, batch: Sequence[str]) -> None:
        if self.dealt is not None:
            await self.dealt.note_trained({one.uid: one.scalars.get(GROUP_REWARD) for one in self.buffer.find(batch)})

    def waiting_for(self) -> str:
        before = f", first of all prompt {self._behind}" if self._behind else ""
        return f"{self._missing} more of {self.batch_size} trajectories{before}"

    def waits_for(self) -> Sequence[str]:
        return self.producers

    async def _take_in(self, samples: Iterable[BufferedSample]) -> int:
        """Decide about what has arrived, each sample once; says how many were given up before they came here."""
        copies, dropped, orphans = list[BufferedSample](), list[str](), list[str]()
        alike: defaultdict[tuple[frozenset[PolicyVersion], frozenset[str]], list[BufferedSample]] = defaultdict(list)
        for sample in samples:
            if not self.buffer.put(sample):
                copies.append(sample)
            elif self.dealt is not None and sample.uid not in self.dealt.drawn:
                orphans.append(sample.uid)
            elif sample.dropped_because:
                dropped.append(sample.uid)
                self.on_drop(sample.uid, sample.dropped_because)
                if self.dealt is not None:
                    self.dealt.note_dropped(sample.uid, sample.scalars.get(GROUP_REWARD))
            else:
                alike[sample.versions, sample.keys].append(sample)
        for (versions, keys), group in alike.items():  # few: what they have in common is looked at once
            if all(map(self.lineage.contains, versions)):
                self._note_ready(group, keys)
            else:
                orphans += [sample.uid for sample in group]
        for why, turned_away in groupby(sorted(copies, key=self._why_not), self._why_not):
            await self._turn_away(turned_away, why)
        if dropped:
            self.holders.clear(self.buffer.release(dropped))
        if orphans:
            logger.warning("%d samples are from weights that a failure took back; they are issued again", len(orphans))
        await self._give_up(orphans)
        return len(dropped)

    def _why_not(self, copy: BufferedSample) -> Rejection:
        if not self.buffer.is_consumed(copy.uid):
            return "duplicate"
        # Another worker's record dropped this prompt. Tell the sender, so that the manager frees its slot.
        return "dropped" if self.is_dropped(copy.uid) else "consumed"

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
