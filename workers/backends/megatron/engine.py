"""The megatron backend: data, tensor and pipeline parallel training of a model by megatron-core.

sample ─► micro-batches ─► stages of the model (pipeline.py) ─► scores ─► loss_fn ─► gradients, added up over the ranks
                     norm over all ranks ─► finite ─► clip ─► distributed optimizer │ not finite ─► nothing changes

What it offers is told in `TrainEngine`; what differs from the fsdp backend is where a model's numbers are: layers are
cut over the ranks of a stage, stages follow each other, and each data-parallel rank keeps a share of the optimizer.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig

from corral.experiments.config.model import OptimizerConfig
from corral.experiments.trial.directory import fsync_directory
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends import train_state
from corral.workers.backends.base import LOSS_MASK, LossFunction, StepCondition
from corral.workers.backends.companion_files import companion_files
from corral.workers.backends.heads import head_named
from corral.workers.backends.learning_rate import learning_rate
from corral.workers.backends.megatron.bridge import SCORE, Bridge
from corral.workers.backends.megatron.groups import process_groups
from corral.workers.backends.megatron.model import make_model
from corral.workers.backends.megatron.optimizer import make_optimizer, with_gradients
from corral.workers.backends.megatron.pipeline import Pipeline
from corral.workers.backends.megatron.state import read_shares, write_shares
from corral.workers.backends.megatron.weights import StageWeights
from corral.workers.backends.megatron.without_gpu import stand_in_for_gpu
from corral.workers.backends.micro_batches import MicroBatch, make_micro_batches, plan_micro_batches, scatter_to_answers
from corral.workers.backends.offload import Offloaded, offload
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.token_scores import TokenScores
from corral.workers.backends.weight_deltas import WeightBase
from corral.workers.backends.weight_files import write_weights
from corral.workers.checkpoint.durable_file import FileEntry, no_progress, write_durable
from corral.workers.data.sequence_sample import SequenceSample

logger = logging.getLogger(__name__)

_SKIPPED = {"train/skipped_nonfinite": 0.0, "train/skipped_empty": 0.0, "train/skipped_early_stop": 0.0}


class MegatronEngine:
    """A `TrainEngine` over megatron-core's model with one of the `HEADS`.

    The optimizer's master weights and moments are float32; `compute_dtype` is that of the model's own weights, of its
    products, and of the weights that `save_weights` writes.
    """

    def __init__(
        self,
        model_directory: Path,
        *,
        context: ParallelContext,
        head: str = "lm",
        optimizer: OptimizerConfig | None,
        total_steps: int = 1,
        micro_batches: MicroBatchSpec | None = None,
        seed: int = 0,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Make this rank's part of the model, and read its weights.

        Args:
            model_directory: local directory in Hugging Face's format.
            context: this rank's place; the model lives on `context.device`.
            head: a name of `HEADS`: what the model says of a micro-batch.
            optimizer: None for a model that is never trained (a reference).
            total_steps: optimizer steps of the whole run, which the learning rate's schedule spans.
            micro_batches: see `TrainEngine`; None takes whatever comes as one.
            seed: kept for the state; nothing is drawn at random, since no layer has dropout.
            compute_dtype: float32 or bfloat16.

        Raises:
            ValueError: if the model is of a kind that Megatron would compute otherwise, or its directory lacks weights.
        """
        if context.device.type == "cpu":
            stand_in_for_gpu()
        self._directory = model_directory
        self.context = context
        self.micro_batches = micro_batches or MicroBatchSpec()
        self.step = 0
        self.num_nonfinite = 0
        self.is_damaged = False
        self._config = optimizer
        self._total_steps = total_steps
        self._seed = seed
        self._compute_dtype = compute_dtype
        self._head = head_named(head)
        self._offloaded: Offloaded | None = None
        self._groups = process_groups(context)
        model_parallel_cuda_manual_seed(seed, tp_rank=context.coords.tp_rank, ep_rank=0, etp_rank=0)
        self._hf_config: Any = AutoConfig.from_pretrained(model_directory, local_files_only=True)
        self._bridge = Bridge(self._hf_config, self._groups, head=head, dtype=compute_dtype)
        stage = make_model(self._bridge, self._groups, head=head).to(context.device)
        self._weights = StageWeights(stage, self._bridge, self._groups, context.device)
        self._weights.take_over(_stored_tensors(model_directory, needed=self._weights.stored_shapes()))
        self._trainee: Any = stage
        self._optimizer: Any = None
        if optimizer is not None:
            self._trainee = with_gradients(stage, self._groups)
            self._optimizer = make_optimizer(self._trainee, optimizer, self._groups)
            stage.config.finalize_model_grads_func = self._finish_gradients
        self._pipeline = Pipeline(stage, self._trainee, self._groups)
        self.num_parameters = self.num_trained = self._weights.num_parameters
        self._companions: dict[str, bytes] = {}
        if context.is_first:
            self._companions = companion_files(model_directory, self._hf_config, self._head, dtype=compute_dtype)

    @property
    def model(self) -> nn.Module:
        """The whole model by transformers, as it is now, for evaluation by generation: a copy on every rank.

        A collective of the model's ranks, as a model that is cut over ranks always is.
        """
        config = self._hf_config
        with torch.device(self.context.device):
            whole: nn.Module = self._head.model_class.from_config(config, dtype=self._compute_dtype)
        problems = whole.load_state_dict(dict(self.export_weights()), strict=False)
        missing = set(problems.missing_keys) - {"lm_head.weight" if self._bridge.has_tied_output else ""}
        assert not missing and not problems.unexpected_keys, f"{missing}, {problems.unexpected_keys}"
        return whole

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
        self.onload()
        self._trainee.train()
        self._drop_gradients(optimizer)
        sums: dict[str, float] = defaultdict(float)

        def loss(scores: Tensor, micro_batch: MicroBatch) -> Tensor:
            output = loss_fn(self._as_head_gives(scores), micro_batch)
            sums["loss"] += float(output.loss_sum.detach())
            for name, value in output.stats.items():
                sums[name] += float(value)
            return output.loss_sum / count

        micro_batches = list(self._micro_batches(sample, keeps_groups=keeps_groups))
        self._pipeline.backward(micro_batches, loss, temperature=temperature)
        return self._apply_gradients(optimizer, config, count, dict(sums), may_step)

    @torch.no_grad()
    def forward(self, sample: SequenceSample, *, temperature: float = 1.0) -> dict[str, npt.NDArray[np.float32]]:
        """See `TrainEngine.forward`."""
        self.onload()
        self._trainee.eval()
        micro_batches = list(self._micro_batches(sample))
        outputs: dict[str, list[tuple[MicroBatch, Tensor]]] = {name: [] for name in self._head.layouts}
        all_scores = self._pipeline.forward(micro_batches, temperature=temperature)
        for micro_batch, scores in zip(micro_batches, all_scores, strict=True):
            if not micro_batch.is_padding:
                for name, values in self._head.by_name(self._as_head_gives(scores)).items():
                    outputs[name].append((micro_batch, values.cpu()))
        return {name: scatter_to_answers(sample, outputs[name], layout) for name, layout in self._head.layouts.items()}

    def _micro_batches(self, sample: SequenceSample, *, keeps_groups: bool = False) -> Iterator[MicroBatch]:
        """This rank's micro-batches, as many as the rank with the most has, and at least one."""
        plan = plan_micro_batches(sample, self.micro_batches, keeps_groups=keeps_groups)
        count = int(self.context.max_over_ranks({"micro_batches": max(1, len(plan))})["micro_batches"])
        return make_micro_batches(sample, plan, count=count, device=self.context.device)

    def _as_head_gives(self, scores: Tensor) -> TokenScores | Tensor:
        if scores.shape[1] == 2:
            logprobs, entropy = scores.unbind(1)
            return TokenScores(logprobs, entropy.detach())
        return scores[:, 0]

    def _finish_gradients(self, models: list[Any], _: Tensor | None, **options: Any) -> None:
        """Over the ranks; without Megatron's division by tokens, since a loss carries the mean of the global batch."""
        finalize_model_grads(models, None, pg_collection=self._groups)

    def _apply_gradients(
        self,
        optimizer: Any,
        config: OptimizerConfig,
        count: float,
        sums: dict[str, float],
        may_step: StepCondition | None,
    ) -> dict[str, float]:
        """Clip and step, or skip; all ranks decide alike because they decide on the same sums."""
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        total = self.context.sum_over_ranks(sums)
        means = {name: value / count for name, value in total.items()}
        if not (math.isfinite(norm) and math.isfinite(total["loss"])):
            self._drop_gradients(optimizer)
            self.num_nonfinite += 1
            return _SKIPPED | {"train/skipped_nonfinite": 1.0, "train/tokens": count}
        if may_step is not None and not may_step(means):
            self._drop_gradients(optimizer)
            return means | _SKIPPED | {"train/skipped_early_stop": 1.0, "train/tokens": count}
        if norm > config.gradient_clipping:
            for parameter in optimizer.get_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(config.gradient_clipping / norm)
        rate = learning_rate(config, step=self.step, total_steps=self._total_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step_with_ready_grads()
        self._drop_gradients(optimizer)
        self.step += 1
        self.is_damaged = not self._are_weights_finite(optimizer)
        return means | _SKIPPED | {"train/grad_norm": norm, "train/lr": rate, "train/tokens": count}

    def _drop_gradients(self, optimizer: Any) -> None:
        self._trainee.zero_grad_buffer()
        optimizer.zero_grad()

    @torch.no_grad()
    def _are_weights_finite(self, optimizer: Any) -> bool:
        """Whether every rank's weights are: a finite gradient and a large learning rate can still overflow them."""
        finite = [torch.isfinite(parameter).all() for parameter in optimizer.get_parameters()]
        num_damaged = float(not bool(torch.stack(finite).all())) if finite else 0.0
        return self.context.sum_over_mesh({"not_finite": num_damaged})["not_finite"] == 0.0

    def _require_optimizer(self) -> tuple[Any, OptimizerConfig]:
        if self._optimizer is None or self._config is None:
            raise ValueError(f"the model from {self._directory} was loaded without an optimizer and cannot be trained")
        return self._optimizer, self._config

    # --- saving -----------------------------------------------------------------------------------------------------

    def save_weights(
        self, directory: Path, *, base: Path | None = None, on_progress: Callable[[], None] = no_progress
    ) -> dict[str, FileEntry]:
        """See `TrainEngine.save_weights`."""
        directory.mkdir(parents=True, exist_ok=True)
        files = write_weights(
            directory,
            self.export_weights(),
            rank=self.context.place,
            num_ranks=self.context.world_size,
            base=WeightBase.of(base) if base is not None else None,
            on_progress=on_progress,
        )
        for name, content in self._companions.items():
            files[name] = write_durable(directory / name, [content])
        fsync_directory(directory)
        return files

    def save_state(
        self,
        directory: Path,
        *,
        extra: train_state.Numbers | None = None,
        on_progress: Callable[[], None] = no_progress,
    ) -> dict[str, FileEntry]:
        """See `TrainEngine.save_state`; no rank waits for another one."""
        optimizer, _ = self._require_optimizer()
        self.onload()
        rank, num_ranks = self.context.place, self.context.world_size
        directory.mkdir(parents=True, exist_ok=True)
        files = write_shares(
            directory,
            self._weights.parameters,
            optimizer,
            self._bridge,
            rank=rank,
            num_ranks=num_ranks,
            on_progress=on_progress,
        )
        if rank == 0:
            header = train_state.TrainStateHeader(
                step=self.step, seed=self._seed, num_ranks=num_ranks, extra=extra or {}
            )
            files |= train_state.write_header(directory, header)
        fsync_directory(directory)
        return files

    def load_state(self, directory: Path, *, on_progress: Callable[[], None] = no_progress) -> train_state.Numbers:
        """See `TrainEngine.load_state`; a collective, since each rank gives the others its share of the weights."""
        optimizer, _ = self._require_optimizer()
        self.onload()
        header = train_state.read_header(directory)
        read_shares(
            directory,
            self._weights.parameters,
            optimizer,
            self._bridge,
            num_files=header.num_ranks,
            step=header.step,
            on_progress=on_progress,
        )
        optimizer._copy_main_params_to_model_params()
        self._trainee.start_param_sync(force_sync=True)
        self.step, self._seed = header.step, header.seed
        return header.extra

    # --- weights ----------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.export_weights`."""
        self.onload()
        yield from self._weights.export()

    def import_weights(self, weights: Iterable[tuple[str, Tensor]], *, eta: float = 1.0) -> None:
        """See `TrainEngine.import_weights`."""
        self.onload()
        self._weights.take_over(weights, eta=eta)
        if self._optimizer is not None:
            self._optimizer.reload_model_params()

    def offload(self) -> None:
        """See `TrainEngine.offload`."""
        if self._offloaded is None:
            tensors: list[Tensor] = list(self._trainee.parameters())
            if self._optimizer is not None:
                tensors += self._optimizer.get_parameters()
                tensors += [buffer.grad_data for buffer in self._trainee.buffers]
                moments = self._optimizer.optimizer.state.values()
                tensors += [tensor for state in moments for tensor in state.values() if isinstance(tensor, Tensor)]
            self._offloaded = offload(tensors)

    def onload(self) -> None:
        """See `TrainEngine.onload`."""
        if self._offloaded is not None:
            self._offloaded.bring_back()
            self._offloaded = None


def _stored_tensors(directory: Path, *, needed: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a directory that the model has, one at a time; a score layer that it lacks is zero."""
    missing = dict(needed)
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in missing.keys() & set(file.keys()):
                yield name, file.get_tensor(name)
                del missing[name]
    if SCORE in missing:
        logger.warning("model %s has no score layer: its scores start at 0 and have to be trained", directory)
        yield SCORE, torch.zeros(missing.pop(SCORE))
    if missing:
        raise ValueError(f"model {directory} lacks {len(missing)} weights, such as {min(missing)!r}")
