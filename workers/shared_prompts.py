"""Answers of one prompt in one row that has the prompt once, and where each of their tokens is in it.

    answers laid end to end      P P P a a   P P P b b b       T tokens; positions 0 1 2 3 4   0 1 2 3 4 5
                                 └─ Beginnings ─► 3 shared
    row                          P P P a a b b b               R tokens; positions 0 1 2 3 4 3 4 5
    indices of the answers       0 1 2 3 4   0 1 2 5 6 7       [T], into the row
    questions                    (P, P) (P, P) (P, a) (a, a) (P, b) (b, b) (b, b)     one for each token with one before

A causal model says the same of tokens that have the same before them. So what it says of a row says all of the answers:
each token but the first is asked for once, by the token before it, and the answers share what they have in common.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.scheduling.keys import ROUTED_EXPERTS
from corral.scheduling.packing import pack_first_fit_decreasing
from corral.workers.data.sequence_sample import SequenceSample, answer_slices

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


class PromptGroup(NamedTuple):
    """Neighbours in a row: what they share, and then what each has of its own.

    Example:
        PromptGroup(shared=3, own=(2, 3))    # the row in the module's docstring
        PromptGroup(shared=0, own=(7, 4))    # two answers that have nothing in common
    """

    shared: int
    """Tokens that all of them begin with, which the row has once."""
    own: tuple[int, ...]
    """Tokens of each after those, at least one."""

    @property
    def num_tokens(self) -> int:
        """Of the row."""
        return self.shared + sum(self.own)


class SharedRow(NamedTuple):
    """A model's inputs for a row that has each prompt once; tensors are on the training device."""

    groups: tuple[PromptGroup, ...]
    """The whole row, from its beginning."""
    indices: Tensor
    """[T] int64: the index in the row of each token of the answers, laid end to end."""
    predicting: Tensor
    """[Q] int64: indices in the row whose logits predict `labels`."""
    labels: Tensor
    """[Q] int64: the tokens of the row that have one before them."""
    questions: Tensor
    """[T - n] int64: the label, of Q, that each label of the micro-batch is."""


class Beginnings:
    """How far answers of a sample are the same: by their tokens, and by the experts that these went to."""

    def __init__(self, sample: SequenceSample) -> None:
        self._lengths = sample.answer_lengths()
        self._arrays: list[list[Array]] = []
        """Of each key, of each answer: [tokens, numbers of each]."""
        for key in {"input_ids", ROUTED_EXPERTS} & sample.data.keys():
            parts = zip(answer_slices(sample.answer_lengths(key)), self._lengths, strict=True)
            self._arrays.append([sample.data[key][part].reshape(num_tokens, -1) for part, num_tokens in parts])

    def shared_by(self, answers: Sequence[int]) -> int:
        """Tokens that all of these answers begin with; each is left at least one of its own, and one shares nothing."""
        if len(answers) < 2:
            return 0
        limit = min(self._lengths[answer] for answer in answers) - 1
        is_same = np.ones(limit + 1, np.bool_)
        is_same[limit] = False
        for arrays in self._arrays:
            first = arrays[answers[0]][:limit]
            for answer in answers[1:]:
                is_same[:limit] &= (arrays[answer][:limit] == first).all(axis=1)
        return int(is_same.argmin())


def pack_groups(
    groups: Iterable[Sequence[int]], lengths: Sequence[int], beginnings: Beginnings, *, max_tokens: int, is_cut: bool
) -> tuple[list[list[int]], list[int]]:
    """Answers that go into a row together, so that few rows have the same prompt, and the tokens that they take there.

    Args:
        groups: answers of each prompt; none is longer than `max_tokens`.
        lengths: of every answer.
        is_cut: whether answers of a prompt that do not fit into one row may go into several.
    """
    units: list[list[int]] = []
    sizes: list[int] = []
    for group in groups:
        shared = beginnings.shared_by(group)
        own = [lengths[answer] - shared for answer in group]
        parts = [list(range(len(own)))]
        if is_cut and shared == 0:
            parts = [[number] for number in range(len(own))]
        elif is_cut:
            bins = pack_first_fit_decreasing(own, max_tokens=max_tokens - shared)
            parts = [sorted(bin_, key=lambda number: (own[number], number)) for bin_ in bins]
        for part in parts:
            units.append([group[number] for number in part])
            sizes.append(shared + sum(own[number] for number in part))
    return units, sizes


