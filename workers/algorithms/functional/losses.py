"""Policy, value and language-model losses over packed tokens.

Every loss returns the *sum* over the tokens of its mask and their number. The caller divides by the number of tokens of
the whole global batch, so that the mean over tokens is exact however the batch is cut into micro-batches and ranks.

    behaviour policy  generated the tokens            old_logprobs
    proximal policy   the weights before this step    proximal_logprobs   centre of the clip
    current policy    the weights being trained       logprobs
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0  # keeps exp() finite in float32 when trainer and server disagree about a token


@dataclass(frozen=True, slots=True)
class PPOLoss:
    """Sums over the tokens of the loss mask; divide by `num_tokens`, summed over all micro-batches and ranks."""

    loss_sum: Tensor
    num_tokens: Tensor
    ratio_sum: Tensor
    """Of the importance ratio current / proximal."""
    approx_kl_sum: Tensor
    """Of k1, log(proximal / current): negative where the policy moved towards the token."""
    clipped_sum: Tensor
    """Number of tokens whose gradient the clip removed."""
    dual_clipped_sum: Tensor
    """Number of tokens that the dual clip bounded."""


def importance_ratio(logprobs: Tensor, base_logprobs: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(ratio, log ratio) to the base policy where the mask is True; 1 and 0 elsewhere, whatever stands there."""
    log_ratio = torch.where(loss_mask, logprobs - base_logprobs, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.exp(log_ratio), log_ratio


def behaviour_weights(
    proximal_logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor, *, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Weights proximal / behaviour of decoupled PPO, and the loss mask without the tokens above the cap.

    A token above the cap was all but impossible under the weights of this step; training on it anyway is what makes
    stale batches diverge. It leaves the loss entirely: numerator *and* denominator. Kept in the denominator, as the
    system that introduced the cap did, it would shrink the step whenever trainer and generator drift apart.

    Returns:
        (weights [T] float, 0 outside the returned mask; kept mask [T] bool).
    """
    weights, _ = importance_ratio(proximal_logprobs, old_logprobs, loss_mask)
    kept = loss_mask if cap is None else loss_mask & (weights <= cap)
    return torch.where(kept, weights, 0.0), kept


def ppo_clip_loss(
    logprobs: Tensor,
    *,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    c_clip: float | None = None,
    token_weights: Tensor | None = None,
) -> PPOLoss:
    """Clipped policy loss, optionally dual-clipped, optionally decoupled.

    - clip: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7;
    - dual clip, for negative advantages: Ye et al. 2020, https://arxiv.org/abs/1912.09729, eq. 5;
    - decoupled: Hilton et al. 2022, https://arxiv.org/abs/2110.00641, eq. 5; for LLMs Fu et al. 2025,
      https://arxiv.org/abs/2505.24298, eq. 5: the clip is centred on the proximal policy, and `token_weights`
      (from `behaviour_weights`) correct for the policy that generated. Plain PPO passes the behaviour policy's
      log-probabilities as the proximal ones, and no weights.

    Args:
        logprobs: [T] of the current policy, with gradient.
        proximal_logprobs: [T].
        advantages: [T].
        loss_mask: [T] bool, True on the tokens to train on.
        eps_clip: the ratio is clipped to [1 - eps_clip, 1 + eps_clip].
        c_clip: bound, in units of |advantage|, on the loss of tokens with a negative advantage; must exceed 1.
        token_weights: [T] or None for 1 everywhere.

    Raises:
        ValueError: if `c_clip` is not above 1.
    """
    if c_clip is not None and c_clip <= 1.0:
        raise ValueError(f"c_clip is {c_clip}; the dual clip bounds ratios above 1, so it must exceed 1 (or be None)")
    ratio, log_ratio = importance_ratio(logprobs, proximal_logprobs, loss_mask)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip)
    loss = torch.maximum(unclipped, clipped)
    is_clipped = clipped > unclipped
    is_dual_clipped = torch.zeros_like(is_clipped)
    if c_clip is not None:
        bound = torch.where(advantages < 0, -c_clip * advantages, torch.inf)
        is_dual_clipped = loss > bound
        loss = torch.minimum(loss, bound)
    if token_weights is not None:
        loss = loss * token_weights
    return PPOLoss(
        loss_sum=torch.where(loss_mask, loss, 0.0).sum(),
        num_tokens=loss_mask.sum(),
        ratio_sum=_masked_sum(ratio, loss_mask),
        approx_kl_sum=_masked_sum(-log_ratio, loss_mask),
        clipped_sum=_masked_sum(is_clipped, loss_mask),
        dual_clipped_sum=_masked_sum(is_dual_clipped, loss_mask),
    )


def value_loss(
    values: Tensor, *, old_values: Tensor, returns: Tensor, loss_mask: Tensor, value_eps_clip: float
) -> tuple[Tensor, Tensor]:
    """(sum, number of tokens) of half the squared error, the larger of clipped and unclipped.

    The clip keeps a value within `value_eps_clip` of the one that the advantages were computed from (PPO's reference
    implementation; see https://arxiv.org/abs/2006.05990, choice C13).
    """
    clipped_values = old_values + (values - old_values).clamp(-value_eps_clip, value_eps_clip)
    loss = 0.5 * torch.maximum((values - returns).square(), (clipped_values - returns).square())
    return torch.where(loss_mask, loss, 0.0).sum(), loss_mask.sum()


def sft_loss(logprobs: Tensor, *, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, number of tokens) of the cross entropy of the tokens under the mask."""
    return -torch.where(loss_mask, logprobs, 0.0).sum(), loss_mask.sum()


def _masked_sum(values: Tensor, loss_mask: Tensor) -> Tensor:
    return torch.where(loss_mask, values.detach().to(torch.float32), 0.0).sum()
