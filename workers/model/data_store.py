"""Where a model worker keeps its samples: uid -> the keys that it holds, as numpy arrays on the host.

rollout worker ──► put ┐                          ┌─► gather(uids, keys) ──► algorithm
data plane ────► adopt ┼─► {uid: SequenceSample} ─┼─► arrays(uids, keys) ──► data plane, to other ranks
algorithm's output put ┘                          └─► drop(uids)             on clear_data_cache

Where there are other ranks on the host, the arrays lie in memory that these can map. An array that is here is
never changed, only replaced or dropped, so that a thread that holds it may read it without a lock.
"""

import threading
from collections.abc import Iterable, Sequence

import numpy as np

from corral.scheduling.keys import BUILT_IN_KEYS, DeclaredKeys
from corral.workers.data.sequence_sample import Array, SequenceSample
from corral.workers.model.host_memory import HostMemory


class DataStore:
    """Samples by uid; the stream's thread puts arrivals in while the main thread computes on others."""

    def __init__(self, specs: DeclaredKeys = BUILT_IN_KEYS) -> None:
        """
        Args:
            specs: every key that the plan knows.
        """
        self.specs = specs
        self.memory: HostMemory | None = None
        """Where arrays are kept for other ranks of this host to see; None while there are none."""
        self._lock = threading.RLock()
        self._samples: dict[str, SequenceSample] = {}

    def put(self, sample: SequenceSample) -> None:
        """Add samples, or keys of samples that are here already; a key that is here already is replaced."""
        pieces, memory = sample.unpack(), self.memory
        for piece in pieces:
            if memory is not None:
                piece.data.update(memory.store(piece.data))
            elif len(pieces) > 1:
                # A view would keep the whole batch's memory alive until its last sample is dropped.
                piece.data.update({key: np.array(array) for key, array in piece.data.items()})
        self.adopt(pieces)

    def adopt(self, pieces: Iterable[SequenceSample]) -> None:
        """Add single samples that are nobody else's, with arrays that lie where this store keeps its own."""
        with self._lock:
            for piece in pieces:
                if (held := self._samples.setdefault(piece.uids[0], piece)) is not piece:
                    held.update_(piece)

    def gather(self, uids: Sequence[str], keys: Iterable[str]) -> SequenceSample:
        """These keys of these samples, packed in the order asked for; no uids make an empty sample of the same keys.

        Raises:
            ValueError: naming the samples or keys that are not here.
        """
        wanted = list(keys)
        with self._lock:
            self._check_held(uids, wanted)
            return SequenceSample.gather([self._samples[uid] for uid in uids], keys=wanted, specs=self.specs)

    def arrays(self, uids: Sequence[str], keys: Sequence[str]) -> list[Array]:
        """The first key of each of these samples, then the second of each, and so on; nothing is copied.

        Raises:
            ValueError: naming the samples or keys that are not here.
        """
        with self._lock:
            self._check_held(uids, keys)
            samples = [self._samples[uid].data for uid in uids]
            return [data[key] for key in keys for data in samples]

    def _check_held(self, uids: Sequence[str], keys: Sequence[str]) -> None:
        wanted, samples = set(keys), self._samples
        if all(uid in samples and wanted <= samples[uid].data.keys() for uid in uids):
            return
        missing = [(uid, key) for uid in uids for key in keys if not self.holds(uid, key)]
        raise ValueError(
            f"{len(missing)} of {len(uids) * len(keys)} values are not in this store, first {missing[0]}: "
            "they must be transferred here, or the sample was dropped"
        )

    def holds(self, uid: str, key: str) -> bool:
        """Whether the values of `key` of this sample are here."""
        sample = self._samples.get(uid)
        return sample is not None and key in sample.data

    def drop(self, uids: Iterable[str]) -> None:
        """Forget samples; unknown uids are passed over, since a drop may be repeated."""
        with self._lock:
            for uid in uids:
                self._samples.pop(uid, None)

    @property
    def uids(self) -> list[str]:
        """Samples held, oldest first."""
        return list(self._samples)

    def __contains__(self, uid: object) -> bool:
        return uid in self._samples