def groups_of_row(
    answers: Sequence[int], lengths: Sequence[int], prompts: Sequence[int], beginnings: Beginnings
) -> tuple[PromptGroup, ...] | None:
    """How answers stand in one row in their order: neighbours of one prompt share it; None where none does.

    Args:
        lengths: of every answer of the sample.
        prompts: a number of the prompt of every answer of the sample.
    """
    groups: list[PromptGroup] = []
    for _, neighbours in groupby(answers, key=prompts.__getitem__):
        members = list(neighbours)
        shared = beginnings.shared_by(members)
        own = tuple(lengths[answer] - shared for answer in members)
        if groups and groups[-1].shared == shared == 0:  # so that attention takes those of equal length together
            own = groups.pop().own + own
        groups.append(PromptGroup(shared, own))
    return tuple(groups) if any(group.shared for group in groups) else None


def shared_row(groups: tuple[PromptGroup, ...], input_ids: Tensor) -> tuple[Tensor, SharedRow]:
    """Which token is where, on the host.

    Args:
        input_ids: [T] of the answers laid end to end.

    Returns:
        [R] int64, the token of the answers that each token of the row is; and the row.
    """
    sources: list[Indices] = []
    indices: list[Indices] = []
    token = index = 0
    for group in groups:
        shared = np.arange(index, index + group.shared)
        sources.append(np.arange(token, token + group.shared))
        index += group.shared
        for own in group.own:
            sources.append(np.arange(token + group.shared, token + group.shared + own))
            indices += [shared, np.arange(index, index + own)]
            token += group.shared + own
            index += own
    source_of, index_of = np.concatenate(sources), np.concatenate(indices)
    lengths = [group.shared + own for group in groups for own in group.own]
    following = np.delete(np.arange(token), [0, *accumulate(lengths[:-1])])  # all but the first of each answer
    # A token of the row follows one token only, whichever answer is read: it stands for the pair.
    asked, one_of_each, questions = np.unique(index_of[following], return_index=True, return_inverse=True)
    predicting = index_of[following - 1][one_of_each]
    labels = input_ids[source_of[asked]]
    return torch.from_numpy(source_of), SharedRow(
        groups, torch.from_numpy(index_of), torch.from_numpy(predicting), labels, torch.from_numpy(questions)
    )


# Causal attention over a row that has prompts once: each answer sees itself, and the prompt before it.
#
#     row                P P P P a a b b b
#     own                prompt, a and b, each within itself, causally             runs of equal length in one call
#     prompt             all queries of a and b ──► all keys of P                  one call a group, without a mask
#     merged             for queries of a and b: both results, weighted by the sums of their softmax
#
# A softmax over two sets of keys is made of those over each: o = (e^l1 o1 + e^l2 o2) / (e^l1 + e^l2) for results o and
# logarithms l of the sums (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867). Nothing is made for the
# pairs of answers, and no key or value is there twice; what is kept for the backward pass is what one call over the row
# keeps. The kernel's backward pass of a set of keys, given the merged result and sum, gives the part of that set.

_ATEN = torch.ops.aten


class _Piece(NamedTuple):
    """One call of the kernel."""

    queries: slice
    """Of the row."""
    keys: slice
    """Of the row."""
    num_segments: int
    """Segments of equal length in both, which do not see each other."""
    is_causal: bool


