"""One packed row of tokens cut over ranks that hold the same model: context parallelism by Ulysses.

    whole row [T] ── cut_row ──► part r: tokens [r S, (r + 1) S)          embedding, projections, norms, MLPs, head
                                   q, k, v  [H, S, D] of every layer
                                        ── to_heads ──► [H / c, c S, D]   attention over whole sequences, some heads
                                   [H, S, D] ◄── to_tokens ──┘
    scores of the part ── RowPart.join ──► scores of the whole row, on every rank

for c ranks, H heads, S = T / c tokens (T is padded by a segment of its own that predicts nothing), D head_dim. Labels
are made on the whole row before it is cut: the last token of a part predicts the first one of the next. Both backends
cut rows here, and exchange and join what they are cut into.

Every rank computes the same loss from the whole row's scores, whatever the loss compares, and each sends back the
gradient of its own part only. So the ranks' gradients are parts of one sum, and are added up like those of other data.

Jacobs et al. 2023, https://arxiv.org/abs/2309.14509.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from corral.scheduling.keys import KeyLayout
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.torch_versions import gather_equal_parts


@dataclass(frozen=True, slots=True)
class RowPart:
    """This rank's tokens of a micro-batch, and how many scores each rank has of it."""

    micro_batch: MicroBatch
    """The S tokens of this rank, with what they predict; its segments are those of the whole padded row."""
    rank: int
    counts: Mapping[KeyLayout, tuple[int, ...]]
    """Scores of each rank, by their layout, without those of padding."""

    def join(self, scores: Tensor, layout: KeyLayout, group: dist.ProcessGroup | None) -> Tensor:
        """The scores of the whole row, from those of each rank's part; a collective, with gradient to the own part.

        Args:
            scores: [S', ...]: those of this part in the layout, and perhaps of padding behind them.
            group: the ranks that have the parts; None where the part is the row.
        """
        counts = self.counts[layout]
        start, count, longest = sum(counts[: self.rank]), counts[self.rank], max(counts)
        if group is None:
            return scores[:count]

        def gathered(own: Tensor) -> Tensor:
            padded = torch.cat([own, own.new_zeros((longest - count, *own.shape[1:]))])
            parts = own.new_empty((len(counts) * longest, *own.shape[1:]))
            gather_equal_parts(parts, padded, group=group)
            return torch.cat([part[:size] for part, size in zip(torch.split(parts, longest), counts, strict=True)])

        # Of the gradient, which all ranks know, each keeps that of its part.
        return with_transpose(scores[:count], gathered, lambda whole: whole[start : start + count].contiguous())


def cut_row(micro_batch: MicroBatch, *, rank: int, num_ranks: int, part_multiple: int = 1) -> RowPart:
    """The part of one of the ranks; the counts are made on the host, so that no device is waited for.

    Args:
        part_multiple: what the length of a part is a multiple of.
    """
    num_tokens = sum(micro_batch.segment_lengths)
    padding = -num_tokens % (num_ranks * part_multiple)
    width = (num_tokens + padding) // num_ranks
    bounds = [min(part * width, num_tokens) for part in range(num_ranks + 1)]
    before = {
        layout: [_scores_before(layout, micro_batch.segment_lengths, bound) for bound in bounds] for layout in KeyLayout
    }
    first = rank * width
    own = slice(first, first + width)
    scores = {layout: slice(numbers[rank], numbers[rank + 1]) for layout, numbers in before.items()}
    experts, temperature = micro_batch.routed_experts, micro_batch.temperature
    part = replace(
        micro_batch,
        segment_lengths=micro_batch.segment_lengths + ((padding,) if padding else ()),
        cu_seqlens=F.pad(micro_batch.cu_seqlens, (0, int(padding > 0)), value=num_tokens + padding),
        input_ids=F.pad(micro_batch.input_ids, (0, padding))[own],
        position_ids=F.pad(micro_batch.position_ids, (0, padding))[own],
        predicting=micro_batch.predicting[scores[KeyLayout.PER_SHIFTED_TOKEN]] - first,
        labels=micro_batch.labels[scores[KeyLayout.PER_SHIFTED_TOKEN]],
        asked=None if micro_batch.asked is None else micro_batch.asked[scores[KeyLayout.PER_SHIFTED_TOKEN]],
        last_tokens=micro_batch.last_tokens[scores[KeyLayout.PER_ANSWER]] - first,
        temperature=temperature[scores[KeyLayout.PER_SHIFTED_TOKEN]]
        if isinstance(temperature, Tensor)
        else temperature,
        # Those of padding say nothing.
        routed_experts=None if experts is None else F.pad(experts, (0, 0, 0, 0, 0, padding), value=-1)[own],
    )
    counts = {layout: tuple(end - start for start, end in pairwise(numbers)) for layout, numbers in before.items()}
    return RowPart(part, rank, counts)


