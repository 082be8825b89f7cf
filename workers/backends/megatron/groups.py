"""A rank's place in a mesh ──► the process groups that Megatron computes in.

    ParallelContext ── process_groups ──► ProcessGroupCollection, handed to model, schedule and optimizer

Nothing of Megatron's own global state is set up, so that meshes of several roles may differ, and share some ranks.
"""

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch._C._distributed_c10d import HashStore  # re-exported by torch.distributed, but not for type checkers

from corral.workers.backends.parallel_context import ParallelContext, collectives_of


def process_groups(context: ParallelContext) -> ProcessGroupCollection:
    """The groups of this rank. An expert's matrices are cut over the ranks that other matrices are cut over.

    Those of several ranks are `mesh_contexts`'s; the group of this rank alone is formed here, with nobody's help.
    Megatron is told of no context-parallel ranks (model.py says why): they share optimizer and gradients with the
    data-parallel ones, as if each had short sequences of its own.
    """
    if not dist.is_initialized():  # a gang of one has formed no groups, and Megatron asks for its rank in many places
        dist.init_process_group(collectives_of(context.device), store=HashStore(), rank=0, world_size=1)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # scratch memory, which its layers share whatever their groups
        parallel_state._set_global_memory_buffer()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def formed(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        return alone if group is None else group

    tensor, pipeline, sharing = formed(context.tp_group), formed(context.pp_group), formed(context.shard_group)
    same_experts, model = formed(context.expert_dp_group), formed(context.model_group)
    is_end = pipeline.rank() in (0, pipeline.size() - 1)
    return ProcessGroupCollection(
        tp=tensor,
        pp=pipeline,
        mp=model,
        cp=alone,
        tp_cp=tensor,
        dp=formed(context.dp_group),
        dp_cp=sharing,
        tp_dp_cp=alone,
        ep=formed(context.ep_group),
        expt_tp=tensor,
        tp_ep=formed(context.tp_ep_group),
        tp_ep_pp=model,
        expt_dp=same_experts,
        intra_dp_cp=sharing,
        intra_expt_dp=same_experts,
        intra_dist_opt=formed(context.group),
        embd=formed(context.ends_group) if is_end else None,
        pos_embd=None,
    )
