"""The teachers of on-policy distillation: what they say of the policy's answers.

    answers ──► teacher_inf ────────── all rows ───► teacher_logprobs ─────────────────────┐
    answers ─┬► teacher_math_inf ── source math ──► teacher_logprobs_math, else 0 ─┐       ├──► actor_train
             └► teacher_code_inf ── source code ──► teacher_logprobs_code, else 0 ─┴─ sum ─┘

Where each source of rows has a teacher of its own, each computes the answers to its own rows alone.
Or they say which tokens they find likeliest in the place of each, teacher_topk_ids and teacher_topk_logprobs, alike.
They read the policy's prompts, or with `teacher_prompt` others, of which the policy knows nothing.
What the policy makes of it is in `ppo_batch.py` and `ppo_actor.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.scheduling.keys import TEACHER_PROMPT, TEMPERATURES, built_in, keys_of_teachers, teacher_keys
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.base import CallKeys, ModelInterface, compute_logprobs
from corral.workers.backends.base import TokenScores, TrainEngine
from corral.workers.data.prompts import source_of
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.data.teacher_prompts import as_it_is, behind_prompts, kept_prompts


class TeacherInterface(ModelInterface):
    """How likely a better model finds the tokens of the policy's answers, or which ones it finds likeliest."""

    inputs = {CallType.INFERENCE: built_in("input_ids", "prompt_mask")}

    def __init__(self, *, temperature: float, top_k: int | None = None, sources: Sequence[str] = ()) -> None:
        """
        Args:
            temperature: that the answers are sampled with, where samples do not say it.
            top_k: how many likeliest tokens; None for those of the answers.
            sources: of rows, the answers to which it judges; none: all.
        """
        self._temperature = temperature
        self._top_k = top_k
        self._sources = frozenset(sources)

    @property
    def outputs(self) -> CallKeys:
        return {CallType.INFERENCE: teacher_keys(self._top_k)}

    def inference(self, engine: TrainEngine[TokenScores], sample: SequenceSample) -> dict[str, npt.NDArray[Any]]:
        """Its keys of the answers to its own rows; 0 for those to others.

        Where the sample has `teacher_prompt`, of the answers behind that: then 0 on prompts, too.
        """
        is_own = [not self._sources or source_of(uid) in self._sources for uid in sample.uids]
        is_own_answer = np.repeat(np.array(is_own, np.bool_), sample.num_answers_per_sample())
        own = sample if all(is_own) else sample.select_answers(np.flatnonzero(is_own_answer).tolist())
        is_taught = np.repeat(is_own_answer, [length - 1 for length in sample.answer_lengths()])
        taught = behind_prompts(own, kept_prompts(own)) if TEACHER_PROMPT in own.data else as_it_is(own)
        is_taught[is_taught] = taught.policy_mask
        if self._top_k is None:
            made = [compute_logprobs(engine, taught.sample, temperature=self._temperature)]
        else:
            read = taught.sample.select_keys(
                [key for key in ("input_ids", TEMPERATURES) if key in taught.sample.seqlens]
            )
            made = list(engine.forward(read, temperature=self._temperature, top_k=self._top_k).values())
        values_by_key: dict[str, npt.NDArray[Any]] = {}
        for key, values in zip(teacher_keys(self._top_k), made, strict=True):
            whole = np.zeros((len(is_taught), math.prod(key.shape)), key.dtype)
            whole[is_taught] = values.reshape(-1, whole.shape[1])[taught.mask]
            values_by_key[key.name] = whole.reshape(-1)
        return values_by_key


def with_teachers_merged(sample: SequenceSample, sources: Sequence[str], top_k: int | None) -> SequenceSample:
    """The sample with what all teachers say as if one had said it; each has 0 where it has not judged."""
    if not sources:
        return sample
    for key in teacher_keys(top_k):
        parts = [sample.data[f"{key.name}_{source}"] for source in sources]
        sample = sample.with_key(key, np.sum(parts, axis=0, dtype=key.dtype))
    of_teachers = {key.name for key in keys_of_teachers(sources, top_k)}
    return sample.select_keys([key for key in sample.data if key not in of_teachers])
