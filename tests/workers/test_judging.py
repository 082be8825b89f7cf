"""Judging: what user code fails at is a failure, and a worker that leaves has failed at nothing."""

import asyncio
from typing import Any

import pytest

from corral.experiments.config import RolloutConfig
from corral.workers.rollout.judging import RewardFailedError, RewardJudge
from corral.workers.rollout.partial_rollout import PartialAnswer
from corral.workers.rollout.rewards import Problem


class Characters:
    """A tokenizer of code points."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


ANSWER = PartialAnswer(max_new_tokens=4, output_ids=[52, 50, 0])


def judge(reward: Any) -> RewardJudge:
    return RewardJudge(reward, Characters(), eos_token_id=0, config=RolloutConfig(reward_retries=2))


def test_an_answer_is_judged_without_its_end() -> None:
    assert asyncio.run(judge(lambda problem, text: float(text == problem["answer"]))({"answer": "42"}, ANSWER)) == 1.0


def test_a_reward_that_fails_on_every_try_is_a_failure_with_its_cause() -> None:
    tries: list[str] = []

    def fail(problem: Problem, text: str) -> float:
        tries.append(text)
        raise ValueError("no such problem")

    with pytest.raises(RewardFailedError, match=r"failed 3 times, last: ValueError: no such problem"):
        asyncio.run(judge(fail)({}, ANSWER))
    assert tries == ["42"] * 3


def test_a_worker_that_leaves_cancels_what_it_judges_and_fails_nothing() -> None:
    async def leave() -> None:
        judging = judge(lambda problem, text: 1.0)
        judging.close()
        await judging({}, ANSWER)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(leave())