def _scores_before(layout: KeyLayout, segment_lengths: tuple[int, ...], place: int) -> int:
    """How many scores belong to tokens before a place: the one of a segment to its last token."""
    if layout is KeyLayout.PER_ANSWER:
        return sum(end <= place for end in accumulate(segment_lengths))
    starts = accumulate(segment_lengths, initial=0)
    return sum(
        min(max(place - start, 0), most) for start, most in zip(starts, layout.lengths(segment_lengths), strict=False)
    )


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Some heads of all tokens, from all heads of some tokens; a collective.

    Args:
        query: [1, H, S, D]; `key` and `value` may have K < H heads, which are repeated as far as the ranks need it.

    Returns:
        Tensors [1, heads / c, c S, D]; query head i still meets the same key head.
    """
    size = dist.get_world_size(group)
    repeats = _repeats(query.shape[1], key.shape[1], size)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    packed = torch.cat([_in_parts(tensor[0], size) for tensor in (query, key, value)], dim=1)
    received = _exchange(packed, group)  # [c, heads / c, S, D]: by rank that had the tokens
    of_all_tokens = received.transpose(0, 1).flatten(1, 2)[None]
    heads = [tensor.shape[1] // size for tensor in (query, key, value)]
    own_query, own_key, own_value = torch.split(of_all_tokens, heads, dim=1)
    return own_query, own_key, own_value


def _repeats(queries: int, keys: int, ranks: int) -> int:
    """How often each key head must be there, so that every rank has the keys of its queries and no others."""
    if queries % ranks:
        raise ValueError(f"{queries} attention heads cannot be shared by {ranks} context-parallel ranks; lower c")
    if keys % ranks == 0:
        return 1
    return ranks // keys if ranks % keys == 0 else queries // keys


def to_tokens(output: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, c S, H / c, D] -> [1, S, H, D]: all heads of this rank's tokens, from some of all tokens; a collective."""
    parts = _in_parts(output[0], dist.get_world_size(group))
    received = _exchange(parts, group)  # [c, S, H / c, D]: by rank that had the heads
    return received.transpose(0, 1).flatten(1, 2)[None]


def _in_parts(tensor: Tensor, count: int) -> Tensor:
    """[count * n, ...] -> [count, n, ...]"""
    return tensor.reshape(count, -1, *tensor.shape[1:])


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i goes to rank i, and comes from rank i at place i; the gradient the same way back."""

    def exchanged(parts: Tensor) -> Tensor:
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    return with_transpose(parts, exchanged, exchanged)


def with_transpose(
    tensor: Tensor, collective: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor]
) -> Tensor:
    """What a linear function over ranks makes of a tensor, and its transpose of the gradient."""
    output: Tensor = _WithTranspose.apply(tensor, collective, transpose)  # type: ignore[no-untyped-call]
    return output


class _WithTranspose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, collective: Any, transpose: Any) -> Any:
        ctx.transpose = transpose
        return collective(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, None, None]:
        return ctx.transpose(gradients[0]), None, None
