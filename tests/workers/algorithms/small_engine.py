"""A training engine of twenty lines of mathematics, for interfaces whose algorithm is what is tested.

    embedding ──► mean of all tokens so far ──► tanh(linear) ──► head: lm | value | scalar        plain gradient descent

It cuts batches into micro-batches as real engines do, and holds one rank.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from corral.scheduling.packing import MicroBatchSpec
from corral.workers.backends.base import LOSS_MASK, LossFunction, StepCondition, TokenScores
from corral.workers.backends.micro_batches import MicroBatch, make_micro_batches, plan_micro_batches
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
from tests.workers.backends.training_helpers import VOCAB_SIZE

_WIDTH = 16


class SmallEngine:
    """What `TrainEngine` says of computing; it has nothing to save."""

    def __init__(self, head: Literal["lm", "value", "scalar"], *, lr: float = 0.5, max_tokens: int = 40) -> None:
        torch.manual_seed(0)
        self.context = ParallelContext()
        self.micro_batches = MicroBatchSpec(max_tokens_per_micro_batch=max_tokens)
        self.step = self.num_nonfinite = 0
        self.model = nn.ModuleDict(
            {
                "embed": nn.Embedding(VOCAB_SIZE, _WIDTH),
                "hidden": nn.Linear(_WIDTH, _WIDTH),
                "head": nn.Linear(_WIDTH, VOCAB_SIZE if head == "lm" else 1),
            }
        )
        self._head, self._lr = head, lr

    def states(self, input_ids: Tensor) -> Tensor:
        """[S, V or 1] of one answer."""
        so_far = self.model["embed"](input_ids).cumsum(0) / torch.arange(1, len(input_ids) + 1)[:, None]
        output: Tensor = self.model["head"](torch.tanh(self.model["hidden"](so_far)))
        return output

    def _scores(self, micro_batch: MicroBatch) -> Any:
        segments = torch.split(micro_batch.input_ids, list(micro_batch.segment_lengths))
        states = [self.states(segment) for segment in segments]
        if self._head == "scalar":
            return torch.stack([state[-1, 0] for state in states])
        if self._head == "value":
            return torch.cat(states)[:, 0]
        logits = torch.log_softmax(torch.cat(states)[micro_batch.predicting], dim=-1)
        entropy = -(logits.exp() * logits).sum(-1).detach()
        asked = None if micro_batch.asked is None else logits.gather(1, micro_batch.asked)
        return TokenScores(logits.gather(1, micro_batch.labels[:, None])[:, 0], entropy, asked)

    def _micro_batches(self, sample: SequenceSample, *, keeps_groups: bool = False) -> Iterator[MicroBatch]:
        plan = plan_micro_batches(sample, self.micro_batches, keeps_groups=keeps_groups)
        return make_micro_batches(sample, plan, count=len(plan) + 1, device=torch.device("cpu"))  # one is padding

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
        count = float(np.count_nonzero(sample.data[counted]))
        sums: dict[str, float] = defaultdict(float)
        self.model.zero_grad()
        for micro_batch in self._micro_batches(sample, keeps_groups=keeps_groups):
            output = loss_fn(self._scores(micro_batch), micro_batch)
            (output.loss_sum / count).backward()  # type: ignore[no-untyped-call]
            sums["loss"] += float(output.loss_sum.detach())
            for name, value in output.stats.items():
                sums[name] += float(value)
            for name, scalar in zip(("of loss", "of stats"), output.denominators or (), strict=False):
                sums[name] += float(scalar)
        of_loss, of_stats = sums.pop("of loss", count), sums.pop("of stats", count)
        scale, count = count / of_loss, of_stats
        means = {name: value / (of_loss if name == "loss" else of_stats) for name, value in sums.items()}
        if not math.isfinite(means["loss"]):
            self.num_nonfinite += 1
            return {"train/skipped_nonfinite": 1.0, "train/tokens": count}
        if may_step is not None and not may_step(means):
            return means | {"train/skipped_early_stop": 1.0, "train/tokens": count}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= self._lr * scale * (0.0 if parameter.grad is None else parameter.grad)
        self.step += 1
        return means | {"train/skipped_nonfinite": 0.0, "train/skipped_early_stop": 0.0, "train/tokens": count}

    @torch.no_grad()
    def forward(
        self, sample: SequenceSample, *, temperature: float = 1.0, top_k: int = 0
    ) -> dict[str, npt.NDArray[np.float32]]:
        ids = np.asarray(sample.data["input_ids"], np.int64)
        answers = [torch.from_numpy(ids[place]) for place in answer_slices(sample.answer_lengths())]
        states = [self.states(answer) for answer in answers]
        if self._head == "scalar":
            return {"scores": np.array([float(state[-1, 0]) for state in states], np.float32)}
        if self._head == "value":
            return {"values": torch.cat(states)[:, 0].numpy()}
        tables = torch.cat([torch.zeros(0, VOCAB_SIZE), *(torch.log_softmax(state[:-1], dim=-1) for state in states)])
        if top_k:
            logprobs, tokens = tables.topk(top_k)
            return {"topk_ids": tokens.flatten().float().numpy(), "topk_logprobs": logprobs.flatten().numpy()}
        labels = torch.cat([torch.zeros(0, dtype=torch.int64), *(answer[1:] for answer in answers)])
        return {"logprobs": tables.gather(1, labels[:, None])[:, 0].numpy()}
