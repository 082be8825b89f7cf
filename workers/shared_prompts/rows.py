"""Answers of one prompt in one row that has the prompt once, and where each of their tokens is in it.

    answers laid end to end      P P P a a   P P P b b b       T tokens; positions 0 1 2 3 4   0 1 2 3 4 5
                                 └─ Beginnings ─► 3 shared
    row                          P P P a a b b b               R tokens; positions 0 1 2 3 4 3 4 5
    places of the answers        0 1 2 3 4   0 1 2 5 6 7       [T], into the row
    questions                    (P, P) (P, P) (P, a) (a, a) (P, b) (b, b) (b, b)     one for each token with one before

A causal model says the same of tokens that have the same before them. So what it says of a row says all of the answers:
each token but the first is asked for once, by the place before it, and the answers share what they have in common.
"""

from collections.abc import Iterable, Sequence
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
Places = npt.NDArray[np.int64]


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
    """What a model is told and asked of a row that has prompts once; tensors are on the training device."""

    groups: tuple[PromptGroup, ...]
    """The whole row, from its beginning."""
    places: Tensor
    """[T] int64: where each token of the answers, laid end to end, is in the row."""
    predicting: Tensor
    """[Q] int64: places in the row whose logits predict `labels`."""
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
    sources: list[Places] = []
    places: list[Places] = []
    token = place = 0
    for group in groups:
        shared = np.arange(place, place + group.shared)
        sources.append(np.arange(token, token + group.shared))
        place += group.shared
        for own in group.own:
            sources.append(np.arange(token + group.shared, token + group.shared + own))
            places += [shared, np.arange(place, place + own)]
            token += group.shared + own
            place += own
    source_of, place_of = np.concatenate(sources), np.concatenate(places)
    lengths = [group.shared + own for group in groups for own in group.own]
    following = np.delete(np.arange(token), [0, *accumulate(lengths[:-1])])  # all but the first of each answer
    # A place of the row follows one place only, whichever answer is read: it stands for the pair.
    asked, one_of_each, questions = np.unique(place_of[following], return_index=True, return_inverse=True)
    predicting = place_of[following - 1][one_of_each]
    labels = input_ids[source_of[asked]]
    return torch.from_numpy(source_of), SharedRow(
        groups, torch.from_numpy(place_of), torch.from_numpy(predicting), labels, torch.from_numpy(questions)
    )
