"""From judged episodes to the sample that the trainer gets: one sequence for each branch.

    given P, made A, given T, made B, reward  ──►  input_ids [N], prompt_mask [N]: True on P and T
                                                   old_logprobs [N-1], versions [N-1], rewards [1], seq_no_eos_mask [1]
                                                   of a mixture: routed_experts [N, layers, k]
                                                   where rows may say how is sampled: temperatures [1]
    of agents besides: episodes [1], which one of the group it is of;  turn_rewards [N-1]

Values that belong to a token stand at the position before it, where it was predicted: the first token of an answer to a
prompt of P tokens at P - 1. The reward of an episode stands on each of its sequences.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.experiments.worker_specs import RoutedExpertsSpec
from corral.scheduling.keys import (
    REMARKS,
    REWARD_PARTS,
    ROUTED_EXPERTS,
    TEACHER_PROMPT,
    TEMPERATURES,
    Key,
    merge_keys,
    remarks_key,
    reward_parts_key,
    teacher_prompt_key,
)
from corral.scheduling.policy_version import PolicyVersion, VersionSpan
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.data.side_numbers import finite_means
from corral.workers.episodes.log import Branch, Segment
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.episodes.routed_experts import AnswerExperts

Array = npt.NDArray[Any]
REWARD_PART = "reward/part/"
"""What the statistic of an answer that a part of the reward has made begins with, before the part's name."""
DUPLICATES = "response_duplicates"
"""Name of the statistic of a group: 0 where all answers differ, 1 where all are the same."""
REWARD_SECONDS = "reward/seconds"
"""Name of the statistic of an answer: from its end to its reward."""


def reward_parts_of(statistics: Mapping[str, float]) -> dict[str, float]:
    """The parts of a reward among its statistics, by name."""
    return {
        name.removeprefix(REWARD_PART): number for name, number in statistics.items() if name.startswith(REWARD_PART)
    }


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """One of the answers to a prompt, over however many turns and branches, with its reward."""

    branches: Sequence[Branch]
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The notes of its agent, by name."""
    ended: str = ""
    """Why it ended early: length, turns, time, or a word of its agent's; "" if it did not."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the reward's parts for it, by name of the statistic."""
    said: str = ""
    """The same in words."""

    @property
    def remarks(self) -> str:
        """Notes for people: of its reward, of its agent, and why it ended early."""
        noted = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return "\n".join(filter(None, [self.said, noted and f"noted: {noted}", self.ended and f"ended: {self.ended}"]))

    @property
    def answers(self) -> list[PartialAnswer]:
        """What was made in it, turn by turn of each branch."""
        return [segment.answer for segment in self._segments() if segment.answer is not None]

    @property
    def total(self) -> float:
        """Everything that it was given: its reward, and those of its turns."""
        return self.reward + sum(segment.reward for segment in self._segments())

    @property
    def outcome(self) -> float:
        """Its reward, and those of turns that nothing is learned from: they stand on no token of the trainer's."""
        return self.reward + sum(segment.reward for segment in self._segments() if not segment.is_trained)

    def _segments(self) -> Iterator[Segment]:
        return (segment for branch in self.branches for segment in branch.segments)

    def sequences(self) -> list[Branch]:
        """The branches that something is learned from."""
        return [branch for branch in self.branches if any(segment.is_trained for segment in branch.segments)]


