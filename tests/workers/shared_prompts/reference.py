"""What attention over a row that has prompts once has to say: a softmax over what each token may see."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from corral.workers.shared_prompts import PromptGroup

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8


def inputs_of(
    groups: Sequence[PromptGroup], *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    """Queries, keys and values [1, R, heads, head_dim]; a layer has them transposed."""
    generator = torch.Generator().manual_seed(3)
    width = sum(group.num_tokens for group in groups)
    sizes = (HEADS, KEY_HEADS, KEY_HEADS)
    rows = [torch.randn(1, width, heads, HEAD_DIM, generator=generator) for heads in sizes]
    return [row.to(device, dtype).requires_grad_() for row in rows]


def is_seen(groups: Sequence[PromptGroup]) -> Tensor:
    """[R, R]: whether a token (row) may see another (column), one answer after the other."""
    width = sum(group.num_tokens for group in groups)
    seen = torch.zeros(width, width, dtype=torch.bool)
    start = 0
    for shared, own in groups:
        prompt = list(range(start, start + shared))
        at = start + shared
        for length in own:
            answer = prompt + list(range(at, at + length))
            for number, token in enumerate(answer):
                seen[token, answer[: number + 1]] = True
            at += length
        start = at
    return seen


def plain_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """[1, R, heads, head_dim], from the whole table of weights."""
    repeated = [tensor.repeat_interleave(HEADS // KEY_HEADS, dim=2) for tensor in (key, value)]
    weights = torch.einsum("bqhd,bkhd->bhqk", query, repeated[0]) * scale
    return torch.einsum("bhqk,bkhd->bqhd", weights.masked_fill(~seen, -math.inf).softmax(-1), repeated[1])
