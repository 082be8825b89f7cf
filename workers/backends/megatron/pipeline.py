"""Micro-batches through the stages of a model, forward and backward, by Megatron's schedules.

    micro-batch ── cut_row ──► this rank's tokens
    stage 0: embedding, layers ──hidden──► stage 1: layers, head ──► scores ──► loss ──► gradient ──► stage 1, stage 0
                                                                       │
      every rank gets the scores of every whole micro-batch, so that ◄─┘
      what an algorithm makes of them and counts is the same on all

One stage runs all micro-batches one after the other; several run them 1F1B (Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, section 2.2.1): one forward, one backward, so that few activations wait.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from corral.workers.backends.context_parallel import RowPart, cut_row
from corral.workers.backends.megatron.model import ScoringModel
from corral.workers.backends.mesh_engine import Loss
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.parallel_context import ParallelContext


class Pipeline:
    """One rank's stage in the schedule; all ranks of the model call the same methods with the same micro-batches."""

    def __init__(
        self, stage: ScoringModel, trainee: Any, groups: ProcessGroupCollection, context: ParallelContext
    ) -> None:
        """
        Args:
            trainee: the stage with buffers for its gradients, or the stage itself where nothing is trained.
            context: this rank's place, which says what part of a row it has.
        """
        self._stage = stage
        self._trainee = trainee
        self._groups = groups
        self._context = context

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The scores of each micro-batch, on every rank: [entries, numbers] float32."""
        if not micro_batches:
            return []  # Megatron's schedules want one
        return self._run(
            micro_batches,
            lambda scores, _: scores,
            forward_only=True,
            collect_non_loss_data=True,
        )

    def backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Add up the gradients of all micro-batches over the ranks of the model; every rank sees each loss computed."""

        def lose(scores: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Any]]:
            return loss(scores, micro_batch), torch.ones((), dtype=torch.int, device=scores.device), {}

        shared = self._run(micro_batches, lose, forward_only=False)
        if not self._stage.post_process:
            with torch.no_grad():
                for scores, micro_batch in zip(shared, micro_batches, strict=True):
                    loss(scores, micro_batch)

    def _run(self, micro_batches: Sequence[MicroBatch], finish: Callable[..., Any], **how: Any) -> list[Tensor]:
        """The scores of each micro-batch, which `finish` has been told on the last stage, on every rank."""
        collected: list[Tensor] = []

        def forward(rows: Iterator[MicroBatch], _: Any) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch = next(rows)
            part = self._part(micro_batch)

            def end(scores: Tensor, **_: Any) -> Any:
                whole_row = part.join(scores, self._stage.head.layout, self._context.cp_group)
                collected.append(whole_row.detach())
                return finish(whole_row, micro_batch)

            return self._stage.forward_row(part.micro_batch), end

        pipeline = self._groups.pp
        schedule = get_forward_backward_func(pp_size=pipeline.size(), vp_size=None)
        if pipeline.size() > 1:
            how["p2p_communicator"] = P2PCommunicator(pipeline, self._stage.config)
        schedule(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=[self._trainee],
            num_microbatches=len(micro_batches),
            seq_length=1,  # stages tell each other the length of each row
            micro_batch_size=1,
            pg_collection=self._groups,
            **how,
        )
        return self._shared(collected, micro_batches)

    def _part(self, micro_batch: MicroBatch) -> RowPart:
        """This rank's tokens, and as many more as make them divisible among the ranks of a layer."""
        dims, cp_rank = self._context.mesh.dims, self._context.coords.cp_rank
        multiple = dims.tp if self._stage.config.sequence_parallel else 1
        return cut_row(micro_batch, rank=cp_rank, num_ranks=dims.cp, part_multiple=multiple)

    def _shared(self, collected: list[Tensor], micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The scores that the last stage has, on all of them."""
        pipeline = self._groups.pp
        if pipeline.size() == 1:
            return collected
        head = self._stage.head
        sizes = [sum(head.layout.lengths(micro_batch.segment_lengths)) for micro_batch in micro_batches]
        shape = (sum(sizes), head.num_columns(micro_batches[0]))
        device = micro_batches[0].input_ids.device
        packed = torch.cat(collected) if collected else torch.empty(shape, dtype=torch.float32, device=device)
        dist.broadcast(packed, group=pipeline, group_src=pipeline.size() - 1)
        return list(torch.split(packed, sizes))
