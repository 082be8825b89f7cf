"""The megatron backend: data, tensor, pipeline and context parallel training of a model by megatron-core.

micro-batches ─► stages of the model (below) ─► scores ─► loss ─► gradients, added up over the ranks
                                                      distributed optimizer: norm over all ranks, step ◄┘

`mesh_engine.py` describes the path of the gradients; what differs from the fsdp backend is where a model's numbers
are: layers are cut over the ranks of a stage, stages follow each other, and each data-parallel rank keeps a shard of
the optimizer.
"""

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore  # re-exported by torch.distributed, but not for type checkers
from transformers import AutoConfig

from corral.experiments.config.model import LoraConfig
from corral.workers.backends import train_state
from corral.workers.backends.context_parallel import RowPart, cut_row
from corral.workers.backends.files.tensors import stored_slices
from corral.workers.backends.files.weights import as_stored
from corral.workers.backends.lora import fold_sums, sum_of_bits
from corral.workers.backends.megatron.bridge import SCORE, SCORE_BIAS, Bridge
from corral.workers.backends.megatron.experts import stack_experts
from corral.workers.backends.megatron.lora import Adapters
from corral.workers.backends.megatron.model import ScoringModel, make_model
from corral.workers.backends.megatron.optimizer import make_optimizer, with_gradients
from corral.workers.backends.megatron.state import StageState
from corral.workers.backends.megatron.weights import StageWeights
from corral.workers.backends.megatron.without_gpu import stand_in_for_gpu
from corral.workers.backends.mesh_engine import Loss, MeshEngine
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.parallel_context import ParallelContext, collectives_of
from corral.workers.backends.recompute import recompute_layers

logger = logging.getLogger(__name__)


# Micro-batches through the stages of a model, forward and backward, by Megatron's schedules.
#
#     micro-batch ── cut_row ──► this rank's tokens
#     stage 0: embedding, layers ──hidden──► stage 1: layers, head ──► scores ──► loss ──► gradient ──► stage 1, stage 0
#                                                                        │
#       every rank gets the scores of every whole micro-batch, so that ◄─┘
#       what an algorithm makes of them and counts is the same on all
#
# One stage runs all micro-batches one after the other; several run them 1F1B (Narayanan et al. 2021,
# https://arxiv.org/abs/2104.04473, section 2.2.1): one forward, one backward, so that few activations wait.


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
        """The scores of each micro-batch on every rank; `finish` has received them on the last stage."""
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


# A rank's place in a mesh ──► the process groups that Megatron computes in.
#
#     ParallelContext ── process_groups ──► ProcessGroupCollection, handed to model, schedule and optimizer
#
# Nothing of Megatron's own global state is set up, so that meshes of several roles may differ, and share some ranks.


def process_groups(context: ParallelContext) -> ProcessGroupCollection:
    """The groups of this rank. An expert's matrices are cut over the ranks that other matrices are cut over.

    Those of several ranks are `mesh_contexts`'s; the group of this rank alone is formed here, with nobody's help.
    Megatron knows of no context-parallel ranks (model.py says why): they share optimizer and gradients with the
    data-parallel ones, as if each had short sequences of its own.
    """
    if (
        not dist.is_initialized()
    ):  # a trainer group of one has formed no groups, and Megatron asks for its rank in many places
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


