"""Advantages: rewards (and values, where there is a critic) -> how much better a token was than expected."""

from collections.abc import Sequence

import torch
from torch import Tensor

_STD_EPS = 1e-6  # far below the spread of any reward that is worth learning from


def gae(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over packed sequences.

    Schulman et al. 2015, https://arxiv.org/abs/1506.02438, eq. 16. All sequences step
    backwards together, so that the loop runs over the longest sequence and not over all tokens.

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
    running = torch.zeros(num_seqs, dtype=torch.float64, device=rewards.device)
    for steps_back in range(1, int(lengths.max()) + 1):
        alive = lengths >= steps_back
        at = (starts + lengths - steps_back)[alive]
        value_at = (value_starts + lengths - steps_back)[alive]
        delta = rewards64[at] + gamma * values64[value_at + 1] - values64[value_at]
        running[alive] = delta + gamma * lam * running[alive]
        advantages[at] = running[alive]
    is_bootstrap = torch.zeros_like(values, dtype=torch.bool)
    is_bootstrap[value_starts + lengths] = True
    return advantages.float(), (advantages + values64[~is_bootstrap]).float()


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
    if sum(group_sizes) != rewards.shape[0]:
        raise ValueError(
            f"group sizes {list(group_sizes)[:8]} add up to {sum(group_sizes)}, not to {rewards.shape[0]} rewards"
        )
    sizes = torch.as_tensor(group_sizes, dtype=torch.long, device=rewards.device)
    group = torch.repeat_interleave(torch.arange(len(group_sizes), device=rewards.device), sizes)
    centred = rewards.double() - _group_mean(rewards.double(), group, sizes)[group]
    if not normalize_std:
        return centred.float()
    std = _group_mean(centred.square(), group, sizes).sqrt()
    return (centred / (std[group] + _STD_EPS)).float()


def _group_mean(values: Tensor, group: Tensor, sizes: Tensor) -> Tensor:
    sums = torch.zeros(sizes.shape[0], dtype=values.dtype, device=values.device).index_add_(0, group, values)
    return sums / sizes.clamp(min=1)
