"""SequenceBuffer: where every sample of the trainer stands; metadata only, tensors stay on the model workers.

    put (fetched) ──► READY ──select──► IN BATCH ──note_held (of calls)──► consumed (trained) ──┐
                        │                                                                           ▼
                        └──► stale, orphaned: its prompt is issued again ────────────────────► released: which ranks
                                                                                               have to forget it

Pure: events go in, decisions come out. The master's sockets are in trainer_gang.py. That a second copy is turned away
here saves a train step; what keeps it from counting twice is the ledger.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import msgspec

from corral.scheduling.policy_version import PolicyVersion
from corral.workers.requests.messages import MetadataReply

Places = Mapping[str, frozenset[int]]
"""key -> ranks that hold it. Never changed, and shared by samples of one owner of which it is true: a step has
thousands of samples in few places, and what is found out about one of these mappings holds for all of them."""
_NOWHERE: Places = MappingProxyType({})


class BufferedSample(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """What the master knows about one sample (one prompt with its group of answers).

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
    places: Places = _NOWHERE
    """Where each key lies; the only thing that changes, and only the buffer and `note_held` change it."""

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
    _places_of_new: dict[tuple[frozenset[str], int], Places] = field(default_factory=dict)

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
        places = self._places_of_new.get(kind)
        if places is None:
            places = self._places_of_new[kind] = dict.fromkeys(sample.keys, frozenset((sample.owner,)))
        sample.places = places

    def find(self, uids: Iterable[str]) -> list[BufferedSample]:
        """The samples of these uids, all of which are here."""
        samples = self.samples
        return [samples[uid] for uid in uids]

    def release(self, uids: Iterable[str]) -> dict[int, list[str]]:
        """Forget samples: trained, stale, or given up. Returns what each rank has to forget, by rank."""
        uids_by_rank: defaultdict[int, list[str]] = defaultdict(list)
        known: dict[int, tuple[Places, frozenset[int]]] = {}  # by id, which is one's own as long as one is held
        for uid in uids:
            sample = self.samples.pop(uid, None)
            if sample is None:
                continue
            places = sample.places
            if id(places) not in known:
                # The owner may hold no key of it, but remembers who sent it.
                known[id(places)] = places, frozenset((sample.owner,)).union(*places.values())
            ranks = known[id(places)][1]
            for rank in ranks.union(self._copies.pop(uid)) if uid in self._copies else ranks:
                uids_by_rank[rank].append(uid)
        return dict(uids_by_rank)


def note_held(samples: Iterable[BufferedSample], keys: Iterable[str], ranks: Iterable[int]) -> None:
    """Record that some keys of these samples are on further ranks, too: computed there, or moved."""
    names, further = tuple(keys), frozenset(ranks)
    known: dict[int, tuple[Places, Places]] = {}  # before and after, by id as above
    for sample in samples:
        before = sample.places
        if id(before) not in known:
            added = {key: before.get(key, further) | further for key in names}
            known[id(before)] = before, {**before, **added}
        sample.places = known[id(before)][1]


def buffered(reply: MetadataReply, *, owner: int) -> list[BufferedSample]:
    """What the master keeps of the samples that a rank has described."""
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
    return samples


@lru_cache(maxsize=1024)  # the samples of a step share a few combinations
def _versions(tags: tuple[str, ...]) -> frozenset[PolicyVersion]:
    return frozenset(PolicyVersion.parse(tag) for tag in tags)


@lru_cache(maxsize=64)
def _keys(keys: tuple[str, ...]) -> frozenset[str]:
    return frozenset(keys)
