"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html. With
r = p_reference(x) / p_policy(x) for x sampled from the policy:

    k1 = -log r               unbiased, high variance, can be negative
    k2 = (log r)^2 / 2        biased, low variance; its gradient is the gradient of the KL
    k3 = r - 1 - log r        unbiased, low variance, never negative; GRPO's choice (arXiv 2402.03300, eq. 4)
"""

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

_MAX_LOG_RATIO = 20.0  # keeps exp() finite in float32 for a token that one of the models all but excludes


def approximate_kl(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: KLEstimator = "k3") -> Tensor:
    """Per-token estimate of the KL divergence to the reference model, of the shape of its arguments."""
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        log_ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"unknown KL estimator {estimator!r}; choose k1, k2 or k3")
