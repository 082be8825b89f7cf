"""Dealer: which data-parallel rank of a mesh works on which samples.

    samples of a go ──► their work, in all calls on this mesh ──┐
    where their keys lie ───────────────────────────────────────┴──► a share for each data-parallel rank

Work is balanced first, and then as little moves as that allows. Calls on one mesh count the same work, so that the first
of them decides, and the others find their samples where they need them.
"""

from collections.abc import Sequence

from corral.experiments.worker_specs import MasterWorkerSpec
from corral.scheduling.dataflow import DataflowGraph
from corral.scheduling.mesh import Mesh
from corral.scheduling.model_function_call import CallType, ModelFunctionCall
from corral.scheduling.packing import TYPICAL_SHAPE, TransformerShape, forward_flops, partition_near_owners
from corral.workers.master.sequence_buffer import SequenceBuffer

_TRAINING_FORWARDS = 3  # a backward pass takes as much as two forward passes


class Dealer:
    """Deals the samples of one graph's calls."""

    def __init__(self, spec: MasterWorkerSpec, graph: DataflowGraph) -> None:
        self._spec = spec
        self._shapes: dict[tuple[int, ...], list[TransformerShape]] = {}
        for call in graph.step_calls:
            shape = spec.shape_by_role.get(call.role, TYPICAL_SHAPE)
            count = _TRAINING_FORWARDS if call.call_type is CallType.TRAIN_STEP else 1
            self._shapes.setdefault(spec.mesh(call.model_name).ranks, []).extend([shape] * count)

    def deal(self, call: ModelFunctionCall, uids: Sequence[str], buffer: SequenceBuffer) -> list[list[str]]:
        """The samples of each data-parallel rank of the call's mesh."""
        mesh = self._spec.mesh(call.model_name)
        if mesh.dims.dp == 1:
            return [list(uids)]
        costs = forward_flops((buffer.samples[uid].num_tokens for uid in uids), self._shapes[mesh.ranks])
        owners = [_owner(uid, call, mesh, buffer) for uid in uids]
        parts = partition_near_owners(costs, owners, num_parts=mesh.dims.dp)
        return [[uids[index] for index in part] for part in parts]


def _owner(uid: str, call: ModelFunctionCall, mesh: Mesh, buffer: SequenceBuffer) -> int | None:
    """The data-parallel rank that holds most of what the call reads of a sample; None if none holds anything."""
    held = [0] * mesh.dims.dp
    for key in call.input_keys:
        for rank in buffer.located[uid].get(key, ()):
            if rank in mesh:
                held[mesh.coords(rank).dp_rank] += 1
    most = max(held)
    return held.index(most) if most else None
