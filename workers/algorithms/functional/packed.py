"""Sums, means and spreading over the answers of a packed row, and what a mask leaves of it.

values [T]  |--- answer 0 ---|- answer 1 -|---- answer 2 ----|  ──sum_per_answer──►  [n]  ──per_token──►  [T]

What these say of the tokens of answers holds for the sequences of episodes, too, and for the answers of groups.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def answer_index(lengths: Sequence[int], device: torch.device | None = None) -> Tensor:
    """[T] int64: the number of the answer that each value belongs to."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=device), counts, output_size=sum(lengths))


def sum_per_answer(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[n] sums of the answers' values, in the values' type; an empty answer has 0."""
    index = answer_index(lengths, values.device)
    return torch.zeros(len(lengths), dtype=values.dtype, device=values.device).index_add(0, index, values)


def last_in_mask(mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """[n] int64: where the last True entry of each answer is, or its last entry if none is True; no answer is empty."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=mask.device)
    ends = counts.cumsum(0)
    places = torch.cat([torch.full((1,), -1, dtype=counts.dtype, device=counts.device), mask.nonzero().squeeze(1)])
    last = places[torch.searchsorted(places, ends) - 1]
    return torch.where(last < ends - counts, ends - 1, last)


def with_one_more(mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T + n] bool: the mask of a key per token from that of one per shifted token; True at each answer's last one."""
    index = answer_index(lengths, mask.device)
    wide = torch.ones(mask.shape[0] + len(lengths), dtype=torch.bool, device=mask.device)
    wide[torch.arange(mask.shape[0], device=mask.device) + index] = mask
    return wide


def mean_per_answer(values: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """[n] means of the answers' values where the mask is True; 0 for an answer without any."""
    sums = sum_per_answer(torch.where(mask, values, 0.0), lengths)
    return sums / sum_per_answer(mask.to(values.dtype), lengths).clamp(min=1.0)


def per_token(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T]: each answer's value at all of its tokens."""
    return values[answer_index(lengths, values.device)]
