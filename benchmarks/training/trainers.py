"""The ways to make one optimizer step on a batch: a plain loop over transformers, and the training engines.

    Way ── make_trainer ──► step() ──► mean loss over the batch, before the step      the same number in every way

The plain loop is what one writes without a framework: float32 weights, autocast, gradients added up over batches that
are padded to their longest sequence, whole logits, clipping, torch's fused AdamW. The engines make the same step on
packed rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.training.sizes import Sequences, Size, make_sequences
from corral.experiments.config.model import OptimizerConfig, Recompute
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends.base import AnyEngine, LossOutput, TokenScores
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.parallel_context import init_parallel
from corral.workers.data.sequence_sample import SequenceSample

OPTIMIZER = OptimizerConfig(lr=1e-4, warmup_steps_proportion=0.0)
TOTAL_STEPS = 1000  # of the schedule, which is constant


@dataclass(frozen=True, slots=True)
class Way:
    """One row of the table."""

    backend: Literal["plain", "fsdp", "megatron"]
    rows: Literal["padded", "padded, by length", "one at a time", "packed"]
    recompute: Recompute = "none"


WAYS: Mapping[str, Way] = {
    "plain": Way("plain", "padded"),
    "plain-by-length": Way("plain", "padded, by length"),
    "plain-by-length-full": Way("plain", "padded, by length", "full"),
    "plain-single": Way("plain", "one at a time"),
    "fsdp": Way("fsdp", "packed"),
    "fsdp-selective": Way("fsdp", "packed", "selective"),
    "fsdp-full": Way("fsdp", "packed", "full"),
    "megatron": Way("megatron", "packed"),
    "megatron-selective": Way("megatron", "packed", "selective"),
    "megatron-full": Way("megatron", "packed", "full"),
}
YARDSTICK = "plain-by-length"
"""What the other ways are divided by: the best that a plain loop does without packing."""


class Trainer(Protocol):
    """A model and its optimizer."""

    def step(self) -> float:
        """One optimizer step on the whole batch; returns the mean loss over its tokens, before the step."""


def missing_package(way: Way) -> str | None:
    """What has to be installed before this way can be gone; None where nothing is missing."""
    return "megatron-core (make megatron)" if way.backend == "megatron" and find_spec("megatron") is None else None


def make_trainer(way: Way, size: Size, directory: Path, *, device: torch.device, dtype: torch.dtype) -> Trainer:
    """Load the model of `directory`, a way's own."""
    sequences = make_sequences(size)
    if way.backend != "plain":
        return EngineSteps(way, size, directory, sequences, device=device, dtype=dtype)
    order = range(len(sequences))
    if way.rows == "padded, by length":
        order = sorted(order, key=lambda number: len(sequences[number]))
    per_batch = 1 if way.rows == "one at a time" else size.padded_batch
    batches = [[sequences[number] for number in order[at : at + per_batch]] for at in range(0, len(order), per_batch)]
    return PlainLoop(directory, batches, recomputes=way.recompute == "full", device=device, dtype=dtype)


class PlainLoop:
    """transformers and torch.optim."""

    def __init__(
        self,
        directory: Path,
        batches: Sequence[Sequences],
        *,
        recomputes: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model.to(device).train()
        if recomputes:
            self._model.activation_checkpointing_enable({"use_reentrant": False})
        parameters = list(self._model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": OPTIMIZER.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = OPTIMIZER.betas
        self._optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=betas, eps=OPTIMIZER.eps, fused=True)
        self._batches = batches
        self._count = sum(len(ids) - 1 for batch in batches for ids in batch)
        self._device, self._dtype = device, dtype

    def step(self) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self._device)
        for batch in self._batches:
            loss_sum = self._loss_sum(batch)
            torch.autograd.backward(loss_sum / self._count)
            total += loss_sum.detach()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), OPTIMIZER.gradient_clipping)
        self._optimizer.step()
        return float(total) / self._count

    def _loss_sum(self, batch: Sequences) -> Tensor:
        """Over the real tokens of [sequences, longest of them]."""
        rows = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
        mask = torch.zeros_like(rows)
        for row, ids in enumerate(batch):
            rows[row, : len(ids)] = torch.as_tensor(ids)
            mask[row, : len(ids)] = 1
        is_padded = not bool(mask.all())
        rows, mask = rows.to(self._device), mask.to(self._device)
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            logits = self._model(input_ids=rows, attention_mask=mask if is_padded else None, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().transpose(1, 2), rows[:, 1:], reduction="none"
        )
        return (losses * mask[:, 1:]).sum()


class EngineSteps:
    """A training engine of one rank, as a model worker has it."""

    def __init__(
        self, way: Way, size: Size, directory: Path, sequences: Sequences, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._engine = _make_engine(way, size, directory, device=device, dtype=dtype)
        self._sample = SequenceSample.gather(
            [
                SequenceSample.from_group(
                    f"0:{number}", {"input_ids": [ids], "loss_mask": [np.ones(len(ids) - 1, np.bool_)]}
                )
                for number, ids in enumerate(sequences)
            ]
        )

    def step(self) -> float:
        return self._engine.train_batch(self._sample, loss_fn=negative_logprobs)["loss"]


def _make_engine(way: Way, size: Size, directory: Path, *, device: torch.device, dtype: torch.dtype) -> AnyEngine:
    arguments: dict[str, Any] = {
        "context": init_parallel(device=device),
        "optimizer": OPTIMIZER,
        "total_steps": TOTAL_STEPS,
        "micro_batches": MicroBatchSpec(max_tokens_per_micro_batch=size.max_tokens),
        "recompute": way.recompute,
        "compute_dtype": dtype,
    }
    if way.backend == "fsdp":
        return FSDPEngine(directory, **arguments)
    from corral.workers.backends.megatron.engine import MegatronEngine  # where it is not installed, others still run

    return MegatronEngine(directory, **arguments)


def negative_logprobs(scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
    """Sum over the micro-batch."""
    return LossOutput(-(scores.logprobs * micro_batch.tensors["loss_mask"]).sum())
