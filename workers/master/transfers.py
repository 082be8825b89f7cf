"""What has to move before a call, and what each rank is told of it.

who needs what (Demand) ──┐
                          ├──► plan_redistribution ──┬──► Give: to each rank that sends, its own parcels
SequenceBuffer: who has ──┘                          └──► DataTransfer: to each that takes or passes on, its own
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from corral.scheduling.redistribution import Demand, Parcel, plan_redistribution
from corral.workers.data.sequence_sample import KEY_LAYOUTS, KeySpecs, key_spec
from corral.workers.master.sequence_buffer import BufferedSample, SequenceBuffer
from corral.workers.requests.messages import DataTransfer, Give


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """One plan, cut into what each rank has to know."""

    parcels: Sequence[Parcel]
    gives: Mapping[int, Give]
    takes: Mapping[int, DataTransfer]
    """A rank that only passes something on has taken it before."""
    size_bytes: int
    """What reaches ranks that lacked it."""

    def note_arrival(self, buffer: SequenceBuffer) -> None:
        """All is where it was wanted, and can be given away from there; a call beside this one must not plan on it
        before."""
        for parcel in self.parcels:
            buffer.note_held(parcel.uids, parcel.keys, parcel.destinations)


@dataclass(slots=True)
class TransferPlanner:
    """Plans the transfers of one trainer epoch, and numbers their parcels."""

    host_by_rank: Mapping[int, str]
    specs: KeySpecs = field(default_factory=lambda: KEY_LAYOUTS)
    """Every key that the plan knows."""
    _next_tag: int = 0
    _coefficients: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)

    def plan(self, wanted: Sequence[Demand], buffer: SequenceBuffer) -> Transfers:
        """How samples come where they are wanted; `note_arrival` when they have come.

        Raises:
            ValueError: if nobody holds something that is wanted.
        """
        samples = buffer.samples
        parcels = plan_redistribution(
            buffer.located,
            wanted,
            size_bytes=lambda uid, keys: self._size_bytes(samples[uid], keys),
            host_by_rank=self.host_by_rank,
            first_tag=self._next_tag,
        )
        self._next_tag += len(parcels)
        return Transfers(
            parcels=parcels,
            gives={rank: Give(parcels=given) for rank, given in _by_giver(parcels).items()},
            takes={rank: _data_transfer(taken, samples) for rank, taken in _by_taker(parcels).items()},
            size_bytes=sum(
                len(parcel.destinations) * self._size_bytes(samples[uid], parcel.keys)
                for parcel in parcels
                for uid in parcel.uids
            ),
        )

    def _size_bytes(self, sample: BufferedSample, keys: Sequence[str]) -> int:
        """Bytes of some keys of a sample: a number per token and one per answer, whatever the keys."""
        names = tuple(keys)
        if names not in self._coefficients:
            specs = [key_spec(name, self.specs) for name in names]
            per_answer = sum(spec.dtype.itemsize * spec.layout.length(0) for spec in specs)
            per_token = sum(spec.dtype.itemsize * spec.layout.length(1) for spec in specs) - per_answer
            self._coefficients[names] = per_token, per_answer
        per_token, per_answer = self._coefficients[names]
        return per_token * sum(sample.num_tokens) + per_answer * len(sample.num_tokens)


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
