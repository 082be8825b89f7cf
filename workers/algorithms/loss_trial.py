"""A train step before there is a trial: the actor's own, on made-up answers and a head without a model behind it.

    keys of the graph ──► two prompts, two answers each ──► PPOActorInterface.train_step ──► a gradient, or an error

A loss or an advantage of the user's own finds what the train step of the trial would be given, and nothing else.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from corral.experiments.inputs.users_code import TrainQuestion
from corral.scheduling.keys import KeyLayout
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from corral.workers.backends.micro_batches import MicroBatch, make_micro_batches, plan_micro_batches
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.token_scores import TokenScores
from corral.workers.data.sequence_sample import SequenceSample, key_specs

_LENGTHS = ((5, 7), (6, 5))
_PROMPT_TOKENS = 2


class LossTrialError(ValueError):
    """A loss gives nothing that a model could be trained by."""


def try_train_step(question: TrainQuestion) -> None:
    """One train step with the loss and the advantage of `question.ppo`.

    Raises:
        LossTrialError: if the loss has no gradient, or is not finite.
        Exception: whatever the user's functions raise.
    """
    rng = np.random.default_rng(0)
    specs = key_specs(question.declared)
    groups = [
        SequenceSample.from_group(
            f"0:{number}",
            {
                key: [_values(key, specs[key], length, rng) for length in lengths]
                for key in ("input_ids", *question.keys)
            },
            specs=specs,
        )
        for number, lengths in enumerate(_LENGTHS)
    ]
    PPOActorInterface(question.ppo).train_step(_TrialEngine(), SequenceSample.gather(groups), version=1)  # type: ignore[arg-type]


def _values(key: str, spec: Any, length: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """An answer's values of a key, of its type."""
    if key == "prompt_mask":
        return np.arange(length) < _PROMPT_TOKENS
    count = 1 if spec.layout is KeyLayout.PER_ANSWER else spec.length(length)
    if spec.dtype == np.bool_:
        return rng.integers(0, 2, count).astype(np.bool_)
    if np.issubdtype(spec.dtype, np.integer):
        return rng.integers(0, 2, count).astype(spec.dtype)
    return (-2.0 + 0.1 * rng.normal(size=count)).astype(spec.dtype)


class _TrialEngine:
    """What a train step asks of an engine, with log-probabilities that are parameters themselves."""

    def __init__(self) -> None:
        self.context = ParallelContext()
        self.micro_batches = MicroBatchSpec()

    def train_batch(self, sample: SequenceSample, *, loss_fn: Any, **_: Any) -> dict[str, float]:
        """The loss and its gradient, of each micro-batch and of padding; statistics that early stop may read."""
        sums: dict[str, float] = {"loss": 0.0}
        count = max(float(np.count_nonzero(sample.data["loss_mask"])), 1.0)
        for micro_batch in self._micro_batches(sample):
            num_scores = micro_batch.labels.shape[0]
            logprobs = torch.full((num_scores,), -2.1, requires_grad=True)
            output = loss_fn(TokenScores(logprobs * 1.0, torch.full((num_scores,), 1.0)), micro_batch)
            if not bool(torch.isfinite(output.loss_sum.detach()).all()):
                raise LossTrialError("the loss is not finite on log-probabilities of -2.1")
            if not micro_batch.is_padding and not output.loss_sum.requires_grad:
                raise LossTrialError("the loss has no gradient: it has to be computed from scores.logprobs")
            if output.loss_sum.requires_grad:
                output.loss_sum.backward()
            sums["loss"] += float(output.loss_sum.detach()) / count
            for name, value in output.stats.items():
                sums[name] = sums.get(name, 0.0) + float(value) / count
        done = {"train/skipped_nonfinite": 0.0, "train/skipped_early_stop": 0.0, "train/tokens": count}
        return sums | done

    def _micro_batches(self, sample: SequenceSample) -> Iterator[MicroBatch]:
        plan = plan_micro_batches(sample, self.micro_batches)
        return make_micro_batches(sample, plan, count=len(plan) + 1, device=torch.device("cpu"))  # one is padding
