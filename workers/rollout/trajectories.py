"""From a judged group of answers to the sample that the trainer gets.

prompt ids P, answer ids A, logprobs, versions, reward  ──►  input_ids [P+A], prompt_mask [P+A],
                                                             old_logprobs [P+A-1], versions [P+A-1], rewards [1] ...
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.rollout.agents import JudgedGroup


def make_sample(uid: str, group: JudgedGroup) -> SequenceSample:
    """The packed sample of one group.

    Values that belong to a token stand at the position before it, where it was predicted: the first response token of a
    prompt of P tokens at P - 1.
    """
    prompt = group.prompt_ids
    return SequenceSample.from_group(
        uid,
        {
            "input_ids": [np.asarray([*prompt, *answer.output_ids], dtype=np.int32) for answer in group.answers],
            "prompt_mask": [np.arange(len(prompt) + len(answer.output_ids)) < len(prompt) for answer in group.answers],
            "old_logprobs": [_after_prompt(len(prompt), answer.logprobs, np.float32, 0.0) for answer in group.answers],
            "versions": [
                _after_prompt(len(prompt), [version.step for version in answer.versions()], np.int32, -1)
                for answer in group.answers
            ],
            "rewards": [np.asarray([reward], dtype=np.float32) for reward in group.rewards],
            "seq_no_eos_mask": [np.asarray([not answer.stopped], dtype=np.bool_) for answer in group.answers],
        },
    )


def _after_prompt(prompt_length: int, values: Sequence[float], dtype: npt.DTypeLike, fill: float) -> npt.NDArray[Any]:
    shifted = np.full(prompt_length - 1 + len(values), fill, dtype=dtype)
    shifted[prompt_length - 1 :] = values
    return shifted
