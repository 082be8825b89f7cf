"""Dealer: which data-parallel rank of a mesh works on which samples.

    samples of a go ──► their work, in all calls on this mesh ──┐
    where their keys lie ───────────────────────────────────────┴──► a share for each data-parallel rank

Work is balanced first, and then as little moves as that allows. Calls on one mesh count the same work, and the first of
them that takes some samples decides for the others, which find them where they need them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.dataflow import DataflowGraph
from corral.scheduling.mesh import Mesh
from corral.scheduling.model_function_call import CallType, ModelFunctionCall
from corral.scheduling.packing import TYPICAL_SHAPE, TransformerShape, forward_flops, partition_near_owners
from corral.workers.master.sequence_buffer import BufferedSample

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
