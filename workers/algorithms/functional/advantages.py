"""Advantages: rewards (and values, where there is a critic) -> how much better a token was than expected."""

from collections.abc import Sequence

import torch
from torch import Tensor

from corral.workers.algorithms.functional.packed import answer_index, per_token, sum_per_answer

_BLOCK = 128  # tokens: larger blocks do more arithmetic, smaller ones more steps
_STD_EPS = 1e-6  # far below the spread of any reward that is worth learning from


def gae(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over packed sequences.

    Schulman et al. 2015, https://arxiv.org/abs/1506.02438, eq. 16. All sequences step
    backwards together, a block of tokens at a time: within one, the recursion is a product with powers of gamma * lam.

    Args:
        rewards: [T] float, one per action token.
        values: [T + num_seqs] float; each sequence carries one bootstrap value after its last token, 0.0 if it ended.
        cu_seqlens: [num_seqs + 1] int, boundaries of `rewards`, from 0.

    Returns:
        (advantages, returns), both [T] float32; returns are advantages + values.

    Raises:
        ValueError: if `values` does not have one entry more per sequence than `rewards`.
    """
    num_seqs = cu_seqlens.shape[0] - 1
    if values.shape[0] != rewards.shape[0] + num_seqs:
        raise ValueError(
            f"gae needs one bootstrap value per sequence: {rewards.shape[0]} rewards in {num_seqs} sequences want "
            f"{rewards.shape[0] + num_seqs} values, got {values.shape[0]}"
        )
    if rewards.shape[0] == 0:
        return rewards.float(), rewards.float()
    starts, lengths = cu_seqlens[:-1].long(), (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    value_starts = starts + torch.arange(num_seqs, device=starts.device)
    rewards64, values64 = rewards.double(), values.double()
    advantages = torch.zeros_like(rewards64)
    after = torch.zeros(num_seqs, dtype=torch.float64, device=rewards.device)  # advantage of the token after the block
    back = torch.arange(_BLOCK, device=starts.device)
    decay = gamma * lam
    within = torch.triu(decay ** (back[None] - back[:, None]).clamp(min=0).double())  # [j, k]: weight of delta j in k
    beyond = decay ** (back + 1).double()
    for first in range(0, int(lengths.max()), _BLOCK):
        steps_back = lengths[:, None] - 1 - first - back  # [num_seqs, _BLOCK] index of the token in its sequence
        is_token = steps_back >= 0
        at, value_at = (torch.where(is_token, start[:, None] + steps_back, 0) for start in (starts, value_starts))
        delta = torch.where(is_token, rewards64[at] + gamma * values64[value_at + 1] - values64[value_at], 0.0)
        block = delta @ within + after[:, None] * beyond
        advantages[at[is_token]] = block[is_token]
        after = block[:, -1]
    is_bootstrap = torch.zeros_like(values, dtype=torch.bool)
    is_bootstrap[value_starts + lengths] = True
    return advantages.float(), (advantages + values64[~is_bootstrap]).float()


def bootstrap_values(values: Tensor, is_truncated: Tensor, lengths: Sequence[int]) -> Tensor:
    """A critic's values as `gae` wants them: the one after the last token is 0 unless the answer was cut off there.

    An answer that ended has nothing to expect any more. One that the token limit cut off would have gone on, and the
    critic's value of its last token is the best guess of what would have come (Pardo et al. 2017,
    https://arxiv.org/abs/1712.00378, sec. 3).

    Args:
        values: [sum of lengths] float, one per token, those of the prompt included.
        is_truncated: [n] bool.
        lengths: tokens of each answer, each at least 1.
    """
    last = torch.tensor(lengths, dtype=torch.int64, device=values.device).cumsum(0) - 1
    ended = values.clone()
    ended[last[~is_truncated]] = 0.0
    return ended


def group_relative(rewards: Tensor, group_sizes: Sequence[int], *, normalize_std: bool = True) -> Tensor:
    """Rewards relative to those of the other answers to the same prompt.

    GRPO: Shao et al. 2024, https://arxiv.org/abs/2402.03300, sec. 4.1.2. The standard deviation is
    the population's, so that a group of one or of equal rewards gives 0 and never NaN. Without it, the differences stay
    as they are: Dr. GRPO, Liu et al. 2025, https://arxiv.org/abs/2503.20783, eq. 3.

    Args:
        rewards: [N] float, one per answer, answers of one group next to each other.
        group_sizes: number of answers of each group; adds up to N.

    Returns:
        [N] float32, one advantage per answer, for all of its tokens.

    Raises:
        ValueError: if the group sizes do not add up to the number of rewards.
    """
    centred = _centre_groups(rewards, group_sizes)
    if not normalize_std:
        return centred.float()
    std = _group_mean(centred.square(), group_sizes).sqrt()
    return (centred / (per_token(std, group_sizes) + _STD_EPS)).float()


def rloo(rewards: Tensor, group_sizes: Sequence[int]) -> Tensor:
    """Each reward less the mean of the *other* answers to the same prompt: REINFORCE leave-one-out.

    Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740. A group of one has nobody to compare with and
    gives 0. Arguments, shape and errors are those of `group_relative`.
    """
    centred = _centre_groups(rewards, group_sizes)
    sizes = torch.tensor(group_sizes, dtype=torch.float64, device=rewards.device)
    others = sizes / (sizes - 1.0).clamp(min=1.0)  # r - mean of the others = (r - mean of all) * n / (n - 1)
    return (centred * per_token(others, group_sizes)).float()


def opo(rewards: Tensor, num_tokens: Tensor, group_sizes: Sequence[int]) -> Tensor:
    """Each reward less the group's mean weighted by length, which makes the gradient's variance small: OPO.

    Hao et al. 2025, https://arxiv.org/abs/2505.23585, eq. 9: the optimal baseline sum(l R) / sum(l), where the squared
    gradient of an answer is taken to grow with its length. Arguments, shape and errors are those of `group_relative`.

    Args:
        num_tokens: [N] that were made in each answer; a group without any has the plain mean.
    """
    lengths = num_tokens.double().clamp(min=1e-9)  # so small that it weighs only where there is nothing else
    totals = sum_per_answer(lengths, group_sizes)
    weights = lengths * per_token(torch.tensor(group_sizes, dtype=torch.float64) / totals, group_sizes)
    return (rewards.double() - per_token(_group_mean(rewards.double() * weights, group_sizes), group_sizes)).float()


def overlong_penalty(num_tokens: Tensor, *, limit: int, buffer: int) -> Tensor:
    """[N] float64 from 0 to 1: how much of the buffer before the limit an answer of so many tokens has used up.

    DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 13, without its minus sign.
    """
    return ((num_tokens.double() - (limit - buffer)) / buffer).clamp(0.0, 1.0)


def rewards_to_go(rewards: Tensor, cu_seqlens: Tensor, *, gamma: float) -> Tensor:
    """[T] float32 discounted sums of the rewards from each token on: REINFORCE without a baseline.

    With a KL penalty in the rewards and normalised over the global batch, this is REINFORCE++ (Hu 2025,
    https://arxiv.org/abs/2501.03262): it is GAE at lambda 1 with values of 0.
    """
    values = torch.zeros(rewards.shape[0] + cu_seqlens.shape[0] - 1, dtype=rewards.dtype, device=rewards.device)
    return gae(rewards, values, cu_seqlens, gamma=gamma, lam=1.0)[0]


def _centre_groups(rewards: Tensor, group_sizes: Sequence[int]) -> Tensor:
    if sum(group_sizes) != rewards.shape[0]:
        raise ValueError(
            f"group sizes {list(group_sizes)[:8]} add up to {sum(group_sizes)}, not to {rewards.shape[0]} rewards"
        )
    return rewards.double() - _group_mean(rewards.double(), group_sizes)[answer_index(group_sizes, rewards.device)]


def _group_mean(values: Tensor, group_sizes: Sequence[int]) -> Tensor:
    sizes = torch.tensor(group_sizes, dtype=values.dtype, device=values.device)
    return sum_per_answer(values, group_sizes) / sizes.clamp(min=1.0)
