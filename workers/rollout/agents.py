"""Agents: async functions from a problem to a judged group of answers.

An agent gets the problem, a sampler that speaks text and token ids, and a judge that calls the reward function with its
deadline and retries. Whatever else an agent awaits has to come within `rollout.agent_timeout_s`. The one that ships
asks once and judges all answers; others are named by import path.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.rollout.rewards import Problem

SampleGroup = Callable[[Sequence[int]], Awaitable[list[PartialAnswer]]]
"""Prompt token ids -> the group's answers."""


class Judge(Protocol):
    """Problem, answer -> reward, or answers -> rewards, as a reward of groups has to be asked; raises RewardFailedError
    after the last retry.
    """

    @overload
    async def __call__(self, problem: Problem, answers: PartialAnswer, /) -> float: ...
    @overload
    async def __call__(self, problem: Problem, answers: Sequence[PartialAnswer], /) -> list[float]: ...


@dataclass(frozen=True)
class JudgedGroup:
    """The answers to one prompt with their rewards."""

    prompt_ids: list[int]
    answers: list[PartialAnswer]
    rewards: list[float]


async def single_turn(problem: Problem, prompt_ids: list[int], sample_group: SampleGroup, judge: Judge) -> JudgedGroup:
    """Ask once, judge all answers at the same time."""
    answers = await sample_group(prompt_ids)
    return JudgedGroup(prompt_ids=prompt_ids, answers=answers, rewards=await judge(problem, answers))
