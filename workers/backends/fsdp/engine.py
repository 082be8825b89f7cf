"""The PyTorch-native backend: a transformers model, packed forward passes, FSDP2 over data and context-parallel ranks.

micro-batch ─► row, this rank's part (c) ─► packed forward ─► scores of the whole row ─► loss ─► backward
                                                                        FSDP2 adds gradients up over the ranks ◄┘

What becomes of the gradients is told in `mesh_engine.py`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from corral.workers.backends import train_state
from corral.workers.backends.context_parallel import cut_row
from corral.workers.backends.files.weights import as_stored
from corral.workers.backends.fsdp.loading import load_over_ranks
from corral.workers.backends.fsdp.optimizers import make_optimizer
from corral.workers.backends.fsdp.packing_proof import refuse_unless_packed_alike
from corral.workers.backends.fsdp.state import make_shard, read_state
from corral.workers.backends.fsdp.tensor_parallel import squared_norm, sum_gradients_of_own_parts
from corral.workers.backends.host_copies import parameters_that_can_leave
from corral.workers.backends.lora import (
    adapted_layers,
    count_parameters,
    merged_weights,
    sum_of_frozen,
    trained,
)
from corral.workers.backends.mesh_engine import Loss, MeshEngine
from corral.workers.backends.micro_batches import MicroBatch, with_last
from corral.workers.backends.recompute import recompute_layers
from corral.workers.backends.sharding import layers_of, local, reshard, sum_gradients, take_over, whole
from corral.workers.shared_prompts.rule import why_not_shared


class FSDPEngine(MeshEngine):
    """A `MeshEngine` over a transformers model with one of the `HEADS`.

    Master weights and optimizer state are float32; `compute_dtype` is the type of the matrix products and of the
    weights that `save_weights` writes. Adapters (`lora.py`), where there are any, are all that is trained and resumed
    from, and what is exported is what the model and they amount to. The rest is told in `MeshEngine`.
    """

    def _load(self) -> Any:
        context, lora, compute_dtype = self.context, self.lora, self.compute_dtype
        self._model: nn.Module = load_over_ranks(
            self.directory,
            self._head,
            context,
            lora,
            seed=self.seed,
            compute_dtype=compute_dtype,
            is_held_low=self.is_held_low,
        )
        self._unshared_because = why_not_shared(
            self._model, lora, ranks_of_row=context.mesh.dims.cp, device=context.device, compute_dtype=compute_dtype
        )
        recompute_layers(layers_of(self._model), self.recompute)
        self.num_parameters, self.num_trained = count_parameters(self._model)
        if lora is not None:
            own_sum = sum_of_frozen(self._model, counts_copies=context.coords.tp_rank == 0)
            self._note_adapters(lora, adapted_layers(self._model), own_sum=own_sum)
        if self.optimizer is not None:
            self._optimizer = make_optimizer(self._model, self.optimizer, compute_dtype=compute_dtype)
        refuse_unless_packed_alike(
            self._model, self._head, self._own_scores, context=context, compute_dtype=compute_dtype
        )
        return self._model.config

    @property
    def model(self) -> nn.Module:
        """The module itself, for evaluation by generation; cut over the ranks where there are several.

        Whatever reads weights comes by here, and finds them on the device.
        """
        self.onload()
        return self._model

    # --- computing --------------------------------------------------------------------------------------------------

    def _forward(self, micro_batches: Iterator[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        self._model.eval()
        for micro_batch in micro_batches:
            yield micro_batch, self._scores(micro_batch)
        reshard(self._model)  # no backward pass will

    def _backward(self, micro_batches: Iterator[MicroBatch], loss: Loss) -> None:
        torch.manual_seed(self._seed_of_step())
        self._model.train()
        for micro_batch, is_last in with_last(micro_batches):
            sum_gradients(self._model, is_last or self.gradient_sums == "each_micro_batch")
            torch.autograd.backward(loss(self._scores(micro_batch), micro_batch))

    def _scores(self, micro_batch: MicroBatch) -> Tensor:
        """The head's columns of a whole micro-batch, on every rank that has a part of it."""
        context = self.context
        if context.cp_group is None:
            return self._own_scores(micro_batch)
        part = cut_row(micro_batch, rank=context.coords.cp_rank, num_ranks=context.mesh.dims.cp)
        return part.join(self._own_scores(part.micro_batch), self._head.layout, context.cp_group)

    def _own_scores(self, micro_batch: MicroBatch) -> Tensor:
        with torch.autocast(
            self.context.device.type,
            dtype=self.compute_dtype,
            enabled=self.compute_dtype != torch.float32,
            cache_enabled=False,  # it would hold what `cast_per_use` lets go
        ):
            return self._head.columns(self.model, micro_batch)

    def _squared_norm(self) -> Tensor:
        parameters = self._trained()
        if self.context.tp_group is not None:
            sum_gradients_of_own_parts(parameters.items(), self.context.tp_group)
        return squared_norm(parameters.values(), tensor_ranks=self.context.mesh.dims.tp, device=self.context.device)

    # --- saving -----------------------------------------------------------------------------------------------------

    def _stored_weights(self) -> Iterator[tuple[str, Tensor]]:
        # Rounded before they are gathered, which is half as much to send and to hold.
        return as_stored(self.model, self._whole_weights(self.compute_dtype), dtype=self.compute_dtype)

    def _whole_trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, whole(parameter)) for name, parameter in self._trained().items())

    def _state_shard(self, header: train_state.TrainStateHeader) -> train_state.StateShard:
        content_of = local if self._hosted is None else self._hosted.content_of
        return make_shard(self._trained(), self._optimizer, header, rank=self.context.place, content_of=content_of)

    def _read_share(self, stored: train_state.StoredState) -> None:
        read_state(stored, self._trained(), self._optimizer)

    # --- weights ----------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `MeshEngine.export_weights`."""
        return self._whole_weights(torch.float32)

    def _whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        reshard(self.model)
        yield from merged_weights(self._model, dtype=dtype)

    def import_weights(self, weights: Iterable[tuple[str, Tensor]], *, eta: float = 1.0) -> None:
        """See `MeshEngine.import_weights`."""
        self._require_trained_weights()
        assert eta == 1.0 or not self.is_held_low, "an average of weights moves by less than a low type can tell"
        take_over(self._parameters(), weights, eta=eta)

    def _own_tensors(self) -> list[Tensor]:
        reshard(self._model)
        return parameters_that_can_leave(self._model)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """This rank's rows of every parameter, by name; a tied one is there once."""
        reshard(self.model)
        return dict(self.model.named_parameters())

    def _trained(self) -> dict[str, nn.Parameter]:
        """Those that a step changes: all of them, or adapters and a score layer."""
        return trained(self._parameters())