def group_statistics(episodes: Sequence[JudgedEpisode]) -> dict[str, float]:
    """Of a group: the means of what parts of the reward have said, how long it has waited for them, and the share of
    its episodes in which the same was made as in another."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.parts.items():
            values.setdefault(name, []).append(value)
    means = finite_means(values)
    waits = values.get(REWARD_SECONDS)
    made = {tuple(token for answer in episode.answers for token in answer.output_ids) for episode in episodes}
    alike = {DUPLICATES: (len(episodes) - len(made)) / (len(episodes) - 1)} if len(episodes) > 1 else {}
    return means | alike | ({f"{REWARD_SECONDS}/max": max(waits)} if waits else {})


def make_sample(
    uid: str,
    episodes: Sequence[JudgedEpisode],
    *,
    experts: RoutedExpertsSpec | None = None,
    parts: Sequence[str] = (),
    remarks_bytes: int = 0,
    teacher_prompt: npt.NDArray[np.int32] | None = None,
    says_episodes: bool = False,
    temperature: float | None = None,
) -> SequenceSample:
    """The packed sample of one group.

    Args:
        experts: of a mixture whose trainer replays its routing.
        parts: of the reward, whose numbers go along for people to read.
        remarks_bytes: for what is said of each in words, which goes along, too.
        teacher_prompt: what teachers read in the prompt's place, as its key has it; it goes along, too.
        says_episodes: whether it has `episodes` and `turn_rewards`; without, every episode is one sequence.
        temperature: that all of it was sampled with, where the sample is to say so.
    """
    # One from which nothing is learned has no number: the trainer counts from 0 without a gap.
    episodes = [each for each in episodes if each.sequences()]
    numbered = [(number, branch) for number, each in enumerate(episodes) for branch in each.sequences()]
    branches = [branch for _, branch in numbered]
    values: dict[str, list[Array]] = {
        "input_ids": [_concatenated([segment.ids for segment in each.segments], np.int32) for each in branches],
        "prompt_mask": [
            np.repeat([not s.is_trained for s in each.segments], [len(s.ids) for s in each.segments])
            for each in branches
        ],
        "old_logprobs": [_before(each, _logprobs, np.float32) for each in branches],
        "versions": [_before(each, _versions, np.int32) for each in branches],
        "rewards": [np.asarray([episodes[number].outcome], np.float32) for number, _ in numbered],
        "seq_no_eos_mask": [np.asarray([each.is_cut], np.bool_) for each in branches],
    }
    if says_episodes:
        values["episodes"] = [np.asarray([number], np.int32) for number, _ in numbered]
        values["turn_rewards"] = [_before(each, _turn_rewards, np.float32) for each in branches]
    if temperature is not None:
        values[TEMPERATURES] = [np.asarray([temperature], np.float32)] * len(branches)
    declared: list[Key] = []
    if parts:
        declared.append(reward_parts_key(len(parts)))
        values_of_parts = [
            [episodes[number].parts.get(f"{REWARD_PART}{name}", math.nan) for name in parts] for number, _ in numbered
        ]
        with np.errstate(over="ignore"):  # a part without weight may say any number
            values[REWARD_PARTS] = list(np.asarray(values_of_parts, np.float32))
    if remarks_bytes:
        declared.append(remarks_key(remarks_bytes))
        remarks = (episodes[number].remarks.encode(errors="replace")[:remarks_bytes] for number, _ in numbered)
        values[REMARKS] = [np.frombuffer(text.ljust(remarks_bytes, b"\0"), np.uint8) for text in remarks]
    if teacher_prompt is not None:
        declared.append(teacher_prompt_key(len(teacher_prompt)))
        values[TEACHER_PROMPT] = [teacher_prompt] * len(branches)
    if experts is not None:
        declared.append(experts.key)
        unknown = AnswerExperts(experts, ())
        values[ROUTED_EXPERTS] = [(each.experts or unknown).rows(num_tokens=each.num_tokens) for each in branches]
    return SequenceSample.from_group(uid, values, specs=merge_keys(declared))


def version_spans(branch: Branch) -> list[VersionSpan]:
    """The versions that generated the trained tokens; positions count these."""
    spans, start = list[VersionSpan](), 0
    for segment in branch.segments:
        if segment.is_trained and segment.answer is not None:
            spans += [VersionSpan(s.version, s.start + start, s.end + start) for s in segment.answer.spans]
            start += len(segment.ids)
    return spans


def _before(branch: Branch, values_of: Callable[[Segment], Array], dtype: npt.DTypeLike) -> Array:
    """Values of tokens, each at the position before it."""
    return _concatenated(list(map(values_of, branch.segments)), dtype)[1:]


def _logprobs(segment: Segment) -> Array:
    known = segment.answer.logprobs if segment.is_trained and segment.answer is not None else None
    return np.zeros(len(segment.ids)) if known is None else np.asarray(known, np.float32)


def _versions(segment: Segment) -> Array:
    if not segment.is_trained or segment.answer is None:
        return np.full(len(segment.ids), -1, np.int32)
    spans = segment.answer.spans
    steps = [PolicyVersion.parse(span.version).step for span in spans]
    return np.repeat(np.asarray(steps, np.int32), [span.end - span.start for span in spans])


def _turn_rewards(segment: Segment) -> Array:
    rewards = np.zeros(len(segment.ids), np.float32)
    rewards[-1:] = segment.reward
    return rewards


def _concatenated(parts: Sequence[Sequence[Any] | Array], dtype: npt.DTypeLike) -> Array:
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts])
