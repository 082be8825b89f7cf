"""The teachers of on-policy distillation: what they say of the policy's answers.

    answers ──► teacher_inf ────────── all rows ───► teacher_logprobs ─────────────────────┐
    answers ─┬► teacher_math_inf ── source math ──► teacher_logprobs_math, else 0 ─┐       ├──► actor_train
             └► teacher_code_inf ── source code ──► teacher_logprobs_code, else 0 ─┴─ sum ─┘

Where each source of rows has a teacher of its own, each computes the answers to its own rows alone.
What the policy makes of it is in `ppo_batch.py` and `ppo_actor.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.scheduling.keys import Key, built_in
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.base import ModelInterface, compute_logprobs
from corral.workers.backends.base import TrainEngine
from corral.workers.backends.token_scores import TokenScores
from corral.workers.data.sequence_sample import SequenceSample


class TeacherInterface(ModelInterface):
    """How likely a better model finds the tokens of the policy's answers."""

    inputs = {CallType.INFERENCE: built_in("input_ids", "prompt_mask")}
    outputs = {CallType.INFERENCE: built_in("teacher_logprobs")}

    def __init__(self, *, temperature: float, sources: Sequence[str] = ()) -> None:
        """
        Args:
            temperature: that the answers are sampled with.
            sources: of rows, the answers to which it judges; none: all.
        """
        self._temperature = temperature
        self._sources = frozenset(sources)

    def inference(self, engine: TrainEngine[TokenScores], sample: SequenceSample) -> dict[str, npt.NDArray[Any]]:
        """`teacher_logprobs` of the answers to its own rows; 0 for those to others."""
        is_own = [not self._sources or source_of(uid) in self._sources for uid in sample.uids]
        is_own_answer = np.repeat(np.array(is_own, np.bool_), sample.num_answers_per_sample())
        own = sample if all(is_own) else sample.select_answers(np.flatnonzero(is_own_answer).tolist())
        logprobs = np.zeros(sample.total_length() - len(is_own_answer), np.float32)
        is_own_token = np.repeat(is_own_answer, [length - 1 for length in sample.answer_lengths()])
        logprobs[is_own_token] = compute_logprobs(engine, own, temperature=self._temperature)
        return {"teacher_logprobs": logprobs}


def source_of(uid: str) -> str:
    """The name of the source that a sample's row comes from: of "0:math/12" it is math."""
    return uid.partition(":")[2].partition("/")[0]


def keys_of_teachers(sources: Sequence[str]) -> tuple[Key, ...]:
    """What the policy reads of teachers: of the one, or of those of these sources."""
    (key,) = built_in("teacher_logprobs")
    return tuple(Key(f"{key.name}_{source}", key.layout, key.dtype) for source in sources) or (key,)


def with_teachers_merged(sample: SequenceSample, sources: Sequence[str]) -> SequenceSample:
    """The sample with what all teachers say as if one had said it; each has 0 where it has not judged."""
    if not sources:
        return sample
    parts = [sample.data[key.name] for key in keys_of_teachers(sources)]
    return sample.with_key("teacher_logprobs", np.sum(parts, axis=0, dtype=np.float32))
