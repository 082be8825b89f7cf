"""What has to move before a call, and what each rank is told of it.

shares of a call: which ranks need which samples ──┐
                                                   ├──► what is not there ──► plan_redistribution ──┐
BufferedSample.places: who has what ───────────────┘                                                │
                       ┌────────────────────────────────────────────────────────────────────────────┘
                       ├──► Give: to each rank that sends, its own parcels
                       └──► DataTransfer: to each that takes or passes on, its own
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from corral.scheduling.redistribution import Demand, Parcel, plan_redistribution
from corral.workers.data.sequence_sample import KEY_LAYOUTS, KeySpecs, key_spec
from corral.workers.master.sequence_buffer import BufferedSample, note_held
from corral.workers.requests.messages import DataTransfer, Give


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """One plan, cut into what each rank has to know."""

    parcels: Sequence[Parcel]
    moved: Mapping[str, BufferedSample]
    """The samples of which the parcels have something, by uid."""
    gives: Mapping[int, Give]
    takes: Mapping[int, DataTransfer]
    """A rank that only passes something on has taken it before."""
    size_bytes: int
    """What reaches ranks that lacked it."""

    def note_arrival(self) -> None:
        """All is where it was wanted, and can be given away from there; a call beside this one must not plan on it
        before."""
        for parcel in self.parcels:
            note_held([self.moved[uid] for uid in parcel.uids], parcel.keys, parcel.destinations)


@dataclass(slots=True)
class TransferPlanner:
    """Plans the transfers of one trainer epoch, and numbers their parcels."""

    host_by_rank: Mapping[int, str]
    specs: KeySpecs = field(default_factory=lambda: KEY_LAYOUTS)
    """Every key that the plan knows."""
    _next_tag: int = 0
    _coefficients: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)

    def plan(
        self, wanted: Iterable[tuple[tuple[int, ...], Sequence[BufferedSample]]], keys: Sequence[str]
    ) -> Transfers:
        """How these keys of samples come where they are wanted; `note_arrival` when they have come.

        Args:
            wanted: ranks, each of which must hold all of these samples then.

        Raises:
            ValueError: if nobody holds something that is wanted.
        """
        demands: list[Demand] = []
        moved: dict[str, BufferedSample] = {}
        for ranks, samples in wanted:
            if lacking := {sample.uid: sample for sample in _not_there(samples, frozenset(ranks), keys)}:
                demands.append(Demand(ranks=ranks, uids=list(lacking), keys=keys))
                moved |= lacking
        parcels = plan_redistribution(
            {uid: sample.places for uid, sample in moved.items()},
            demands,
            size_bytes=lambda uid, keys: self._size_bytes(moved[uid], keys),
            host_by_rank=self.host_by_rank,
            first_tag=self._next_tag,
        )
        self._next_tag += len(parcels)
        return Transfers(
            parcels=parcels,
            moved=moved,
            gives={rank: Give(parcels=given) for rank, given in _by_giver(parcels).items()},
            takes={rank: _data_transfer(taken, moved) for rank, taken in _by_taker(parcels).items()},
            size_bytes=sum(
                len(parcel.destinations) * self._size_bytes(moved[uid], parcel.keys)
                for parcel in parcels
                for uid in parcel.uids
            ),
        )

    def _size_bytes(self, sample: BufferedSample, keys: Sequence[str]) -> int:
        """Bytes of some keys of a sample: a number per token and one per answer, whatever the keys."""
        names = tuple(keys)
        if names not in self._coefficients:
            specs = [key_spec(name, self.specs) for name in names]
            per_answer = sum(spec.dtype.itemsize * spec.length(0) for spec in specs)
            per_token = sum(spec.dtype.itemsize * spec.length(1) for spec in specs) - per_answer
            self._coefficients[names] = per_token, per_answer
        per_token, per_answer = self._coefficients[names]
        return per_token * sum(sample.num_tokens) + per_answer * len(sample.num_tokens)


def _not_there(
    samples: Sequence[BufferedSample], ranks: frozenset[int], keys: Sequence[str]
) -> Sequence[BufferedSample]:
    """Samples of which one of the ranks lacks a key. Mostly there are few, and the others are to cost little."""
    places_by_id = {id(sample.places): sample.places for sample in samples}
    nobody = frozenset[int]()
    lacking = {
        number for number, places in places_by_id.items() if not all(ranks <= places.get(key, nobody) for key in keys)
    }
    return [sample for sample in samples if id(sample.places) in lacking] if lacking else ()


def _by_giver(parcels: Sequence[Parcel]) -> Mapping[int, list[Parcel]]:
    given: defaultdict[int, list[Parcel]] = defaultdict(list)
    for parcel in parcels:
        if not parcel.is_passed_on:
            given[parcel.source].append(parcel)
    return given


def _by_taker(parcels: Sequence[Parcel]) -> Mapping[int, list[Parcel]]:
    taken: defaultdict[int, list[Parcel]] = defaultdict(list)
    for parcel in parcels:
        for rank in parcel.destinations:
            taken[rank].append(parcel)
        if parcel.is_passed_on:
            taken[parcel.source].append(parcel)
    return taken


def _data_transfer(parcels: list[Parcel], samples: Mapping[str, BufferedSample]) -> DataTransfer:
    uids = {uid for parcel in parcels for uid in parcel.uids}
    return DataTransfer(parcels=parcels, num_tokens={uid: list(samples[uid].num_tokens) for uid in sorted(uids)})
