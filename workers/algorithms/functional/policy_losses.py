"""Policy losses per token, from log-probabilities and advantages.

    behaviour policy  generated the tokens            old_logprobs
    proximal policy   the weights before this step    proximal_logprobs   center of the clip in the decoupled loss
    current policy    the weights being trained       logprobs

The center of a loss is the policy that its ratio is taken to: the proximal one, or the behaviour policy in plain PPO.

How much each token weighs in the mean over a global batch is decided for all of them alike (`reduction_weights`).

    sum of w_t * loss_t over the loss mask / n, both added up over all ranks

    token_mean      w = 1            n = tokens      every token weighs the same
    answer_mean     w = 1 / |o_i|    n = answers     every answer does: the mean of the answers' means
    fixed_divisor   w = 1 / divisor  n = answers     every token does, and long batches are not shrunk

What the sum is divided by is added up over micro-batches and ranks by the engine, so that the mean is exact however the
batch is cut, also where only the scores say which tokens are left.

An answer o_i is an episode with the tokens of all its sequences. A micro-batch may have some of them: each sequence
then brings along how many tokens the whole episode has in the mask, and one of them counts it (`EpisodeCounts`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from corral.experiments.config.algorithm import RatioLevel
from corral.workers.algorithms.functional.losses import TokenLosses
from corral.workers.algorithms.functional.packed import mean_per_answer, per_token, sum_per_answer

_MAX_LOG_RATIO = 20.0  # keeps exp() finite in float32 when trainer and server disagree about a token


def importance_ratio(logprobs: Tensor, base_logprobs: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(ratio, log ratio) to the base policy where the mask is True; 1 and 0 elsewhere, whatever stands there."""
    log_ratio = torch.where(loss_mask, logprobs - base_logprobs, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.exp(log_ratio), log_ratio


def behaviour_weights(
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    cap: float | None,
    floor: float | None = None,
    truncates: bool = False,
    level: RatioLevel = "token",
    answer_lengths: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Weights proximal / behaviour of decoupled PPO, and the loss mask without the tokens beyond the bounds.

    A token above the cap was all but impossible under the weights of this step; training on it anyway is what makes
    stale batches diverge. It leaves the loss entirely: numerator *and* denominator. Kept in the denominator, as the
    system that introduced the cap did, it would shrink the step whenever trainer and generator drift apart. With a
    floor, so does one that has become unlikely: IcePop, Ling team 2025, https://arxiv.org/abs/2510.18855.

    With `truncates` such a token stays, with the bound as its weight: truncated importance sampling, Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl.

    Args:
        level: `sequence`: every token has the product of its answer's weights, which is the importance of the whole
            answer, as a sequence: Liu et al. 2025, https://richardli.xyz/rl-collapse; `geometric`: the geometric
            mean.
        answer_lengths: entries of each answer in the mask, which the two latter need.

    Returns:
        (weights [T] float, 0 outside the returned mask; kept mask [T] bool).
    """
    weights, log_ratio = importance_ratio(proximal_logprobs, old_logprobs, loss_mask)
    if level != "token":
        per_answer = (
            sum_per_answer(log_ratio, answer_lengths)
            if level == "sequence"
            else mean_per_answer(log_ratio, loss_mask, answer_lengths)
        )
        weights = per_token(torch.exp(per_answer.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)), answer_lengths)
    kept = loss_mask
    if truncates and (cap is not None or floor is not None):
        weights = weights.clamp(min=floor, max=cap)
    elif not truncates:  # what is not a number stays, so that the step is skipped and counted
        kept = loss_mask & ~(weights > (torch.inf if cap is None else cap)) & ~(weights < (floor or 0.0))
    return torch.where(kept, weights, 0.0), kept


def ppo_clip(
    logprobs: Tensor,
    *,
    center_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
    c_clip: float | None = None,
) -> TokenLosses:
    """The clipped policy loss.

    - clip: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7;
    - clip-higher, another bound above 1 than below: DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 10;
    - dual clip, for negative advantages: Ye et al. 2020, https://arxiv.org/abs/1912.09729, eq. 5.

    Args:
        logprobs: [T] of the current policy, with gradient.
        center_logprobs: [T].
        advantages: [T].
        loss_mask: [T] bool, True on the tokens to train on.
        eps_clip: the ratio is clipped to [1 - eps_clip, 1 + eps_clip_high].
        eps_clip_high: None for the same as `eps_clip`.
        c_clip: bound, in units of |advantage|, on the loss of tokens with a negative advantage; must exceed 1.

    Raises:
        ValueError: if `c_clip` is not above 1.
    """
    if c_clip is not None and c_clip <= 1.0:
        raise ValueError(f"c_clip is {c_clip}; the dual clip bounds ratios above 1, so it must exceed 1 (or be None)")
    ratio, _ = importance_ratio(logprobs, center_logprobs, loss_mask)
    losses, is_clipped = _clip(ratio, advantages, eps_clip, eps_clip if eps_clip_high is None else eps_clip_high)
    is_dual_clipped = torch.zeros_like(is_clipped)
    if c_clip is not None:
        bound = torch.where(advantages < 0, -c_clip * advantages, torch.inf)
        is_dual_clipped = losses > bound
        losses = torch.minimum(losses, bound)
    return TokenLosses(losses, {"ppo/clip_fraction": is_clipped, "ppo/dual_clip_fraction": is_dual_clipped})


def gspo(
    logprobs: Tensor,
    *,
    center_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    answer_lengths: Sequence[int],
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> TokenLosses:
    """Clipping by answers: the ratio of an answer is the geometric mean of those of its tokens.

    GSPO: Zheng et al. 2025, https://arxiv.org/abs/2507.18071, eq. 7; as written per token in eq. 13 and 14, where the
    gradient of a token is that of its own log-probability. Its mean is the one per answer (`answer_mean`), and its
    clips are much narrower than PPO's: 3e-4 below and 4e-4 above in the paper.

    Args:
        answer_lengths: entries of each answer in the row.
    """
    masked = torch.where(loss_mask, logprobs, 0.0)
    log_ratio = torch.where(loss_mask, logprobs.detach() - center_logprobs, 0.0)
    mean = mean_per_answer(log_ratio, loss_mask, answer_lengths).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = torch.exp(per_token(mean, answer_lengths) + masked - masked.detach())
    losses, is_clipped = _clip(ratio, advantages, eps_clip, eps_clip if eps_clip_high is None else eps_clip_high)
    return TokenLosses(losses, {"ppo/clip_fraction": is_clipped})


def cispo(
    logprobs: Tensor,
    *,
    center_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> TokenLosses:
    """REINFORCE weighted by the clipped ratio, which carries no gradient: no token is left out of the update.

    CISPO: MiniMax 2025, https://arxiv.org/abs/2506.13585, eq. 4 and 5. The paper bounds the ratio from above only:
    `eps_clip` of 1 does that.
    """
    ratio, _ = importance_ratio(logprobs.detach(), center_logprobs, loss_mask)
    weights = ratio.clamp(1.0 - eps_clip, 1.0 + (eps_clip if eps_clip_high is None else eps_clip_high))
    return TokenLosses(-weights * advantages * logprobs, {"ppo/clip_fraction": weights != ratio})


def _clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(the larger of the losses with and without clip, whether the clip made it larger)."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


LossReduction = Literal["token_mean", "answer_mean", "fixed_divisor"]


@dataclass(frozen=True, slots=True)
class EpisodeCounts:
    """What n sequences, which need not be all of their episodes, say of them."""

    tokens: Tensor
    """[n] int: in the loss mask, of all sequences of the episode."""
    counts: Tensor
    """[n] bool: True on one sequence of each episode that has tokens in the mask."""


def reduction_weights(
    loss_mask: Tensor,
    answer_lengths: Sequence[int],
    *,
    reduction: LossReduction,
    divisor: float | None,
    episodes: EpisodeCounts | None = None,
) -> tuple[Tensor, Tensor]:
    """(weights [T] float32 of some sequences' tokens, scalar that they add to the mean's denominator).

    Answers without a token in the mask count in no mean.

    - token_mean: DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 8;
    - answer_mean: GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 3;
    - fixed_divisor: Dr. GRPO, Liu et al. 2025, https://arxiv.org/abs/2503.20783, sec. 3.2 and listing 1.

    Args:
        loss_mask: [T] bool.
        answer_lengths: entries of each sequence in the mask.
        divisor: tokens that an answer's sum is divided by, for `fixed_divisor`.
        episodes: whose the sequences are; None where each is an answer by itself.

    Raises:
        ValueError: if `fixed_divisor` comes without a divisor.
    """
    if reduction == "token_mean":
        return torch.ones_like(loss_mask, dtype=torch.float32), loss_mask.sum()
    if episodes is None:
        tokens = sum_per_answer(loss_mask.double(), answer_lengths)
        num_answers = (tokens > 0).sum()
    else:
        tokens, num_answers = episodes.tokens.double(), episodes.counts.sum()
    if reduction == "answer_mean":
        return per_token(1.0 / tokens.clamp(min=1.0), answer_lengths).float(), num_answers
    if divisor is None:
        raise ValueError("the reduction fixed_divisor needs a divisor: the most tokens that an answer may have")
    return torch.full_like(loss_mask, 1.0 / divisor, dtype=torch.float32), num_answers
