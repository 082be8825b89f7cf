"""How much each token weighs in the mean over a global batch.

    sum of w_t * loss_t over the loss mask / n, both added up over all ranks

    token_mean      w = 1            n = tokens      every token weighs the same
    answer_mean     w = 1 / |o_i|    n = answers     every answer does: the mean of the answers' means
    fixed_divisor   w = 1 / divisor  n = answers     every token does, and long batches are not shrunk

What the sum is divided by is added up over micro-batches and ranks by the engine, so that the mean is exact however the
batch is cut, also where only the scores say which tokens are left.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from corral.workers.algorithms.functional.packed import per_token, sum_per_answer

LossReduction = Literal["token_mean", "answer_mean", "fixed_divisor"]


def reduction_weights(
    loss_mask: Tensor, answer_lengths: Sequence[int], *, reduction: LossReduction, divisor: float | None
) -> tuple[Tensor, Tensor]:
    """(weights [T] float32 of some whole answers' tokens, scalar that their sum adds to the mean's denominator).

    Answers without a token in the mask count in no mean.

    - token_mean: DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 8;
    - answer_mean: GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 3;
    - fixed_divisor: Dr. GRPO, Liu et al. 2025, https://arxiv.org/abs/2503.20783, sec. 3.2 and listing 1.

    Args:
        loss_mask: [T] bool.
        answer_lengths: entries of each answer in the mask.
        divisor: tokens that an answer's sum is divided by, for `fixed_divisor`.

    Raises:
        ValueError: if `fixed_divisor` comes without a divisor.
    """
    if reduction == "token_mean":
        return torch.ones_like(loss_mask, dtype=torch.float32), loss_mask.sum()
    tokens = sum_per_answer(loss_mask.double(), answer_lengths)
    num_answers = (tokens > 0).sum()
    if reduction == "answer_mean":
        return per_token(1.0 / tokens.clamp(min=1.0), answer_lengths).float(), num_answers
    if divisor is None:
        raise ValueError("the reduction fixed_divisor needs a divisor: the most tokens that an answer may have")
    return torch.full_like(loss_mask, 1.0 / divisor, dtype=torch.float32), num_answers
