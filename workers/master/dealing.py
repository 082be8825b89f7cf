"""Dealer: which data-parallel rank of a mesh works on which samples.

    samples of a go ──► their work, in all calls on this mesh ──┐
    where their keys lie ───────────────────────────────────────┴──► a share for each data-parallel rank

Work is balanced first, and then as little moves as that allows. Calls on one mesh count the same work, so that the
first of them decides, and the others find their samples where they need them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.dataflow import DataflowGraph
from corral.scheduling.model_function_call import CallType, ModelFunctionCall
from corral.scheduling.packing import TYPICAL_SHAPE, TransformerShape, forward_flops, partition_near_owners
from corral.workers.master.sequence_buffer import SequenceBuffer

_TRAINING_FORWARDS = 3  # a backward pass takes as much as two forward passes


class Dealer:
    """Deals the samples of one graph's calls."""

    def __init__(self, spec: MasterWorkerSpec, graph: DataflowGraph) -> None:
        self._spec = spec
        self._shapes: dict[tuple[int, ...], list[TransformerShape]] = {}
        self._dp_ranks: dict[tuple[int, ...], dict[int, int]] = {}
        for call in graph.step_calls:
            shape = spec.shape_by_role.get(call.role, TYPICAL_SHAPE)
            count = _TRAINING_FORWARDS if call.call_type is CallType.TRAIN_STEP else 1
            mesh = spec.mesh(call.model_name)
            self._shapes.setdefault(mesh.ranks, []).extend([shape] * count)
            self._dp_ranks[mesh.ranks] = {rank: mesh.coords(rank).dp_rank for rank in mesh.ranks}

    def deal(self, call: ModelFunctionCall, uids: Sequence[str], buffer: SequenceBuffer) -> list[list[str]]:
        """The samples of each data-parallel rank of the call's mesh."""
        mesh = self._spec.mesh(call.model_name)
        if mesh.dims.dp == 1:
            return [list(uids)]
        costs = forward_flops((buffer.samples[uid].num_tokens for uid in uids), self._shapes[mesh.ranks])
        places = self._dp_ranks[mesh.ranks]
        owners = [_owner(buffer.located[uid], call.input_keys, places) for uid in uids]
        parts = partition_near_owners(costs, owners, num_parts=mesh.dims.dp)
        return [[uids[index] for index in part] for part in parts]


def _owner(located: Mapping[str, Set[int]], keys: Sequence[str], dp_ranks: Mapping[int, int]) -> int | None:
    """The data-parallel rank that holds most of a sample's keys; None if none holds anything."""
    held = Counter(dp_ranks[rank] for key in keys for rank in located.get(key, ()) if rank in dp_ranks)
    return max(held, key=lambda dp_rank: (held[dp_rank], -dp_rank)) if held else None
