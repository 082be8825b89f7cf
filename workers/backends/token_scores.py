"""Logits -> log-probabilities of the tokens that came next, a chunk of tokens at a time.

logits [T - n, V], labels ──► TokenScores(logprobs, entropy)

A row of logits is as long as the vocabulary, so `log_softmax` over a whole micro-batch would hold a second and, in the
backward pass, a third copy of the largest tensor in training. Here only one chunk's copy exists at any moment; the
backward pass computes the softmax anew from the logits, which autograd keeps anyway.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK_TOKENS = 1024  # 1024 x 150k vocabulary x 4 bytes = 0.6 GB of scratch


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a language model says of the tokens that came next in one micro-batch."""

    logprobs: Tensor
    """[T - n] float32, aligned with `MicroBatch.labels`; with gradient in training."""
    entropy: Tensor
    """[T - n] float32 of the distribution that each token came from; without gradient."""


def score_next_tokens(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, chunk_tokens: int = _CHUNK_TOKENS
) -> TokenScores:
    """Log-probability of each label, and the entropy of the distribution that it came from.

    Args:
        logits: [T, V] in any float type; row t predicts `labels[t]`.
        labels: [T] int64 in [0, V).
        temperature: logits are divided by it first, as the sampler did; 0 (greedy) is read as 1.
    """
    scale = 1.0 / temperature if temperature > 0.0 else 1.0
    logprobs, entropy = _NextTokenLogprobs.apply(logits, labels, scale, chunk_tokens)  # type: ignore[no-untyped-call]
    return TokenScores(logprobs, entropy)


class _NextTokenLogprobs(torch.autograd.Function):
    """log_softmax(scale * logits)[label]; its gradient is scale * (one_hot(label) - softmax(scale * logits))."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, scale: float, chunk_tokens: int) -> tuple[Tensor, Tensor]:
        num_tokens = logits.shape[0]
        logprobs = torch.empty(num_tokens, dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(logprobs)
        normalizer = torch.empty_like(logprobs)
        for start in range(0, num_tokens, chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            scaled = logits[rows].float() * scale
            normalizer[rows] = torch.logsumexp(scaled, dim=-1)
            logprobs[rows] = scaled.gather(1, labels[rows, None]).squeeze(1) - normalizer[rows]
            probabilities = torch.exp(scaled - normalizer[rows, None])
            # A forbidden token may have a logit of -inf: 0 * -inf must count as 0.
            entropy[rows] = normalizer[rows] - (probabilities * scaled).nan_to_num_(0.0).sum(dim=-1)
        ctx.save_for_backward(logits, labels, normalizer)
        ctx.mark_non_differentiable(entropy)
        ctx.scale, ctx.chunk_tokens = scale, chunk_tokens
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, normalizer = ctx.saved_tensors
        grad_logprobs = grad_outputs[0]
        grad_logits = torch.empty_like(logits)
        for start in range(0, logits.shape[0], ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            weight = (ctx.scale * grad_logprobs[rows])[:, None]
            chunk = torch.exp(logits[rows].float() * ctx.scale - normalizer[rows, None]).mul_(-weight)
            chunk.scatter_add_(1, labels[rows, None], weight)
            grad_logits[rows] = chunk
        return grad_logits, None, None, None
