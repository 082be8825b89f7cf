"""SequenceBuffer: where every sample of the trainer stands; metadata only, tensors stay on the model workers.

    put (fetched) ──► READY ──select──► IN BATCH ──amend (outputs of calls)──► consumed (trained) ──┐
                        │                                                                           ▼
                        └──► stale, orphaned: its prompt is issued again ────────────────────► released: which ranks
                                                                                               have to forget it

Pure: events go in, decisions come out. The master's sockets are in trainer_gang.py. That a second copy is turned away
here saves a train step; what keeps it from counting twice is the ledger.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from corral.scheduling.policy_version import PolicyVersion


class BufferedSample(msgspec.Struct, frozen=True, kw_only=True):
    """What the master knows about one sample (one prompt with its group of answers)."""

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
    located: dict[str, dict[str, frozenset[int]]] = field(default_factory=dict)
    """uid -> key -> ranks that hold it; samples that are in the same places share one set of them."""
    duplicates: int = 0
    """Samples that arrived a second time and were turned away."""
    _copies: dict[str, set[int]] = field(default_factory=dict)
    """Ranks where a second copy of a sample has arrived, which is neither read nor counted."""
    _set_by_rank: dict[int, frozenset[int]] = field(default_factory=dict)

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
        self.samples[sample.uid] = sample
        self.located[sample.uid] = dict.fromkeys(sample.keys, self._only(sample.owner))
        return True

    def fill(self, sample: BufferedSample) -> None:
        """What was a prompt has answers now, where they were made."""
        self.samples[sample.uid] = sample
        self.located[sample.uid] = dict.fromkeys(sample.keys, self._only(sample.owner))

    def amend(self, keys: Iterable[str], ranks_by_uid: Mapping[str, int]) -> None:
        """Record that `keys` now exist for each uid on the rank that computed them."""
        names = list(keys)
        for uid, rank in ranks_by_uid.items():
            ranks_by_key, only = self.located[uid], self._only(rank)
            for key in names:
                ranks_by_key[key] = ranks_by_key[key] | only if key in ranks_by_key else only

    def moved(self, uid: str, key: str, ranks: Iterable[int]) -> None:
        """Record that a transfer has put (uid, key) on further ranks."""
        self.located[uid][key] = self.located[uid][key].union(ranks)

    def release(self, uids: Iterable[str]) -> dict[int, list[str]]:
        """Forget samples: trained, stale, or given up. Returns what each rank has to forget, by rank."""
        uids_by_rank: defaultdict[int, list[str]] = defaultdict(list)
        for uid in uids:
            sample = self.samples.pop(uid, None)
            if sample is None:
                continue
            # The owner may hold no key of it, but remembers who sent it.
            ranks = {sample.owner}.union(self._copies.pop(uid, ()), *set(self.located.pop(uid).values()))
            for rank in ranks:
                uids_by_rank[rank].append(uid)
        return dict(uids_by_rank)

    def _only(self, rank: int) -> frozenset[int]:
        only = self._set_by_rank.get(rank)
        if only is None:
            only = self._set_by_rank[rank] = frozenset((rank,))
        return only
