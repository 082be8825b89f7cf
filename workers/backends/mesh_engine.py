"""The common part of all training backends: from a sample to an optimizer step or none, from a model to its files.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from corral.experiments.config.model import GradientSums, LoraConfig, OptimizerConfig, Recompute
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends import train_state
from corral.workers.backends.base import LOSS_MASK, LossFunction, Numbers, StepCondition
from corral.workers.backends.files.weights import WeightBase, WeightShard, companion_files
from corral.workers.backends.heads import HEADS
from corral.workers.backends.host_copies import Offloaded, state_that_can_leave
from corral.workers.backends.lora import adapter_config, fold_sums
from corral.workers.backends.micro_batches import MicroBatch, make_micro_batches, plan_micro_batches, scatter_to_answers
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.sharding import local
from corral.workers.checkpoint.durable_file import FileEntry, no_progress
from corral.workers.checkpoint.low_rank import ADAPTER_CONFIG
from corral.workers.checkpoint.manifest import ADAPTER_FOLDER
from corral.workers.data.sequence_sample import SequenceSample

logger = logging.getLogger(__name__)

Loss: TypeAlias = Callable[[Tensor, MicroBatch], Tensor]
"""(the head's columns, micro-batch) -> scalar whose gradient is added up."""
_SKIPPED: Final = {"train/skipped_nonfinite": 0.0, "train/skipped_empty": 0.0, "train/skipped_early_stop": 0.0}
_SQUARED_NORM: Final = "squared_norm"
_OF_LOSS, _OF_STATS = "denominator of the loss", "denominator of the statistics"


@dataclass(kw_only=True, eq=False, repr=False)
class MeshEngine(ABC):
    """A `TrainEngine`, with all that a model worker asks for besides, but for the model itself.

    Making one makes this rank's part of the model, and of its optimizer. All ranks of the model's mesh call the same
    methods in the same order.

    Raises:
        ValueError: if backend and layout cannot compute this model as transformers does, or weights are missing.
    """

    directory: Path = field(kw_only=False)
    """Of the model, local, in Hugging Face's format."""
    context: ParallelContext
    """This rank's place; the model lives on `context.device`."""
    optimizer: OptimizerConfig | None
    """Its settings; None for a model that is never trained (a reference)."""
    head: str = "lm"
    """A name of `HEADS`: what the model says of a micro-batch."""
    lora: LoraConfig | None = None
    """Trains adapters in place of the weights."""
    recompute: Recompute = "none"
    """What of a layer is computed again in the backward pass."""
    gradient_sums: GradientSums = "each_micro_batch"
    """When ranks add their gradients up; each has a whole one until then (fsdp)."""
    hosts_optimizer: bool = False
    """Whether the state of the optimizer lies in host memory but for the step itself (fsdp)."""
    is_held_low: bool = False
    """Whether weights that products alone read are held in `compute_dtype`, which changes none of the scores: for a
    model without an optimizer, which takes over weights whole or not at all (fsdp)."""
    total_steps: int = 1
    """Optimizer steps of the whole run, which the learning rate's schedule spans."""
    micro_batches: MicroBatchSpec = MicroBatchSpec()
    """See `TrainEngine`; as it is here takes whatever comes as one."""
    seed: int = 0
    """With the step number, decides every random number of a step; that of a state which is loaded, from then on."""
    compute_dtype: torch.dtype = torch.float32
    """float32 or bfloat16."""
    takes_tf32: bool = False
    """Whether a GPU may round what it multiplies in float32."""

    num_parameters: int = field(init=False)
    """Of the whole model, as it is exported."""
    num_trained: int = field(init=False)
    """Those that a step changes: all of them, or adapters and a new score layer."""
    step: int = field(default=0, init=False)
    """Optimizer steps made so far; skipped ones do not count."""
    num_nonfinite: int = field(default=0, init=False)
    """Optimizer steps of this engine's life that were skipped because loss or gradient was not finite."""
    is_damaged: bool = field(default=False, init=False)
    """Whether a step has made weights that are not finite: what was finite must be loaded again."""
    _optimizer: Any = field(default=None, init=False)
    """With `param_groups`, `state`, `step` and `zero_grad`, as torch's have them."""
    _offloaded: Offloaded | None = field(default=None, init=False)
    _hosted: Offloaded | None = field(default=None, init=False)
    _sum_of_frozen: int = field(default=0, init=False)
    _adapter_config: bytes | None = field(default=None, init=False)
    """adapter_config.json, where adapters are trained."""
    _has_reported_deltas: bool = field(default=False, init=False)
    _has_reported_prompts: bool = field(default=False, init=False)
    _unshared_because: str | None = field(default="this backend computes whole answers", init=False)
    """Why answers do not share their prompts; a backend may say otherwise."""

    def __post_init__(self) -> None:
        assert self.lora is None or self.optimizer is not None, "adapters that nothing trains"
        assert self.optimizer is None or not self.is_held_low, "an optimizer changes float32"
        self._head = HEADS[self.head]
        config = self._load()
        self._companions: dict[str, bytes] = {}
        if self.context.mesh_rank == 0:
            self._companions = companion_files(self.directory, config, self._head, dtype=self.compute_dtype)
            if self._adapter_config is not None:
                self._companions[f"{ADAPTER_FOLDER}/{ADAPTER_CONFIG}"] = self._adapter_config

    # --- what a backend says ----------------------------------------------------------------------------------------

    @abstractmethod
    def _load(self) -> Any:
        """Make the model, its optimizer, and what is said of both; gives the model's configuration."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The model as transformers has it, for generation: it may be cut over ranks, or a copy made for the asker.

        A collective of the mesh, and so is each use of a model that is cut.
        """

    @abstractmethod
    def _forward(self, micro_batches: Iterator[MicroBatch]) -> Iterable[tuple[MicroBatch, Tensor]]:
        """Each micro-batch and the head's columns of it, by a model that is on its device and set to evaluate."""

    @abstractmethod
    def _backward(self, micro_batches: Iterator[MicroBatch], loss: Loss) -> None:
        """The gradients of one step, and no others, added up over micro-batches; every rank calls each loss once.

        The model is on its device and set to train.
        """

    @abstractmethod
    def _squared_norm(self) -> Tensor:
        """This rank's part of the squared norm of the whole gradient: a float64 scalar on the device.

        Called once after `_backward`, on all ranks, so that gradients may be made ready here.
        """

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by their names in Hugging Face's format, one after the other, on this rank's device.

        With adapters: the model that it and they amount to, made anew.

        Every rank of the mesh must read to the end: making a tensor whole may be a collective. A tensor may be the
        engine's own: copy what must outlive the next step, and write to none.
        """

    @abstractmethod
    def import_weights(self, weights: Iterable[tuple[str, Tensor]], *, eta: float = 1.0) -> None:
        """Take over weights of the same names and shapes: own = eta * given + (1 - eta) * own.

        Every rank of the mesh is given the same whole tensors and keeps its part; the optimizer's state stays.

        Raises:
            ValueError: if a weight is missing, unknown, given twice or of another shape, `eta` is outside [0, 1], or
                adapters are trained beside weights that stay.
        """

    @abstractmethod
    def _stored_weights(self) -> Iterator[tuple[str, Tensor]]:
        """`export_weights` in the types that files have."""

    @abstractmethod
    def _state_shard(self, header: train_state.TrainStateHeader) -> train_state.StateShard:
        """What this rank has of weights and optimizer; no rank waits for another one."""

    @abstractmethod
    def _read_shard(self, stored: train_state.StoredState) -> None:
        """Read what the `_state_shard` of all ranks of some layout wrote."""

    @abstractmethod
    def _whole_trained(self) -> Iterable[tuple[str, Tensor]]:
        """What is trained of the model, by name, whole: a collective."""

    @abstractmethod
    def _own_tensors(self) -> list[Tensor]:
        """Parameters and what is beside them, but not `_moments`, whose memory can be given back."""

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
        config = self.optimizer
        assert config is not None, "a model that is never trained has no optimizer"
        local_count = float(np.count_nonzero(sample.data[counted])) if len(sample) else 0.0
        count = self.context.sum_over_ranks({"count": local_count})["count"]
        if count == 0.0:
            return _SKIPPED | {"train/skipped_empty": 1.0}
        self._begin()
        sums = DeviceSums()

        def loss(columns: Tensor, micro_batch: MicroBatch) -> Tensor:
            output = loss_fn(self._head.read(columns), micro_batch)
            sums.add({"loss": output.loss_sum} | output.stats)
            if output.denominators is not None:
                sums.add(dict(zip((_OF_LOSS, _OF_STATS), output.denominators, strict=True)))
            return output.loss_sum / count

        self._optimizer.zero_grad()
        self._backward(self._micro_batches(sample, keeps_groups=keeps_groups, temperature=temperature), loss)
        sums.add({_SQUARED_NORM: self._squared_norm()})

        # Clip and step, or skip: all ranks decide alike because they decide on the same sums.
        total = self._over_mesh(sums)
        of_loss, of_stats = total.pop(_OF_LOSS, count), total.pop(_OF_STATS, count)
        if of_loss == 0.0:
            self._optimizer.zero_grad()
            return _SKIPPED | {"train/skipped_empty": 1.0}
        scale = count / of_loss  # gradients were divided by `count`, before the loss could say by what
        norm = math.sqrt(total.pop(_SQUARED_NORM)) * scale
        means = {name: value / (of_loss if name == "loss" else of_stats) for name, value in total.items()}
        tokens = {"train/tokens": of_stats}
        if not (math.isfinite(norm) and math.isfinite(total["loss"])):
            self._optimizer.zero_grad()
            self.num_nonfinite += 1
            return _SKIPPED | {"train/skipped_nonfinite": 1.0} | tokens
        if may_step is not None and not may_step(means):
            self._optimizer.zero_grad()
            return means | _SKIPPED | {"train/skipped_early_stop": 1.0} | tokens
        scale *= min(1.0, config.gradient_clipping / norm) if norm > 0.0 else 1.0
        if scale != 1.0:
            for tensor in self._trained_tensors():
                if tensor.grad is not None:
                    local(tensor.grad).mul_(scale)
        rate = learning_rate(config, step=self.step, total_steps=self.total_steps)
        if self._hosted is not None:
            self._hosted.bring_back()
        self._make_step(rate)
        self._optimizer.zero_grad()
        self._put_moments_away()
        self.step += 1
        self.is_damaged = not self._are_weights_finite()
        return means | _SKIPPED | {"train/grad_norm": norm, "train/lr": rate} | tokens

    @torch.no_grad()
    def forward(
        self, sample: SequenceSample, *, temperature: float = 1.0, top_k: int = 0
    ) -> dict[str, npt.NDArray[np.float32]]:
        """See `TrainEngine.forward`."""
        self._begin()
        passes = self._forward(self._micro_batches(sample, top_k=top_k, temperature=temperature))
        columns = _on_host([output for output in passes if not output[0].is_padding])
        if top_k:
            both = scatter_to_answers(sample, columns, self._head.layout).reshape(-1, 2, top_k)
            return {"topk_ids": both[:, 0].flatten(), "topk_logprobs": both[:, 1].flatten()}
        return {
            name: scatter_to_answers(sample, [(row, part[:, place]) for row, part in columns], self._head.layout)
            for place, name in enumerate(self._head.names)
        }

    def _begin(self) -> None:
        """What a call on the model finds: its weights here, and products as they were asked for."""
        self.onload()
        torch.set_float32_matmul_precision("high" if self.takes_tf32 else "highest")

    def _micro_batches(
        self, sample: SequenceSample, *, keeps_groups: bool = False, **asked: Any
    ) -> Iterator[MicroBatch]:
        """This rank's micro-batches, as many as the rank with the most has.

        Args:
            asked: the rest of what `make_micro_batches` takes.
        """
        shares = self._shares_prompts()
        plan = plan_micro_batches(sample, self.micro_batches, keeps_groups=keeps_groups, shares_prompts=shares)
        count = int(self.context.max_over_ranks({"micro_batches": len(plan)})["micro_batches"])
        return make_micro_batches(sample, plan, count=count, device=self.context.device, shares_prompts=shares, **asked)

    def _shares_prompts(self) -> bool:
        """Whether rows have prompts once; what is done is said when it is first asked for."""
        if not self.micro_batches.shares_prompts:
            return False
        reason = self._unshared_because
        if not self._has_reported_prompts:
            self._has_reported_prompts = True
            unshared = f"each answer has its prompt to itself, though they may share it: {reason}"
            logger.info("answers of one prompt share it in a micro-batch" if reason is None else unshared)
        return reason is None

    def _over_mesh(self, sums: "DeviceSums") -> dict[str, float]:
        """The sums of all data-parallel ranks, and the squared norm, of which every rank has a part."""
        own = sums.on_host()  # the first wait for the device since the step began
        if not self.context.is_dp_head:  # the ranks of one data-parallel rank have made the same sums
            own = dict.fromkeys(own, 0.0) | {_SQUARED_NORM: own[_SQUARED_NORM]}
        return self.context.sum_over_mesh(own)

    def _make_step(self, rate: float) -> None:
        """One update of weights and moments with the gradients as they are."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def _trained_tensors(self) -> list[Tensor]:
        """What this rank's optimizer changes, with its gradients."""
        return [tensor for group in self._optimizer.param_groups for tensor in group["params"]]

    def _moments(self) -> list[Tensor]:
        """What the optimizer keeps, whose memory can be given back; nothing where there is none."""
        return [] if self._optimizer is None else state_that_can_leave(self._optimizer)

    @torch.no_grad()
    def _are_weights_finite(self) -> bool:
        """Whether every rank's weights are: a finite gradient and a large learning rate can still overflow them.

        A sum is finite only if all that it adds up is, and to make it takes a thirtieth of looking at each number.
        """
        sums = [local(tensor).sum() for tensor in self._trained_tensors()]
        is_finite = not sums or bool(torch.isfinite(torch.stack(sums)).all())  # one wait for the device, not one a sum
        return self.context.sum_over_mesh({"not_finite": float(not is_finite)})["not_finite"] == 0.0

    def _require_trained_weights(self) -> None:
        if self._adapter_config is not None:
            raise ValueError(
                f"the model from {self.directory} is trained by adapters, and its own weights stay as they are; let "
                "another role take over weights, or leave lora out"
            )

    def _seed_of_step(self) -> int:
        """63 bits of its own for every step and shard of the batch: ranks that compute on other data draw otherwise.

        Those that share layers or rows draw alike, as each of them draws for all.
        """
        entropy = np.random.SeedSequence([self.seed, self.step, self.context.dp_rank])
        return int(entropy.generate_state(1, np.uint64)[0] >> 1)

    # --- saving -----------------------------------------------------------------------------------------------------

    def weight_shard(self) -> WeightShard:
        """What `save_weights` writes on this rank, to be written, or copied and written later; a collective."""
        self.onload()
        adapter = None if self._adapter_config is None else dict(self._whole_trained())
        return WeightShard(
            weights=self._stored_weights(),
            rank=self.context.mesh_rank,
            num_ranks=self.context.mesh.dims.world_size,
            companions=self._companions,
            adapter=adapter if self.context.mesh_rank == 0 else None,
        )

    def save_weights(
        self, directory: Path, *, base: Path | None = None, on_progress: Callable[[], None] = no_progress
    ) -> dict[str, FileEntry]:
        """Write the weights in Hugging Face's format: safetensors, config and tokenizer files.

        Every rank writes some of the files; all of them together are the model. What is returned is on disk. With
        adapters, the folder `adapter` has them in peft's format besides.

        Args:
            base: an earlier version that `save_weights` wrote, under a manifest: each weight file that differs little
                from the same one there has a delta beside it.

        Returns:
            The files that this rank wrote, by name.
        """
        weight_base = WeightBase.of(base) if base is not None else None
        files = self.weight_shard().write(directory, base=weight_base, on_progress=on_progress)
        if weight_base is not None and weight_base.given_up and not self._has_reported_deltas:
            # Warned once: if every parameter changes, deltas save nothing, and the user who set them should know.
            self._has_reported_deltas = True
            name, reason = next(iter(weight_base.given_up.items()))
            logger.warning(
                "%s has no delta from %s, and the like is not said again: %s", name, weight_base.directory.name, reason
            )
        return files

    def _note_adapters(self, lora: LoraConfig, layers: Collection[str], *, own_sum: int) -> None:
        """What a state and an export of adapters say of the model that they stand on.

        Args:
            layers: that have adapters.
            own_sum: this rank's part of the sum over what is frozen.
        """
        self._sum_of_frozen = fold_sums(self.context.sum_over_mesh({"sum": float(own_sum)})["sum"])
        self._adapter_config = adapter_config(layers, lora, base=self.directory, head=self.head)

    def state_shard(self, *, extra: Numbers | None = None) -> train_state.StateShard:
        """What training resumes from, bit for bit: full-precision trained weights, optimizer, step count, seed.

        The tensors are the engine's own: write them, or copy them, before the next step.

        Args:
            extra: numbers that belong to the role and to none of its parameters; the same on every rank.
        """
        self.onload()
        header = train_state.TrainStateHeader(
            step=self.step,
            seed=self.seed,
            num_ranks=self.context.mesh.dims.world_size,
            extra=extra or {},
            sum_of_frozen=self._sum_of_frozen,
        )
        return self._state_shard(header)

    def load_state(self, directory: Path, *, on_progress: Callable[[], None] = no_progress) -> Numbers:
        """Continue from what all ranks' `state_shard` wrote, possibly with another number of ranks; a collective.

        `on_progress` is called for every part that is read, since a large state takes longer than any useful deadline.

        Returns:
            The extra numbers that were saved.
        """
        header = train_state.read_header(directory)
        if header.sum_of_frozen and self._sum_of_frozen and header.sum_of_frozen != self._sum_of_frozen:
            raise ValueError(
                f"the adapters in {directory} were trained beside other weights than those of {self.directory}; put "
                "those back, with the same dtype, or start a new trial"
            )
        self.onload()
        self._hosted = None  # other moments take the place of these
        mesh_rank, num_ranks = self.context.mesh_rank, self.context.mesh.dims.world_size
        first_file = mesh_rank * header.num_ranks // num_ranks  # its own, if as many ranks have written
        self._read_shard(
            train_state.StoredState(directory=directory, header=header, first_file=first_file, on_progress=on_progress)
        )
        self._put_moments_away()
        self.step, self.seed = header.step, header.seed
        return header.extra

    # --- memory -----------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory, until `onload` or the next use.

        Tensors that `export_weights` gave must not be read meanwhile.
        """
        if self._offloaded is None:
            self._offloaded = Offloaded([*self._own_tensors(), *self._moments()])

    def onload(self) -> None:
        """Bring back what `offload` moved; nothing happens if it is here."""
        if self._offloaded is not None:
            self._offloaded.bring_back()
            self._offloaded = None

    def _put_moments_away(self) -> None:
        if self.hosts_optimizer:
            self._hosted = Offloaded(self._moments())


def _on_host(outputs: Sequence[tuple[MicroBatch, Tensor]]) -> list[tuple[MicroBatch, Tensor]]:
    """The same, after one wait for the device."""
    if not outputs:
        return []
    together = torch.cat([values for _, values in outputs]).cpu()
    parts = torch.split(together, [len(values) for _, values in outputs])
    return [(micro_batch, part) for (micro_batch, _), part in zip(outputs, parts, strict=True)]


class DeviceSums:
    """Scalars added up by name over micro-batches, in float64 and on the device until the host needs them.

    A number that is read for each micro-batch keeps the host waiting until the device has computed it, and then the
    device until the host has enqueued more; read once after all of them, it costs one wait for a step.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Scalars of any type, all of one device; waits for nothing."""
        for name, value in values.items():
            wide = value.detach().to(torch.float64)
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide

    def on_host(self) -> dict[str, float]:
        """All sums, of which there must be any, after one wait for the device."""
        return dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True))


def learning_rate(config: OptimizerConfig, *, step: int, total_steps: int) -> float:
    """Learning rate of the optimizer step number `step`, counted from 0: a resumed run needs no scheduler's state.

    It rises linearly to `lr` over the warm-up, which ends *at* the peak, and then follows the schedule down to
    `lr * min_lr_ratio` at `total_steps`, or stays.
    """
    warmup_steps = math.ceil(config.warmup_steps_proportion * total_steps)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    remaining = 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)
