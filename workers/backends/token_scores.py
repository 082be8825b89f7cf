"""What the engine makes of a language model's output, and losses read: nothing of it is as long as the vocabulary."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a language model says of the tokens that came next in one micro-batch."""

    logprobs: Tensor
    """[T - n] float32, aligned with `MicroBatch.labels`; with gradient in training."""
    entropy: Tensor
    """[T - n] float32 of the distribution that each token came from; without gradient."""
    asked: Tensor | None = None
    """[T - n, k] float32: log-probabilities of `MicroBatch.asked`; with gradient in training."""
