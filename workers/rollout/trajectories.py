"""From a judged group of answers to the sample that the trainer gets.

prompt ids P, answer ids A, logprobs, versions, reward  ──►  input_ids [P+A], prompt_mask [P+A],
                                                             old_logprobs [P+A-1], versions [P+A-1], rewards [1] ...
                                                             of a mixture: routed_experts [P+A, layers, k]
                                                             of an agent: episodes [1], turn_rewards [P+A-1]
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.experiments.worker_specs import RoutedExpertsSpec
from corral.scheduling.keys import EPISODES, ROUTED_EXPERTS, TURN_REWARDS
from corral.workers.data.sequence_sample import SequenceSample, key_specs
from corral.workers.rollout.agents import JudgedGroup
from corral.workers.rollout.partial_rollout import PartialAnswer
from corral.workers.rollout.routed_experts import Rows, nothing_known


def make_sample(
    uid: str, group: JudgedGroup, *, experts: RoutedExpertsSpec | None = None, makes_episodes: bool = False
) -> SequenceSample:
    """The packed sample of one group.

    Values that belong to a token stand at the position before it, where it was predicted: the first response token of a
    prompt of P tokens at P - 1.

    Args:
        experts: of a mixture whose trainer is told whom to choose.
        makes_episodes: whether samples of the trial say which sequence is of which episode: here each is one by itself.
    """
    prompt, values = group.prompt_ids, _values_of(group)
    if makes_episodes:
        values[EPISODES] = [np.asarray([number], dtype=np.int32) for number in range(len(group.answers))]
        values[TURN_REWARDS] = [np.zeros_like(logprobs) for logprobs in values["old_logprobs"]]
    if experts is None:
        return SequenceSample.from_group(uid, values)
    values[ROUTED_EXPERTS] = [_experts_of(answer, prompt, experts) for answer in group.answers]
    return SequenceSample.from_group(uid, values, specs=key_specs([experts.key]))


def _experts_of(answer: PartialAnswer, prompt: Sequence[int], spec: RoutedExpertsSpec) -> Rows:
    num_tokens = len(prompt) + len(answer.output_ids)
    known = answer.experts
    return nothing_known(spec, num_tokens=num_tokens) if known is None else known.of(prompt, num_tokens=num_tokens)


def _values_of(group: JudgedGroup) -> dict[str, list[npt.NDArray[Any]]]:
    prompt = group.prompt_ids
    return {
        "input_ids": [np.asarray([*prompt, *answer.output_ids], dtype=np.int32) for answer in group.answers],
        "prompt_mask": [np.arange(len(prompt) + len(answer.output_ids)) < len(prompt) for answer in group.answers],
        "old_logprobs": [_after_prompt(len(prompt), answer.logprobs, np.float32, 0.0) for answer in group.answers],
        "versions": [
            _after_prompt(len(prompt), [version.step for version in answer.versions()], np.int32, -1)
            for answer in group.answers
        ],
        "rewards": [np.asarray([reward], dtype=np.float32) for reward in group.rewards],
        "seq_no_eos_mask": [np.asarray([not answer.stopped], dtype=np.bool_) for answer in group.answers],
    }


def _after_prompt(prompt_length: int, values: Sequence[float], dtype: npt.DTypeLike, fill: float) -> npt.NDArray[Any]:
    shifted = np.full(prompt_length - 1 + len(values), fill, dtype=dtype)
    shifted[prompt_length - 1 :] = values
    return shifted
