"""The KL divergence to a reference model: estimated from sampled tokens, charged to rewards or losses, controlled;
and the entropy, of which a gradient is estimated alike.

Source of the estimators: J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html. With
r = p_reference(x) / p_policy(x) for x sampled from the policy:

    k1 = -log r               unbiased, high variance, can be negative
    k2 = (log r)^2 / 2        biased, low variance; its gradient is the gradient of the KL
    k3 = r - 1 - log r        unbiased, low variance, never negative; GRPO's choice (arXiv 2402.03300, eq. 4)
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from corral.workers.algorithms.functional.packed import last_in_mask, sum_per_answer

KLEstimator = Literal["k1", "k2", "k3"]

_MAX_LOG_RATIO = 20.0  # keeps exp() finite in float32 for a token that one of the models all but excludes
_LEAST_REST = 1e-6  # of a probability; in float32 the sum of the others is no more exact than that
_MAX_RELATIVE_ERROR = 0.2  # one surprising batch must not swing the coefficient


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


def kl_over_top_k(logprobs: Tensor, teacher_logprobs: Tensor, *, is_forward: bool) -> Tensor:
    """[T]: the KL divergence of policy and teacher over the teacher's k likeliest tokens, and all others as one.

    What is left of either distribution, 1 - sum_k p, is compared as one more token. Without it the reverse divergence
    would be least where the policy says none of the k. With it the divergence is never more than that over the whole
    vocabulary (the inequality of data processing), and is that one where k is all of it.

    A rest below 1e-6 counts as 1e-6, since log-probabilities in float32 do not tell smaller ones apart. Where the
    teacher leaves less and the policy more, the reverse divergence is too small.

    reverse: sum p_policy log(p_policy / p_teacher)      forward: sum p_teacher log(p_teacher / p_policy)

    Args:
        logprobs: [T, k] of the policy, with gradient.
        teacher_logprobs: [T, k] of the same tokens.
    """
    policy, teacher = _with_the_rest(logprobs), _with_the_rest(teacher_logprobs)
    given, other = (teacher, policy) if is_forward else (policy, teacher)
    return (given.exp() * (given - other)).sum(-1)


def _with_the_rest(logprobs: Tensor) -> Tensor:
    """[T, k] -> [T, k + 1]: with the log-probability of all other tokens, which rounding leaves at least 1e-6."""
    rest = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_REST)
    return torch.cat([logprobs, rest.log()], -1)


def entropy_of_samples(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """[T]: the entropy of the distribution that each token came from, with an estimate of its gradient.

    The gradient of H = -sum p log p is that of the mean of -(log p(x) + H) log p(x) over x drawn from p, where the
    bracket is a constant; H in it is a baseline, which changes no mean (the score-function estimator, Williams 1992).

    Args:
        logprobs: [T] of the tokens that were drawn, with gradient.
        entropy: [T] without gradient.
    """
    surprise = -(logprobs.detach() + entropy)
    return entropy + surprise * (logprobs - logprobs.detach())


def token_rewards(
    answer_rewards: Tensor,
    kl: Tensor,
    response_mask: Tensor,
    lengths: Sequence[int],
    *,
    kl_coefficient: float,
    turn_rewards: Tensor | None = None,
    episode_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Rewards per token: minus the KL penalty at every response token, plus the answer's reward at its last one.

    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, eq. 2.

    A sequence of an episode ends with all that the episode was given afterwards: penalties and rewards of turns in the
    sequences that follow, and the outcome. So what is still to come at any of its tokens, undiscounted, is what the
    episode was given from there on, and its first sequence has in it all that it was given.

    Args:
        answer_rewards: [n]; of an episode, its outcome on each sequence.
        kl: [T] estimate per token (k1), read under the mask only.
        response_mask: [T] bool.
        lengths: of each answer in `kl`; an answer without any has no place for its reward. One without response tokens
            has it at its last entry, where nobody trains.
        turn_rewards: [T], read under the mask only.
        episode_sizes: sequences of each episode, which add up to n; None for one each.

    Returns:
        [T] float32.
    """
    rewards = torch.where(response_mask, -kl_coefficient * kl.double(), 0.0)
    if turn_rewards is not None:
        rewards += torch.where(response_mask, turn_rewards.double(), 0.0)
    at_end = answer_rewards.double()
    if episode_sizes is not None:
        at_end = at_end + _given_afterwards(sum_per_answer(rewards, lengths), episode_sizes)
    filled = [length for length in lengths if length]
    has_tokens = torch.tensor(lengths, dtype=torch.int64, device=kl.device) > 0
    rewards[last_in_mask(response_mask, filled)] += at_end[has_tokens]
    return rewards.float()


def _given_afterwards(sums: Tensor, episode_sizes: Sequence[int]) -> Tensor:
    """[n]: for each sequence, the sums of those that follow in its episode; 0 for the last one."""
    after: list[float] = []
    of_each = iter(reversed(sums.tolist()))
    for size in reversed(episode_sizes):
        running = 0.0
        for _ in range(size):
            after.append(running)
            running += next(of_each)
    return torch.tensor(after[::-1], dtype=sums.dtype, device=sums.device)


def adapt_kl_coefficient(
    coefficient: float, *, observed_kl: float, target: float, horizon: float, num_answers: float
) -> float:
    """The coefficient for the next step: larger if the policy went further from the reference than the target.

    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, sec. 2.2: the relative error, bounded by 0.2 on either
    side, moves the coefficient by that fraction for every `horizon` answers. With more answers, one step moves it no
    further, or it would turn negative at five times as many. A divergence that is not finite changes nothing.

    Args:
        observed_kl: nats per answer, mean over the `num_answers` answers of the global batch.
    """
    if not math.isfinite(observed_kl):
        return coefficient
    error = min(max(observed_kl / target - 1.0, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
    return coefficient * (1.0 + error * min(num_answers / horizon, 1.0))
