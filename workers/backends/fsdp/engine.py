"""The PyTorch-native backend: a transformers model, packed forward passes, FSDP2 over data and context-parallel ranks.

micro-batch ─► row, this rank's part (c) ─► packed forward ─► scores of the whole row ─► loss ─► backward
                                                                        FSDP2 adds gradients up over the ranks ◄┘

What becomes of the gradients is told in `mesh_engine.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corral.experiments.config.model import GradientSums, LoraConfig, OptimizerConfig, Recompute
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends import train_state
from corral.workers.backends.context_parallel import cut_row
from corral.workers.backends.files.adapters import adapter_config
from corral.workers.backends.files.companions import companion_files
from corral.workers.backends.files.share import Adapter
from corral.workers.backends.files.weights import as_stored
from corral.workers.backends.fsdp.optimizers import make_optimizer, set_learning_rate
from corral.workers.backends.fsdp.over_ranks import load_over_ranks
from corral.workers.backends.fsdp.packing_proof import refuse_unless_packed_alike
from corral.workers.backends.fsdp.state import make_shard, read_state
from corral.workers.backends.fsdp.tensor_parallel import squared_norm, sum_gradients_of_own_parts
from corral.workers.backends.hosted_state import HostedState
from corral.workers.backends.lora import (
    count_parameters,
    fold_sums,
    layers_with_adapters,
    merged_weights,
    sum_of_frozen,
    trained,
)
from corral.workers.backends.mesh_engine import Loss, MeshEngine
from corral.workers.backends.micro_batches import MicroBatch, with_last
from corral.workers.backends.offload import own_parameters, own_state
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.recompute import recompute_layers
from corral.workers.backends.sharding import layers_of, reshard, sum_gradients, take_over, whole
from corral.workers.shared_prompts.rule import why_not_shared


class FSDPEngine(MeshEngine):
    """A `TrainEngine` over a transformers model with one of the `HEADS`.

    Master weights and optimizer state are float32; `compute_dtype` is the type of the matrix products and of the
    weights that `save_weights` writes. Adapters (`lora.py`), where there are any, are all that is trained and resumed
    from, and what is exported is what the model and they amount to. The rest is told in `TrainEngine`.
    """

    def __init__(
        self,
        model_directory: Path,
        *,
        context: ParallelContext,
        head: str = "lm",
        optimizer: OptimizerConfig | None,
        lora: LoraConfig | None = None,
        recompute: Recompute = "none",
        gradient_sums: GradientSums = "each_micro_batch",
        hosts_optimizer: bool = False,
        is_held_low: bool = False,
        total_steps: int = 1,
        micro_batches: MicroBatchSpec | None = None,
        seed: int = 0,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Load the model and cut it over the ranks.

        Args:
            lora: trains adapters in place of the weights.
            recompute: what of a layer is computed again in the backward pass.
            gradient_sums: when ranks add their gradients up; each has a whole one until then.
            hosts_optimizer: whether the state of the optimizer lies in host memory (hosted_state.py).
            is_held_low: whether weights that products alone read are held in `compute_dtype`, which changes none of its
                scores: for a model without an optimizer, which takes over weights whole or not at all.

        The others are told in `MeshEngine`.

        Raises:
            ValueError: if the layout cannot hold this model, or packed rows change what it computes.
        """
        assert lora is None or optimizer is not None, "adapters that nothing trains"
        assert optimizer is None or not is_held_low, "an optimizer changes float32"
        super().__init__(
            model_directory,
            context=context,
            head=head,
            optimizer=optimizer,
            total_steps=total_steps,
            micro_batches=micro_batches,
            seed=seed,
            compute_dtype=compute_dtype,
        )
        self._model: nn.Module = load_over_ranks(
            model_directory,
            self._head,
            context,
            lora,
            seed=seed,
            compute_dtype=compute_dtype,
            is_held_low=is_held_low,
        )
        self._is_held_low = is_held_low
        self._unshared_because = why_not_shared(
            self._model, lora, ranks_of_row=context.cp_size, device=context.device, compute_dtype=compute_dtype
        )
        self._sums_once = gradient_sums == "last_micro_batch"
        recompute_layers(layers_of(self._model), recompute)
        self.num_parameters, self.num_trained = count_parameters(self._model)
        if lora is not None:
            self._note_adapters(lora, model_directory, head)
        if context.is_first:
            config: Any = self._model.config
            self._companions = companion_files(model_directory, config, self._head, dtype=compute_dtype)
        self._hosted: HostedState | None = None
        if optimizer is not None:
            self._optimizer = make_optimizer(
                self._model, optimizer, compute_dtype=compute_dtype, is_hosted=hosts_optimizer
            )
            self._hosted = self._optimizer.hosted
        refuse_unless_packed_alike(
            self._model, self._head, self._own_scores, context=context, compute_dtype=compute_dtype
        )

    def _note_adapters(self, lora: LoraConfig, model_directory: Path, head: str) -> None:
        """What a state and an export of adapters say of the model that they stand on."""
        context = self.context
        own_sum = sum_of_frozen(self._model, counts_copies=context.coords.tp_rank == 0)
        self._sum_of_frozen = fold_sums(context.sum_over_mesh({"sum_of_frozen": float(own_sum)})["sum_of_frozen"])
        layers = layers_with_adapters(self._model)
        self._adapter_config = adapter_config(layers, lora, base=model_directory, head=head)

    @property
    def model(self) -> nn.Module:
        """The module itself, for evaluation by generation; cut over the ranks where there are several.

        Whatever reads weights comes by here, and finds them on the device.
        """
        self.onload()
        return self._model

    # --- computing --------------------------------------------------------------------------------------------------

    def _forward(self, micro_batches: Iterator[MicroBatch], *, temperature: float) -> Iterator[tuple[MicroBatch, Any]]:
        self._model.eval()
        for micro_batch in micro_batches:
            yield micro_batch, self._scores(micro_batch, temperature)
        reshard(self._model)  # no backward pass will

    def _backward(self, micro_batches: Iterator[MicroBatch], loss: Loss, *, temperature: float) -> None:
        torch.manual_seed(self._seed_of_step())
        self._model.train()
        self._drop_gradients()
        for micro_batch, is_last in with_last(micro_batches):
            sum_gradients(self._model, is_last or not self._sums_once)
            torch.autograd.backward(loss(self._scores(micro_batch, temperature), micro_batch))

    def _scores(self, micro_batch: MicroBatch, temperature: float) -> Any:
        """The head's scores of a whole micro-batch, on every rank that has a part of it."""
        context, group = self.context, self.context.cp_group
        if group is None:
            return self._own_scores(micro_batch, temperature)
        part = cut_row(micro_batch, rank=context.coords.cp_rank, num_ranks=context.cp_size)
        own = self._own_scores(part.micro_batch, temperature)
        return self._head.joined(own, lambda scores, layout: part.join(scores, layout, group))

    def _own_scores(self, micro_batch: MicroBatch, temperature: float = 1.0) -> Any:
        with torch.autocast(
            self.context.device.type,
            dtype=self._compute_dtype,
            enabled=self._compute_dtype != torch.float32,
            cache_enabled=False,  # it would hold what `cast_per_use` lets go
        ):
            return self._head.scores(self.model, micro_batch, temperature=temperature)

    def _squared_norm(self) -> Tensor:
        parameters = self._trained()
        if self.context.tp_group is not None:
            sum_gradients_of_own_parts(parameters.items(), self.context.tp_group)
        return squared_norm(parameters.values(), tensor_ranks=self.context.tp_size, device=self.context.device)

    def _trained_tensors(self) -> list[Tensor]:
        return list(self._trained().values())

    def _make_step(self, rate: float) -> None:
        optimizer, _ = self._require_optimizer()
        set_learning_rate(optimizer, rate)
        optimizer.step()

    def _drop_gradients(self) -> None:
        optimizer, _ = self._require_optimizer()
        optimizer.zero_grad(set_to_none=True)

    # --- saving -----------------------------------------------------------------------------------------------------

    def _stored_weights(self) -> Iterator[tuple[str, Tensor]]:
        # Rounded before they are gathered, which is half as much to send and to hold.
        return as_stored(self.model, self._whole_weights(self._compute_dtype), dtype=self._compute_dtype)

    def _adapter(self) -> Adapter | None:
        if self._adapter_config is None:
            return None
        tensors = {name: whole(parameter) for name, parameter in self._trained().items()}  # a collective
        return Adapter(tensors=tensors, config=self._adapter_config) if self.context.is_first else None

    def _state_shard(self, header: train_state.TrainStateHeader) -> train_state.StateShard:
        return make_shard(self._trained(), self._optimizer, header, rank=self.context.place, hosted=self._hosted)

    def _read_share(
        self, directory: Path, header: train_state.TrainStateHeader, on_progress: Callable[[], None]
    ) -> None:
        read_state(
            directory,
            header,
            self._trained(),
            self._optimizer,
            first_file=self._first_file(header),
            on_progress=on_progress,
            hosted=self._hosted,
        )

    # --- weights ----------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.export_weights`."""
        return self._whole_weights(torch.float32)

    def _whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        reshard(self.model)
        yield from merged_weights(self._model, dtype=dtype)

    def import_weights(self, weights: Iterable[tuple[str, Tensor]], *, eta: float = 1.0) -> None:
        """See `TrainEngine.import_weights`."""
        self._require_trained_weights()
        assert eta == 1.0 or not self._is_held_low, "an average of weights moves by less than a low type can tell"
        take_over(self._parameters(), weights, eta=eta)

    def _own_tensors(self) -> list[Tensor]:
        reshard(self._model)
        moments = [] if self._optimizer is None else own_state(self._optimizer)
        return [*own_parameters(self._model), *moments]

    def _parameters(self) -> dict[str, nn.Parameter]:
        """This rank's rows of every parameter, by name; a tied one is there once."""
        reshard(self.model)
        return dict(self.model.named_parameters())

    def _trained(self) -> dict[str, nn.Parameter]:
        """Those that a step changes: all of them, or adapters and a score layer."""
        return trained(self._parameters())