class MegatronEngine(MeshEngine):
    """A `MeshEngine` over megatron-core's model with one of the `HEADS`.

    The optimizer's master weights and moments are float32; `compute_dtype` is that of the model's own weights, of its
    products, and of the weights that `save_weights` writes. Adapters (`lora.py`), where there are any, are all that is
    trained and resumed from, and what is exported is what the model and they amount to.
    """

    def _load(self) -> Any:
        with ExitStack() as stack:
            return self._load_from(stored_slices(self.directory, stack))

    def _load_from(self, slices: Mapping[str, Any]) -> Any:
        """
        Args:
            slices: the tensors of the model's directory.
        """
        context, head, lora = self.context, self._head, self.lora
        if context.device.type == "cpu":
            stand_in_for_gpu()
        self._groups = process_groups(context)
        model_parallel_cuda_manual_seed(self.seed, tp_rank=context.coords.tp_rank, ep_rank=0, etp_rank=0)
        self._hf_config: Any = AutoConfig.from_pretrained(self.directory, local_files_only=True)
        self._bridge = Bridge(self._hf_config, self._groups, head=self.head, dtype=self.compute_dtype)
        stage = make_model(
            self._bridge,
            self._groups,
            head=head,
            has_score_bias=SCORE_BIAS in slices,
            cp_group=context.cp_group,
        ).to(context.device)
        if lora is not None and head.has_score_layer and stage.post_process:
            stage.output_layer.float()  # trained beside adapters, and of their type
        self._weights = StageWeights(self._bridge.names(stage), self._bridge, self._groups, context.device)
        recompute_layers(stage.decoder.layers, self.recompute)
        self._weights.take_over(_needed(self.directory, slices, self._weights.stored_shapes()))
        self._adapters: Adapters | None = None
        self._trained = self._weights
        if lora is not None:
            self._adapters = self._make_adapters(lora, stage, slices)
            self._trained = self._adapters.trained
        self._trainee: Any = stage
        if self.optimizer is not None:
            self._trainee = with_gradients(stage, self._groups)
            self._optimizer = make_optimizer(self._trainee, self.optimizer, self._groups)
            stage.config.finalize_model_grads_func = self._finish_gradients
        self._pipeline = Pipeline(stage, self._trainee, self._groups, context)
        self.num_parameters, self.num_trained = self._weights.num_parameters, self._trained.num_parameters
        return self._hf_config

    def _make_adapters(self, lora: LoraConfig, stage: Any, slices: Mapping[str, Any]) -> Adapters:
        """They alone draw at random: first values, and dropout."""
        adapters = Adapters(lora, stage, self._weights, self._bridge)
        adapters.initialize(self._bridge, seed=self.seed)
        frozen = {name: shape for name, shape in self._weights.stored_shapes().items() if adapters.is_frozen(name)}
        ranks, mesh_rank = self.context.mesh.dims.world_size, self.context.mesh_rank
        own = {name: shape for name, shape in frozen.items() if zlib.crc32(name.encode()) % ranks == mesh_rank}
        parts = _needed(self.directory, slices, own)
        own_sum = fold_sums(sum(sum_of_bits(name, part.to(self.compute_dtype)) for name, part in parts))
        self._note_adapters(lora, adapters.layers, own_sum=own_sum)
        return adapters

    @property
    def model(self) -> nn.Module:
        """The whole model by transformers, as it is now, for evaluation by generation: a copy on every rank.

        A collective of the model's ranks, as a model that is cut over ranks always is. Tensor by tensor: whole weights
        are there once, which is what the plan of memory counts.
        """
        whole = self._module_of_transformers(self.context.device)
        missing = dict(whole.named_parameters())  # a tied output is not named twice
        for name, tensor in self.export_weights():
            missing.pop(name).data.copy_(tensor)
        assert not missing, f"{sorted(missing)}"
        return whole

    def _module_of_transformers(self, device: torch.device | str) -> nn.Module:
        """Of this model's configuration, with weights that are to be written; on `meta` it has none."""
        with torch.device(device):
            module: nn.Module = self._head.model_class.from_config(self._hf_config, dtype=self.compute_dtype)
        return module

    # --- computing --------------------------------------------------------------------------------------------------

    def _forward(self, micro_batches: Iterator[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        self._trainee.eval()
        rows = list(micro_batches)
        return zip(rows, self._pipeline.forward(rows), strict=True)

    def _backward(self, micro_batches: Iterator[MicroBatch], loss: Loss) -> None:
        torch.manual_seed(self._seed_of_step() ^ self._groups.pp.rank())  # stages have other layers, which draw others
        self._trainee.train()
        self._pipeline.backward(list(micro_batches), loss)

    def _finish_gradients(self, models: list[Any], _: Tensor | None, **options: Any) -> None:
        """Over the ranks; without Megatron's division by tokens, since a loss carries the mean of the global batch."""
        finalize_model_grads(models, None, pg_collection=self._groups)

    def _squared_norm(self) -> Tensor:
        self._optimizer.prepare_grads()
        norm: Tensor = self._optimizer.squared_norm()
        return norm.to(self.context.device)

    # --- saving -----------------------------------------------------------------------------------------------------

    @cached_property
    def _state(self) -> StageState:
        return StageState(self._trained, self._bridge, self._optimizer)

    def _stored_weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.to(self.compute_dtype)) for name, tensor in self._merged())

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        own = self._weights.export()
        return own if self._adapters is None else self._adapters.merged(own)

    def _whole_trained(self) -> Iterator[tuple[str, Tensor]]:
        return self._trained.export()

    def _state_shard(self, header: train_state.TrainStateHeader) -> train_state.StateShard:
        return self._state.shard(header, rank=self.context.mesh_rank)

    def _read_shard(self, stored: train_state.StoredState) -> None:
        """A collective: each rank gives the others its shard of the weights, once it has read it."""
        self._state.read(stored)
        if self._optimizer is None:
            self._weights.round_averages()
        else:
            self._optimizer.take_shards()

    # --- weights ----------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `MeshEngine.export_weights`."""
        self.onload()
        names, num_experts = self._bridge.expert_names, self._bridge.num_experts
        yield from stack_experts(self._merged(), names, num_experts=num_experts)

    def import_weights(self, weights: Iterable[tuple[str, Tensor]], *, eta: float = 1.0) -> None:
        """See `MeshEngine.import_weights`."""
        self._require_trained_weights()
        self.onload()
        given = as_stored(self._module_of_transformers("meta"), weights, dtype=torch.float32)
        self._weights.take_over(given, eta=eta, keeps_averages=self._optimizer is None)
        if self._optimizer is not None:
            self._optimizer.reload_model_params()

    def _own_tensors(self) -> list[Tensor]:
        tensors: list[Tensor] = [*self._trainee.parameters(), *self._weights.beside_parameters()]
        if self._optimizer is not None:
            tensors += self._trained_tensors()
            tensors += [buffer.grad_data for buffer in (*self._trainee.buffers, *self._trainee.expert_parallel_buffers)]
        return tensors


def _needed(
    directory: Path, slices: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a directory that the model has, one at a time; a score layer that it lacks is zero."""
    missing = sorted(shapes.keys() - slices.keys())
    if SCORE in missing:
        logger.warning("model %s has no score layer: its scores start at 0 and have to be trained", directory)
        yield SCORE, torch.zeros(shapes[SCORE])
        missing.remove(SCORE)
    if missing:
        raise ValueError(f"model {directory} lacks {len(missing)} weights, such as {missing[0]!r}")
    yield from ((name, stored[:]) for name, stored in slices.items() if name in shapes)
