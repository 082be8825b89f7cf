"""The PyTorch-native backend: a transformers model, packed forward passes, FSDP2 over data and context-parallel ranks.

sample ─► micro-batches ─► packed forward ─► loss_fn ─► backward (each: sum of losses / tokens of the global batch)
                                                            │ FSDP2 adds gradients up over the ranks
         one all-reduce of the mesh: |gradient|², statistics ◄┘
                              │ finite ─► clip ─► optimizer ─► weights finite? │ not finite ─► nothing changes, counted
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from corral.experiments.config.model import LoraConfig, OptimizerConfig
from corral.experiments.trial.directory import fsync_directory
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends import train_state
from corral.workers.backends.adapter_files import adapter_config, write_adapter
from corral.workers.backends.base import LOSS_MASK, LossFunction, StepCondition
from corral.workers.backends.companion_files import companion_files
from corral.workers.backends.context_parallel import cut_row
from corral.workers.backends.heads import head_named
from corral.workers.backends.learning_rate import learning_rate
from corral.workers.backends.lora import (
    count_parameters,
    fold_sums,
    merged_weights,
    sum_of_frozen,
    trained,
)
from corral.workers.backends.micro_batches import MicroBatch, make_micro_batches, plan_micro_batches, scatter_to_answers
from corral.workers.backends.offload import Offloaded, offload, own_parameters, own_state
from corral.workers.backends.optimizers import make_optimizer, set_learning_rate
from corral.workers.backends.over_ranks import load_over_ranks
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.sharding import local, reshard, take_over, whole
from corral.workers.backends.tensor_parallel import squared_norm, sum_gradients_of_own_heads
from corral.workers.backends.weight_deltas import WeightBase
from corral.workers.backends.weight_files import as_stored, write_weights
from corral.workers.checkpoint.durable_file import FileEntry, no_progress, write_durable
from corral.workers.data.sequence_sample import SequenceSample

logger = logging.getLogger(__name__)

_SKIPPED = {"train/skipped_nonfinite": 0.0, "train/skipped_empty": 0.0, "train/skipped_early_stop": 0.0}


class FSDPEngine:
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
        total_steps: int = 1,
        micro_batches: MicroBatchSpec | None = None,
        seed: int = 0,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Load the model and cut it over the ranks.

        Args:
            model_directory: local directory in Hugging Face's format.
            context: this rank's place; the model lives on `context.device`.
            head: a name of `HEADS`: what the model says of a micro-batch.
            optimizer: None for a model that is never trained (a reference).
            lora: trains adapters in place of the weights.
            total_steps: optimizer steps of the whole run, which the learning rate's schedule spans.
            micro_batches: see `TrainEngine`; None takes whatever comes as one.
            seed: with the step number, decides every random number of a step.
            compute_dtype: float32 or bfloat16.
        """
        assert lora is None or optimizer is not None, "adapters that nothing trains"
        self._directory = model_directory
        self.context = context
        self._config = optimizer
        self._total_steps = total_steps
        self.micro_batches = micro_batches or MicroBatchSpec()
        self._seed = seed
        self._compute_dtype = compute_dtype
        self.step = 0
        self.num_nonfinite = 0
        self.is_damaged = False
        self._head = head_named(head)
        self._model: nn.Module = load_over_ranks(
            model_directory, self._head, context, lora, seed=seed, compute_dtype=compute_dtype
        )
        self._offloaded: Offloaded | None = None
        self.num_parameters, self.num_trained = count_parameters(self._model)
        of_all_ranks = context.sum_over_mesh({"sum_of_frozen": float(sum_of_frozen(self._model))})
        self._sum_of_frozen = fold_sums(of_all_ranks["sum_of_frozen"])
        self._has_told_of_deltas = False
        self._companions: dict[str, bytes] = {}
        self._adapter_config: bytes | None = None
        if lora is not None:
            self._adapter_config = adapter_config(self._model, lora, base=model_directory, head=head)
        if context.is_first:
            config: Any = self._model.config
            self._companions = companion_files(model_directory, config, self._head, dtype=compute_dtype)
        self._optimizer = (
            None if optimizer is None else make_optimizer(self.model, optimizer, compute_dtype=compute_dtype)
        )

    @property
    def model(self) -> nn.Module:
        """The module itself, for evaluation by generation; cut over the ranks where there are several.

        Whatever reads weights comes by here, and finds them on the device.
        """
        self.onload()
        return self._model

    # --- computing --------------------------------------------------------------------------------------------------

    def train_batch(
        self,
        sample: SequenceSample,
        *,
        loss_fn: LossFunction[Any],
        temperature: float = 1.0,
        counted: str = LOSS_MASK,
        keeps_groups: bool = False,
        may_step: StepCondition | None = None,
    ) -> dict[str, float]:
        """See `TrainEngine.train_batch`."""
        optimizer, config = self._require_optimizer()
        local_count = float(np.count_nonzero(sample.data[counted])) if len(sample) else 0.0
        count = self.context.sum_over_ranks({"count": local_count})["count"]
        if count == 0.0:
            return _SKIPPED | {"train/skipped_empty": 1.0}
        torch.manual_seed(_step_seed(self._seed, self.step))
        self.model.train()
        optimizer.zero_grad(set_to_none=True)
        sums: dict[str, float] = defaultdict(float)
        for micro_batch in self._micro_batches(sample, keeps_groups=keeps_groups):
            output = loss_fn(self._scores(micro_batch, temperature), micro_batch)
            torch.autograd.backward(output.loss_sum / count)
            sums["loss"] += float(output.loss_sum.detach())
            for name, value in output.stats.items():
                sums[name] += float(value)
        return self._apply_gradients(optimizer, config, count, dict(sums), may_step)

    @torch.no_grad()
    def forward(self, sample: SequenceSample, *, temperature: float = 1.0) -> dict[str, npt.NDArray[np.float32]]:
        """See `TrainEngine.forward`."""
        self.model.eval()
        outputs: dict[str, list[tuple[MicroBatch, Tensor]]] = {name: [] for name in self._head.layouts}
        for micro_batch in self._micro_batches(sample):
            scores = self._scores(micro_batch, temperature)
            if not micro_batch.is_padding:
                for name, values in self._head.by_name(scores).items():
                    outputs[name].append((micro_batch, values.cpu()))
        return {name: scatter_to_answers(sample, outputs[name], layout) for name, layout in self._head.layouts.items()}

    def _micro_batches(self, sample: SequenceSample, *, keeps_groups: bool = False) -> Iterator[MicroBatch]:
        """This rank's micro-batches, as many as the rank with the most has."""
        plan = plan_micro_batches(sample, self.micro_batches, keeps_groups=keeps_groups)
        count = int(self.context.max_over_ranks({"micro_batches": len(plan)})["micro_batches"])
        return make_micro_batches(sample, plan, count=count, device=self.context.device)

    def _scores(self, micro_batch: MicroBatch, temperature: float) -> Any:
        """The head's scores of a whole micro-batch, on every rank that has a part of it."""
        context, group = self.context, self.context.cp_group
        if group is None:
            return self._own_scores(micro_batch, temperature)
        part = cut_row(micro_batch, rank=context.coords.cp_rank, num_ranks=context.cp_size)
        own = self._own_scores(part.micro_batch, temperature)
        return self._head.joined(own, lambda scores, layout: part.join(scores, layout, group))

    def _own_scores(self, micro_batch: MicroBatch, temperature: float) -> Any:
        with torch.autocast(
            self.context.device.type,
            dtype=self._compute_dtype,
            enabled=self._compute_dtype != torch.float32,
            cache_enabled=False,  # it would hold what `cast_per_use` lets go
        ):
            return self._head.scores(self.model, micro_batch, temperature=temperature)

    def _apply_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        count: float,
        sums: dict[str, float],
        may_step: StepCondition | None,
    ) -> dict[str, float]:
        """Clip and step, or skip; all ranks decide alike because they decide on the same sums."""
        parameters = self._trained()
        if self.context.tp_group is not None:
            sum_gradients_of_own_heads(parameters.items(), self.context.tp_group)
        squares = squared_norm(parameters.values(), tensor_ranks=self.context.tp_size)
        if not self.context.is_dp_head:  # the ranks of one data-parallel rank have made the same sums
            sums = dict.fromkeys(sums, 0.0)
        total = self.context.sum_over_mesh(sums | {"squared_norm": squares})
        norm = math.sqrt(total.pop("squared_norm"))
        means = {name: value / count for name, value in total.items()}
        if not (math.isfinite(norm) and math.isfinite(total["loss"])):
            optimizer.zero_grad(set_to_none=True)
            self.num_nonfinite += 1
            return _SKIPPED | {"train/skipped_nonfinite": 1.0, "train/tokens": count}
        if may_step is not None and not may_step(means):
            optimizer.zero_grad(set_to_none=True)
            return means | _SKIPPED | {"train/skipped_early_stop": 1.0, "train/tokens": count}
        if norm > config.gradient_clipping:
            for parameter in parameters.values():
                if parameter.grad is not None:
                    local(parameter.grad).mul_(config.gradient_clipping / norm)
        rate = learning_rate(config, step=self.step, total_steps=self._total_steps)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.is_damaged = not self._are_weights_finite()
        return means | _SKIPPED | {"train/grad_norm": norm, "train/lr": rate, "train/tokens": count}

    @torch.no_grad()
    def _are_weights_finite(self) -> bool:
        """Whether every rank's weights are: a finite gradient and a large learning rate can still overflow them."""
        finite = [torch.isfinite(local(parameter)).all() for parameter in self._trained().values()]
        is_finite = bool(torch.stack(finite).all())  # one wait for the device, not one per parameter
        return self.context.sum_over_mesh({"not_finite": float(not is_finite)})["not_finite"] == 0.0

    def _require_optimizer(self) -> tuple[torch.optim.Optimizer, OptimizerConfig]:
        if self._optimizer is None or self._config is None:
            raise ValueError(f"the model from {self._directory} was loaded without an optimizer and cannot be trained")
        return self._optimizer, self._config

    # --- saving -----------------------------------------------------------------------------------------------------

    def save_weights(
        self, directory: Path, *, base: Path | None = None, on_progress: Callable[[], None] = no_progress
    ) -> dict[str, FileEntry]:
        """See `TrainEngine.save_weights`."""
        directory.mkdir(parents=True, exist_ok=True)
        weight_base = WeightBase.of(base) if base is not None else None
        files = write_weights(
            directory,
            as_stored(self.model, self.export_weights(), dtype=self._compute_dtype),
            rank=self.context.place,
            num_ranks=self.context.world_size,
            base=weight_base,
            on_progress=on_progress,
        )
        if weight_base is not None:
            self._tell_of_missing_deltas(weight_base)
        for name, content in self._companions.items():
            files[name] = write_durable(directory / name, [content])
        if self._adapter_config is not None:
            adapter = {name: whole(parameter) for name, parameter in self._trained().items()}  # a collective
            if self.context.is_first:
                files |= write_adapter(directory, adapter, self._adapter_config, on_progress=on_progress)
        fsync_directory(directory)
        return files

    def _tell_of_missing_deltas(self, base: WeightBase) -> None:
        """Once: whoever asked for deltas, and trains what changes everywhere, should know that they save nothing."""
        if base.given_up and not self._has_told_of_deltas:
            self._has_told_of_deltas = True
            name, reason = next(iter(base.given_up.items()))
            logger.warning(
                "%s has no delta from %s, and the like is not said again: %s", name, base.directory.name, reason
            )

    def save_state(
        self,
        directory: Path,
        *,
        extra: train_state.Numbers | None = None,
        on_progress: Callable[[], None] = no_progress,
    ) -> dict[str, FileEntry]:
        """See `TrainEngine.save_state`; no rank waits for another one."""
        rank, num_ranks = self.context.place, self.context.world_size
        directory.mkdir(parents=True, exist_ok=True)
        files = train_state.write_shard(
            directory, self._trained(), self._optimizer, rank=rank, num_ranks=num_ranks, on_progress=on_progress
        )
        if rank == 0:
            header = train_state.TrainStateHeader(
                step=self.step,
                seed=self._seed,
                num_ranks=num_ranks,
                extra=extra or {},
                sum_of_frozen=self._sum_of_frozen,
            )
            files |= train_state.write_header(directory, header)
        fsync_directory(directory)
        return files

    def load_state(self, directory: Path, *, on_progress: Callable[[], None] = no_progress) -> train_state.Numbers:
        """See `TrainEngine.load_state`."""
        header = train_state.read_header(directory)
        if header.sum_of_frozen != self._sum_of_frozen:
            raise ValueError(
                f"the adapters in {directory} were trained beside other weights than those of {self._directory}; put "
                "those back, with the same dtype, or start a new trial"
            )
        train_state.read_shards(
            directory,
            self._trained(),
            self._optimizer,
            num_files=header.num_ranks,
            first_file=self.context.place * header.num_ranks // self.context.world_size,
            on_progress=on_progress,
        )
        self.step, self._seed = header.step, header.seed
        return header.extra

    # --- weights ----------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.export_weights`."""
        reshard(self.model)
        yield from merged_weights(self._model)

    def import_weights(self, weights: Iterable[tuple[str, Tensor]], *, eta: float = 1.0) -> None:
        """See `TrainEngine.import_weights`."""
        if self._adapter_config is not None:
            raise ValueError(
                f"the model from {self._directory} is trained by adapters, and its own weights stay as they are; let "
                "another role take over weights, or leave lora out"
            )
        take_over(self._parameters(), weights, eta=eta)

    def offload(self) -> None:
        """See `TrainEngine.offload`."""
        if self._offloaded is None:
            reshard(self._model)
            moments = [] if self._optimizer is None else own_state(self._optimizer)
            self._offloaded = offload([*own_parameters(self._model), *moments])

    def onload(self) -> None:
        """See `TrainEngine.onload`."""
        if self._offloaded is not None:
            self._offloaded.bring_back()
            self._offloaded = None

    def _parameters(self) -> dict[str, nn.Parameter]:
        """This rank's rows of every parameter, by name; a tied one is there once."""
        reshard(self.model)
        return dict(self.model.named_parameters())

    def _trained(self) -> dict[str, nn.Parameter]:
        """Those that a step changes: all of them, or adapters and a score layer."""
        return trained(self._parameters())


def _step_seed(seed: int, step: int) -> int:
    """A 63-bit seed of its own for every step."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0] >> 1)
