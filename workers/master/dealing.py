"""Which data-parallel rank of a mesh works on which samples of a call (Dealer), and what has to move for it.

    samples of a go ──► their work, in all calls on this mesh ──┐
    where their keys lie ───────────────────────────────────────┴──► a share for each data-parallel rank

Work is balanced first, and then as little moves as that allows. Calls on one mesh count the same work, and the first of
them that takes some samples decides for the others, which find them where they need them.

shares of a call: which ranks need which samples ──┐
                                                   ├──► what is not there ──► plan_redistribution ──┐
BufferedSample.places: who has what ───────────────┘                                                │
                       ┌────────────────────────────────────────────────────────────────────────────┘
                       ├──► Give: to each rank that sends, its own parcels
                       └──► DataTransfer: to each that takes or passes on, its own
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.dataflow import DataflowGraph
from corral.scheduling.mesh import Mesh
from corral.scheduling.model_function_call import CallType, ModelFunctionCall
from corral.scheduling.packing import TYPICAL_SHAPE, TransformerShape, forward_flops, partition_near_owners
from corral.scheduling.redistribution import Demand, Parcel, plan_redistribution
from corral.workers.data.sequence_sample import KEY_LAYOUTS, KeySpecs, key_spec
from corral.workers.master.sequence_buffer import BufferedSample, note_held
from corral.workers.requests.messages import DataTransfer, Give

Shares = Sequence[Sequence[BufferedSample]]
"""The samples of each data-parallel rank of a mesh, by dp rank."""
_TRAINING_FORWARDS = 3  # a backward pass takes as much as two forward passes


class Dealer:
    """Deals the samples of one graph's calls."""

    def __init__(self, spec: MasterWorkerSpec, graph: DataflowGraph) -> None:
        self._spec = spec
        self._shapes: dict[tuple[int, ...], list[TransformerShape]] = {}
        self._dp_ranks: dict[tuple[int, ...], dict[int, int]] = {}
        self._last: dict[tuple[int, ...], tuple[Sequence[BufferedSample], Shares]] = {}
        """What was dealt last on a mesh, and how."""
        for call in graph.calls:
            shape = spec.shape_by_role.get(call.role, TYPICAL_SHAPE)
            count = _TRAINING_FORWARDS if call.call_type is CallType.TRAIN_STEP else 1
            mesh = spec.mesh(call.model_name)
            if call.call_type is CallType.EVALUATE and mesh.ranks in self._shapes:
                continue  # held-out rows are dealt as others are, and do not change how those are
            self._shapes.setdefault(mesh.ranks, []).extend([shape] * count)
            self._dp_ranks[mesh.ranks] = {rank: mesh.coords(rank).dp_rank for rank in mesh.ranks}

    def deal(self, call: ModelFunctionCall, samples: Sequence[BufferedSample]) -> Shares:
        """The samples of each data-parallel rank of the call's mesh."""
        mesh = self._spec.mesh(call.model_name)
        if mesh.dims.dp == 1:
            return [samples]
        dealt, shares = self._last.get(mesh.ranks, ([], [[] for _ in range(mesh.dims.dp)]))
        if dealt != samples:
            shares = self._deal_anew(call, mesh, samples)
            if call.call_type is not CallType.GENERATE:  # its answers will have other lengths than its prompts
                self._last[mesh.ranks] = samples, shares
        return shares

    def forget(self) -> None:
        """What was dealt will not be asked for again: the next step's samples can have the memory of these."""
        self._last.clear()

    def _deal_anew(self, call: ModelFunctionCall, mesh: Mesh, samples: Sequence[BufferedSample]) -> Shares:
        flops = forward_flops((sample.num_tokens for sample in samples), self._shapes[mesh.ranks])
        costs = [cost or 1.0 for cost in flops]  # nobody knows how long the answers to a prompt will be
        owners = _owners(samples, call.input_keys, self._dp_ranks[mesh.ranks])
        parts = partition_near_owners(costs, owners, num_parts=mesh.dims.dp)
        return [[samples[index] for index in part] for part in parts]


def _owners(samples: Sequence[BufferedSample], keys: Sequence[str], dp_ranks: Mapping[int, int]) -> list[int | None]:
    """For each sample the data-parallel rank that holds most of its keys; None if none holds anything."""
    known: dict[int, int | None] = {}  # by id of what samples share
    owners: list[int | None] = []
    for sample in samples:
        places = sample.places
        if id(places) not in known:
            held = Counter(dp_ranks[rank] for key in keys for rank in places.get(key, ()) if rank in dp_ranks)
            known[id(places)] = max(held, key=lambda dp_rank: (held[dp_rank], -dp_rank), default=None)
        owners.append(known[id(places)])
    return owners


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