def attend_with_shared_prompts(
    query: Tensor, key: Tensor, value: Tensor, *, groups: Sequence[PromptGroup], scaling: float | None
) -> Tensor:
    """[1, heads, R, head_dim] each, `key` and `value` with perhaps fewer heads -> [1, R, heads, head_dim].

    Args:
        groups: the whole row.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # which knows torch's own calls only
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    output: Tensor = _SharedPromptAttention.apply(query, key, value, tuple(groups), scaling)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2)


class _SharedPromptAttention(torch.autograd.Function):
    """[1, heads, R, head_dim] -> the same, in memory token by token."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, groups: tuple[PromptGroup, ...], scale: float | None
    ) -> Tensor:
        _, heads, width, head_dim = query.shape
        output = query.new_empty(1, width, heads, head_dim).transpose(1, 2)
        log_sums = query.new_empty(1, heads, width, dtype=torch.float32)
        for piece in _within_segments(groups):
            result, of_piece = _attend(piece, query, key, value, scale)
            output[:, :, piece.queries] = in_row(result)
            log_sums[:, :, piece.queries] = in_row(of_piece[..., None])[..., 0]
        for piece in _on_prompts(groups):
            result, of_piece = _attend(piece, query, key, value, scale)
            own = log_sums[:, :, piece.queries].clone()
            merged = torch.logaddexp(own, of_piece)
            log_sums[:, :, piece.queries] = merged
            result = result * (of_piece - merged).exp()[..., None]  # float32, whatever the type of the products
            output[:, :, piece.queries] = result + output[:, :, piece.queries] * (own - merged).exp()[..., None]
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.groups, ctx.scale = groups, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: a layer that is computed again gives them one time
        of_inputs = [torch.zeros_like(tensor) for tensor in saved[:3]]
        for piece in (*_within_segments(ctx.groups), *_on_prompts(ctx.groups)):
            parts = _gradients(piece, gradients[0], saved, ctx.scale)
            for whole, part, index in zip(of_inputs, parts, (piece.queries, piece.keys, piece.keys), strict=True):
                whole[:, :, index] += in_row(part)
        return *of_inputs, None, None


def _within_segments(groups: Sequence[PromptGroup]) -> Iterator[_Piece]:
    """Each segment within itself; neighbours of equal length are one piece."""
    segments = [length for shared, own in groups for length in (shared, *own) if length]
    start = 0
    for length, equal in groupby(segments):
        count = len(list(equal))
        run = slice(start, start + length * count)
        yield _Piece(run, run, count, is_causal=True)
        start = run.stop


def _on_prompts(groups: Sequence[PromptGroup]) -> Iterator[_Piece]:
    """All that the answers of a group have of their own, and what they share."""
    start = 0
    for group in groups:
        end = start + group.num_tokens
        if group.shared:
            middle = start + group.shared
            yield _Piece(slice(middle, end), slice(start, middle), 1, is_causal=False)
        start = end


def _attend(piece: _Piece, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """[count, heads, length, head_dim], and [count, heads, length] float32: the logarithms of the softmax's sums."""
    queries = stacked(query[:, :, piece.queries], piece.num_segments)
    keys, values = (stacked(tensor[:, :, piece.keys], piece.num_segments) for tensor in (key, value))
    kernel = (
        _ATEN._scaled_dot_product_flash_attention_for_cpu
        if query.device.type == "cpu"
        else _ATEN._scaled_dot_product_flash_attention
    )
    result, log_sums, *_ = kernel(queries, keys, values, 0.0, piece.is_causal, scale=scale)
    return result, log_sums


def _gradients(
    piece: _Piece, gradient: Tensor, saved: Sequence[Tensor], scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What the keys of a piece are the reason of, by its queries, keys and values.

    Args:
        gradient: by the output of the row.
        saved: queries, keys, values, output, and logarithms of the softmax's sums of the row.
    """
    query, key, value, output, log_sums = saved
    of_result, queries, results = (
        stacked(tensor[:, :, piece.queries], piece.num_segments) for tensor in (gradient, query, output)
    )
    keys, values = (stacked(tensor[:, :, piece.keys], piece.num_segments) for tensor in (key, value))
    sums = stacked(log_sums[:, :, piece.queries, None], piece.num_segments)[..., 0]
    known = (of_result, queries, keys, values, results, sums.contiguous())
    if query.device.type == "cpu":
        backward: Any = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        parts: tuple[Tensor, Tensor, Tensor] = backward(*known, 0.0, piece.is_causal, scale=scale)
        return parts
    nothing_random = torch.zeros(2, dtype=torch.uint64, device=query.device)
    backward = _ATEN._scaled_dot_product_flash_attention_backward
    lengths = (None, None, queries.shape[2], keys.shape[2])
    parts = backward(*known, *lengths, 0.0, piece.is_causal, nothing_random, nothing_random[0], scale=scale)
    return parts


def stacked(run: Tensor, count: int) -> Tensor:
    """[1, heads, count * length, size] -> [count, heads, length, size], without a copy."""
    _, heads, width, size = run.shape
    return run[0].view(heads, count, width // count, size).transpose(0, 1)


def in_row(several: Tensor) -> Tensor:
    """The inverse of `stacked`."""
    return several.transpose(0, 1).flatten(1, 2)[None]
