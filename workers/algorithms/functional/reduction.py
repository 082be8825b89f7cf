"""How much each token weighs in the mean over a global batch.

    sum of w_t * loss_t over the loss mask / number of tokens in it, on all ranks

    token_mean      w = 1                              every token weighs the same
    answer_mean     w = tokens / (answers * |o_i|)     every answer does: the mean of the answers' means
    fixed_divisor   w = tokens / (answers * divisor)   every token does, and long batches are not shrunk

The engine always divides by the number of tokens; weights that carry `tokens / answers` make another mean of it, which
is then as exact as the first, and leaves statistics per token what they are.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from corral.workers.algorithms.functional.normalization import SumOverRanks
from corral.workers.algorithms.functional.packed import per_token, sum_per_answer

LossReduction = Literal["token_mean", "answer_mean", "fixed_divisor"]


def reduction_weights(
    loss_mask: Tensor,
    answer_lengths: Sequence[int],
    *,
    reduction: LossReduction,
    divisor: float | None,
    sum_over_ranks: SumOverRanks,
) -> Tensor:
    """[T] float32 weights of the tokens of one mini-batch; all ranks call it together.

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
        return torch.ones(loss_mask.shape[0])
    tokens = sum_per_answer(loss_mask.double(), answer_lengths)
    total = sum_over_ranks({"tokens": float(tokens.sum()), "answers": float((tokens > 0).sum())})
    tokens_per_answer = total["tokens"] / max(total["answers"], 1.0)
    if reduction == "answer_mean":
        return per_token(tokens_per_answer / tokens.clamp(min=1.0), answer_lengths).float()
    if divisor is None:
        raise ValueError("the reduction fixed_divisor needs a divisor: the most tokens that an answer may have")
    return torch.full(loss_mask.shape, tokens_per_answer / divisor)
