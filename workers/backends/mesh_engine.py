"""What every training backend does alike: from a sample to an optimizer step or none, and from a model to its files.

sample ─► tokens that count ─► micro-batches ─► scores ─► loss_fn ─► gradients         (how: a backend's `_backward`)
                                                            │ sums stay on the device
                             one transfer to the host, one all-reduce of the mesh: |gradient|², loss, statistics
                                                            │
       finite? ── no ──► nothing changes, counted           ├─► may_step? ── no ──► nothing changes
                                                            └─► clip ─► step ─► weights finite? ── no ──► damaged

A backend says how its model computes, where its gradients are, and what it keeps on disk; which steps are made, and
what is said of them, is decided here, for all backends by the same lines.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from corral.experiments.config.model import OptimizerConfig
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends import train_state
from corral.workers.backends.base import LOSS_MASK, LossFunction, StepCondition
from corral.workers.backends.device_sums import DeviceSums
from corral.workers.backends.files.deltas import WeightBase
from corral.workers.backends.files.share import Adapter, WeightShare
from corral.workers.backends.heads import head_named
from corral.workers.backends.learning_rate import learning_rate
from corral.workers.backends.micro_batches import MicroBatch, make_micro_batches, plan_micro_batches, scatter_to_answers
from corral.workers.backends.offload import Offloaded, offload
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.sharding import local
from corral.workers.checkpoint.durable_file import FileEntry, no_progress
from corral.workers.data.sequence_sample import SequenceSample

logger = logging.getLogger(__name__)

Loss: TypeAlias = Callable[[Any, MicroBatch], Tensor]
"""(the head's scores, micro-batch) -> scalar whose gradient is added up."""
_SKIPPED: Final = {"train/skipped_nonfinite": 0.0, "train/skipped_empty": 0.0, "train/skipped_early_stop": 0.0}
_SQUARED_NORM: Final = "squared_norm"
_OF_LOSS, _OF_STATS = "denominator of the loss", "denominator of the statistics"


class MeshEngine(ABC):
    """A `TrainEngine` but for the model itself; what its methods promise is told there."""

    num_parameters: int
    num_trained: int

    def __init__(
        self,
        model_directory: Path,
        *,
        context: ParallelContext,
        head: str,
        optimizer: OptimizerConfig | None,
        total_steps: int,
        micro_batches: MicroBatchSpec | None,
        seed: int,
        compute_dtype: torch.dtype,
    ) -> None:
        """Everything but the model and its optimizer, which a backend makes afterwards.

        Args:
            model_directory: local directory in Hugging Face's format.
            context: this rank's place; the model lives on `context.device`.
            head: a name of `HEADS`: what the model says of a micro-batch.
            optimizer: None for a model that is never trained (a reference).
            total_steps: optimizer steps of the whole run, which the learning rate's schedule spans.
            micro_batches: see `TrainEngine`; None takes whatever comes as one.
            seed: with the step number, decides every random number of a step.
            compute_dtype: float32 or bfloat16.
        """
        self.context = context
        self.micro_batches = micro_batches or MicroBatchSpec()
        self.step = 0
        self.num_nonfinite = 0
        self.is_damaged = False
        self._directory = model_directory
        self._config = optimizer
        self._total_steps = total_steps
        self._seed = seed
        self._compute_dtype = compute_dtype
        self._head = head_named(head)
        self._optimizer: Any = None
        self._offloaded: Offloaded | None = None
        self._sum_of_frozen = 0
        self._adapter_config: bytes | None = None  # adapter_config.json, where adapters are trained
        self._companions: dict[str, bytes] = {}
        self._has_told_of_deltas = False
        self._unshared_because: str | None = "this backend computes whole answers"  # another one says otherwise
        self._has_told_of_prompts = False

    # --- what a backend says ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """See `TrainEngine.model`."""

    @abstractmethod
    def _forward(self, micro_batches: Iterator[MicroBatch], *, temperature: float) -> Iterable[tuple[MicroBatch, Any]]:
        """Each micro-batch and the head's scores of it, by a model that is on its device and set to evaluate."""

    @abstractmethod
    def _backward(self, micro_batches: Iterator[MicroBatch], loss: Loss, *, temperature: float) -> None:
        """The gradients of one step, and no others, added up over micro-batches; every rank calls each loss once.

        The model is on its device and set to train.
        """

    @abstractmethod
    def _squared_norm(self) -> Tensor:
        """This rank's part of the squared norm of the whole gradient: a float64 scalar on the device.

        Called once after `_backward`, on all ranks, so that gradients may be made ready here.
        """

    @abstractmethod
    def _trained_tensors(self) -> list[Tensor]:
        """What this rank's optimizer changes, with its gradients."""

    @abstractmethod
    def _make_step(self, rate: float) -> None:
        """One update of weights and moments with the gradients as they are."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """As if no micro-batch had been."""

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.export_weights`."""

    @abstractmethod
    def import_weights(self, weights: Iterable[tuple[str, Tensor]], *, eta: float = 1.0) -> None:
        """See `TrainEngine.import_weights`."""

    @abstractmethod
    def _stored_weights(self) -> Iterator[tuple[str, Tensor]]:
        """`export_weights` in the types that files have."""

    @abstractmethod
    def _state_shard(self, header: train_state.TrainStateHeader) -> train_state.StateShard:
        """What this rank has of weights and optimizer; no rank waits for another one."""

    @abstractmethod
    def _read_share(
        self, directory: Path, header: train_state.TrainStateHeader, on_progress: Callable[[], None]
    ) -> None:
        """Read what the `_state_shard` of all ranks of some layout wrote."""

    @abstractmethod
    def _own_tensors(self) -> list[Tensor]:
        """Parameters and optimizer state, whose memory can be given back."""

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
        _, config = self._require_optimizer()
        local_count = float(np.count_nonzero(sample.data[counted])) if len(sample) else 0.0
        count = self.context.sum_over_ranks({"count": local_count})["count"]
        if count == 0.0:
            return _SKIPPED | {"train/skipped_empty": 1.0}
        self.onload()
        sums = DeviceSums()

        def loss(scores: Any, micro_batch: MicroBatch) -> Tensor:
            output = loss_fn(scores, micro_batch)
            sums.add({"loss": output.loss_sum} | output.stats)
            if output.denominators is not None:
                sums.add(dict(zip((_OF_LOSS, _OF_STATS), output.denominators, strict=True)))
            return output.loss_sum / count

        self._backward(self._micro_batches(sample, keeps_groups=keeps_groups), loss, temperature=temperature)
        sums.add({_SQUARED_NORM: self._squared_norm()})
        return self._apply_gradients(config, count, self._over_mesh(sums), may_step)

    @torch.no_grad()
    def forward(self, sample: SequenceSample, *, temperature: float = 1.0) -> dict[str, npt.NDArray[np.float32]]:
        """See `TrainEngine.forward`."""
        self.onload()
        outputs: dict[str, list[tuple[MicroBatch, Tensor]]] = {name: [] for name in self._head.layouts}
        for micro_batch, scores in self._forward(self._micro_batches(sample), temperature=temperature):
            if not micro_batch.is_padding:
                for name, values in self._head.by_name(scores).items():
                    outputs[name].append((micro_batch, values))
        return {
            name: scatter_to_answers(sample, _on_host(outputs[name]), layout)
            for name, layout in self._head.layouts.items()
        }

    def _micro_batches(self, sample: SequenceSample, *, keeps_groups: bool = False) -> Iterator[MicroBatch]:
        """This rank's micro-batches, as many as the rank with the most has."""
        shares = self._shares_prompts()
        plan = plan_micro_batches(sample, self.micro_batches, keeps_groups=keeps_groups, shares_prompts=shares)
        count = int(self.context.max_over_ranks({"micro_batches": len(plan)})["micro_batches"])
        return make_micro_batches(sample, plan, count=count, device=self.context.device, shares_prompts=shares)

    def _shares_prompts(self) -> bool:
        """Whether rows have prompts once; what is done is said when it is first asked for."""
        if not self.micro_batches.shares_prompts:
            return False
        if not self._has_told_of_prompts:
            self._has_told_of_prompts = True
            if self._unshared_because is None:
                logger.info("answers of one prompt share it in a micro-batch")
            else:
                logger.info(
                    "each answer has its prompt to itself, though they may share it: %s", self._unshared_because
                )
        return self._unshared_because is None

    def _over_mesh(self, sums: DeviceSums) -> dict[str, float]:
        """The sums of all data-parallel ranks, and the squared norm, of which every rank has a part."""
        own = sums.on_host()  # the first wait for the device since the step began
        if not self.context.is_dp_head:  # the ranks of one data-parallel rank have made the same sums
            own = dict.fromkeys(own, 0.0) | {_SQUARED_NORM: own[_SQUARED_NORM]}
        return self.context.sum_over_mesh(own)

    def _apply_gradients(
        self, config: OptimizerConfig, count: float, total: dict[str, float], may_step: StepCondition | None
    ) -> dict[str, float]:
        """Clip and step, or skip; all ranks decide alike because they decide on the same sums."""
        of_loss, of_stats = total.pop(_OF_LOSS, count), total.pop(_OF_STATS, count)
        if of_loss == 0.0:
            self._drop_gradients()
            return _SKIPPED | {"train/skipped_empty": 1.0}
        scale = count / of_loss  # gradients were divided by `count`, before the loss could say by what
        norm, count = math.sqrt(total.pop(_SQUARED_NORM)) * scale, of_stats
        means = {name: value / (of_loss if name == "loss" else of_stats) for name, value in total.items()}
        if not (math.isfinite(norm) and math.isfinite(total["loss"])):
            self._drop_gradients()
            self.num_nonfinite += 1
            return _SKIPPED | {"train/skipped_nonfinite": 1.0, "train/tokens": count}
        if may_step is not None and not may_step(means):
            self._drop_gradients()
            return means | _SKIPPED | {"train/skipped_early_stop": 1.0, "train/tokens": count}
        scale *= min(1.0, config.gradient_clipping / norm) if norm > 0.0 else 1.0
        if scale != 1.0:
            for tensor in self._trained_tensors():
                if tensor.grad is not None:
                    local(tensor.grad).mul_(scale)
        rate = learning_rate(config, step=self.step, total_steps=self._total_steps)
        self._make_step(rate)
        self._drop_gradients()
        self.step += 1
        self.is_damaged = not self._are_weights_finite()
        return means | _SKIPPED | {"train/grad_norm": norm, "train/lr": rate, "train/tokens": count}

    @torch.no_grad()
    def _are_weights_finite(self) -> bool:
        """Whether every rank's weights are: a finite gradient and a large learning rate can still overflow them.

        A sum is finite only if all that it adds up is, and to make it takes a thirtieth of looking at each number.
        """
        sums = [local(tensor).sum() for tensor in self._trained_tensors()]
        is_finite = not sums or bool(torch.isfinite(torch.stack(sums)).all())  # one wait for the device, not one a sum
        return self.context.sum_over_mesh({"not_finite": float(not is_finite)})["not_finite"] == 0.0

    def _require_optimizer(self) -> tuple[Any, OptimizerConfig]:
        if self._optimizer is None or self._config is None:
            raise ValueError(f"the model from {self._directory} was loaded without an optimizer and cannot be trained")
        return self._optimizer, self._config

    def _require_trained_weights(self) -> None:
        if self._adapter_config is not None:
            raise ValueError(
                f"the model from {self._directory} is trained by adapters, and its own weights stay as they are; let "
                "another role take over weights, or leave lora out"
            )

    def _seed_of_step(self) -> int:
        """63 bits of its own for every step and share of the batch: ranks that compute on other data draw otherwise.

        Those that share layers or rows draw alike, as each of them draws for all.
        """
        entropy = np.random.SeedSequence([self._seed, self.step, self.context.dp_rank])
        return int(entropy.generate_state(1, np.uint64)[0] >> 1)

    # --- saving -----------------------------------------------------------------------------------------------------

    def weight_share(self) -> WeightShare:
        """See `TrainEngine.weight_share`."""
        self.onload()
        return WeightShare(
            weights=self._stored_weights(),
            rank=self.context.place,
            num_ranks=self.context.world_size,
            companions=self._companions,
            adapter=self._adapter(),
        )

    def save_weights(
        self, directory: Path, *, base: Path | None = None, on_progress: Callable[[], None] = no_progress
    ) -> dict[str, FileEntry]:
        """See `TrainEngine.save_weights`."""
        weight_base = WeightBase.of(base) if base is not None else None
        files = self.weight_share().write(directory, base=weight_base, on_progress=on_progress)
        if weight_base is not None:
            self._tell_of_missing_deltas(weight_base)
        return files

    def _adapter(self) -> Adapter | None:
        """The adapters that are trained, if any are and this is the first rank; a collective where they are."""
        return None

    def _tell_of_missing_deltas(self, base: WeightBase) -> None:
        """Once: whoever asked for deltas, and trains what changes everywhere, should know that they save nothing."""
        if base.given_up and not self._has_told_of_deltas:
            self._has_told_of_deltas = True
            name, reason = next(iter(base.given_up.items()))
            logger.warning(
                "%s has no delta from %s, and the like is not said again: %s", name, base.directory.name, reason
            )

    def state_shard(self, *, extra: train_state.Numbers | None = None) -> train_state.StateShard:
        """See `TrainEngine.state_shard`."""
        self.onload()
        header = train_state.TrainStateHeader(
            step=self.step,
            seed=self._seed,
            num_ranks=self.context.world_size,
            extra=extra or {},
            sum_of_frozen=self._sum_of_frozen,
        )
        return self._state_shard(header)

    def load_state(self, directory: Path, *, on_progress: Callable[[], None] = no_progress) -> train_state.Numbers:
        """See `TrainEngine.load_state`; a collective, since ranks may give each other what they read."""
        header = train_state.read_header(directory)
        if header.sum_of_frozen and self._sum_of_frozen and header.sum_of_frozen != self._sum_of_frozen:
            raise ValueError(
                f"the adapters in {directory} were trained beside other weights than those of {self._directory}; put "
                "those back, with the same dtype, or start a new trial"
            )
        self.onload()
        self._read_share(directory, header, on_progress)
        self.step, self._seed = header.step, header.seed
        return header.extra

    def _first_file(self, header: train_state.TrainStateHeader) -> int:
        """The file where this rank's parts are most likely to be: its own, if as many ranks have written."""
        return self.context.place * header.num_ranks // self.context.world_size

    # --- memory -----------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """See `TrainEngine.offload`."""
        if self._offloaded is None:
            self._offloaded = offload(self._own_tensors())

    def onload(self) -> None:
        """See `TrainEngine.onload`."""
        if self._offloaded is not None:
            self._offloaded.bring_back()
            self._offloaded = None


def _on_host(outputs: Sequence[tuple[MicroBatch, Tensor]]) -> list[tuple[MicroBatch, Tensor]]:
    """The same, after one wait for the device."""
    if not outputs:
        return []
    together = torch.cat([values for _, values in outputs]).cpu()
    parts = torch.split(together, [len(values) for _, values in outputs])
    return [(micro_batch, part) for (micro_batch, _), part in zip(outputs, parts, strict=True)]
