"""Answers for a teacher whose prompts say more than the policy's: put behind these prompts, and back again.

P P | a b c        the policy's prompt and answer       values of the answer, per shifted token: . v v v
Q Q Q Q | a b c    what the teacher reads                                                        . . . v v v
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from corral.scheduling.keys import TEACHER_PROMPT, TEMPERATURES, find_declared
from corral.workers.data.sequence_sample import SequenceSample, answer_slices

Mask = npt.NDArray[np.bool_]


class TaughtAnswers(NamedTuple):
    """The answers of a sample behind other prompts."""

    sample: SequenceSample
    """Their `input_ids` and `prompt_mask`, and `temperatures` where there are any."""
    mask: Mask
    """True at the answers' tokens among the shifted tokens of `sample`,"""
    policy_mask: Mask
    """and among those of the sample that they come from: as many, in the same order."""


def padded_prompt(prompt_ids: Sequence[int], size: int) -> npt.NDArray[np.int32]:
    """[size] int32: one value of the key `teacher_prompt`."""
    return np.pad(np.asarray(prompt_ids, np.int32), (0, size - len(prompt_ids)), constant_values=-1)


def kept_prompts(sample: SequenceSample) -> list[npt.NDArray[np.int32]]:
    """The prompt of each answer that the key `teacher_prompt` has."""
    (size,) = find_declared(TEACHER_PROMPT, sample.specs).shape
    return [prompt[prompt >= 0] for prompt in sample.data[TEACHER_PROMPT].reshape(-1, size)]


def as_it_is(sample: SequenceSample) -> TaughtAnswers:
    """The answers behind the prompts that they have."""
    everywhere = np.ones(sample.total_length() - len(sample.answer_lengths()), np.bool_)
    return TaughtAnswers(sample, everywhere, everywhere)


def behind_prompts(sample: SequenceSample, prompts: Iterable[npt.ArrayLike]) -> TaughtAnswers:
    """Answers with these prompts, one for each, in place of what was given before their first made token."""
    ids, prompt_mask, mask, policy_mask = ([np.empty(0, kind)] for kind in (np.int32, np.bool_, np.bool_, np.bool_))
    for answer, prompt in zip(answer_slices(sample.answer_lengths()), prompts, strict=True):
        is_given = sample.data["prompt_mask"][answer]
        num_given = int(np.argmin(np.append(is_given, False)))
        given: npt.NDArray[Any] = np.asarray(prompt, np.int32)
        ids.append(np.append(given, sample.data["input_ids"][answer][num_given:]))
        prompt_mask.append(np.append(np.ones(len(given), np.bool_), is_given[num_given:]))
        mask.append(np.arange(1, len(ids[-1])) >= len(given))
        policy_mask.append(np.arange(1, len(is_given)) >= num_given)
    lengths = iter([len(one) for one in ids[1:]])
    groups = [[next(lengths) for _ in range(count)] for count in sample.num_answers_per_sample()]
    data = {"input_ids": np.concatenate(ids), "prompt_mask": np.concatenate(prompt_mask)}
    seqlens = dict.fromkeys(data, groups)
    if TEMPERATURES in sample.data:
        data[TEMPERATURES], seqlens[TEMPERATURES] = sample.data[TEMPERATURES], sample.seqlens[TEMPERATURES]
    taught = SequenceSample(sample.uids, seqlens, data, sample.specs)
    return TaughtAnswers(taught, np.concatenate(mask), np.concatenate(policy_mask))
