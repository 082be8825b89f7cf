"""Judging: what user code fails at is a failure, a slow or hung reward costs nobody else, and a worker that leaves has
failed at nothing.
"""

import asyncio
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.workers.rollout import judging
from corral.workers.rollout.judging import RewardFailedError, RewardJudge, ThreadsHangError
from corral.workers.rollout.partial_rollout import PartialAnswer
from corral.workers.rollout.rewards import Problem


class Characters:
    """A tokenizer of code points."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


ANSWER = PartialAnswer(max_new_tokens=4, output_ids=[52, 50, 0])


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """What hung calls wait for; set when the test is over, so that their threads end."""
    event = threading.Event()
    yield event
    event.set()


def judge(reward: Any, *, timeout_s: float = 15.0, retries: int = 2) -> RewardJudge:
    return RewardJudge(reward, Characters(), stop_token_ids={0, 1}, timeout_s=timeout_s, retries=retries)


@pytest.mark.parametrize("ids", [[52, 50, 0], [52, 50, 1], [52, 50]])
def test_an_answer_is_judged_without_its_end(ids: list[int]) -> None:
    judge_of = judge(lambda problem, text: float(text == problem["answer"]))
    assert asyncio.run(judge_of({"answer": "42"}, PartialAnswer(max_new_tokens=4, output_ids=ids))) == 1.0


def test_a_reward_that_fails_on_every_try_is_a_failure_with_its_cause() -> None:
    tries: list[str] = []

    def fail(problem: Problem, text: str) -> float:
        tries.append(text)
        raise ValueError("no such problem")

    with pytest.raises(RewardFailedError, match=r"failed 3 times, last: ValueError: no such problem \(test_judging.py"):
        asyncio.run(judge(fail)({}, ANSWER))
    assert tries == ["42"] * 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_a_reward_that_is_no_finite_float32_is_a_failure(value: float) -> None:
    with pytest.raises(RewardFailedError, match=r"failed 3 times, last: ValueError: a reward must be a finite float32"):
        asyncio.run(judge(lambda problem, text: value)({}, ANSWER))


@pytest.mark.parametrize("error", [SystemExit(1), StopIteration(), TimeoutError("of its own"), KeyboardInterrupt()])
def test_whatever_a_reward_raises_is_a_failure(error: BaseException) -> None:
    def fail(problem: Problem, text: str) -> float:
        raise error

    with pytest.raises(RewardFailedError, match=type(error).__name__):
        asyncio.run(judge(fail)({}, ANSWER))


def test_many_slow_rewards_at_once_are_none_dropped() -> None:
    """Each gets its whole deadline, which starts when its call does and not when it is asked for."""

    def slow(problem: Problem, text: str) -> float:
        time.sleep(0.05)
        return float(problem["number"])

    async def judge_all() -> list[float]:
        judge_of = judge(slow, timeout_s=0.2, retries=0)
        return await asyncio.gather(*(judge_of({"number": number}, ANSWER) for number in range(64)))

    assert asyncio.run(judge_all()) == [float(number) for number in range(64)]


def test_rewards_that_hang_are_failures_and_block_nobody_else(never: threading.Event) -> None:
    def reward(problem: Problem, text: str) -> float:
        if problem["hangs"]:
            never.wait()
        return 1.0

    async def judge_both() -> list[float | BaseException]:
        judge_of = judge(reward, timeout_s=0.2, retries=1)
        hung = [judge_of({"hangs": True}, ANSWER) for _ in range(4)]
        well = [judge_of({"hangs": False}, ANSWER) for _ in range(8)]
        async with asyncio.timeout(20):
            return await asyncio.gather(*hung, *well, return_exceptions=True)

    outcomes = asyncio.run(judge_both())
    assert [type(outcome) for outcome in outcomes[:4]] == [RewardFailedError] * 4
    assert outcomes[4:] == [1.0] * 8


def test_a_call_that_nobody_waits_for_any_more_blocks_nobody_else(never: threading.Event) -> None:
    """An agent may give a judgement less time than the deadline of a reward."""

    def reward(problem: Problem, text: str) -> float:
        if problem["hangs"]:
            never.wait()
        return 1.0

    async def give_up_and_judge() -> float:
        judge_of = judge(reward)
        for _ in range(8):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(judge_of({"hangs": True}, ANSWER), 0.01)
        async with asyncio.timeout(20):
            return await judge_of({"hangs": False}, ANSWER)

    assert asyncio.run(give_up_and_judge()) == 1.0


def test_too_many_hung_calls_are_an_error_until_some_return(
    never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "_MAX_LEFT_BEHIND", 2)

    def reward(problem: Problem, text: str) -> float:
        if problem["hangs"]:
            never.wait()
        return 1.0

    async def hang_and_judge() -> float:
        well = judge(reward, timeout_s=0.05, retries=0)
        for _ in range(2):
            with pytest.raises(RewardFailedError, match="no result within"):
                await well({"hangs": True}, ANSWER)
        with pytest.raises(ThreadsHangError, match="2 calls of user code have not returned"):
            await well({"hangs": False}, ANSWER)
        never.set()
        well._timeout_s = 120.0
        async with asyncio.timeout(120):
            while True:
                try:
                    return await well({"hangs": False}, ANSWER)
                except ThreadsHangError:
                    await asyncio.sleep(0.01)

    assert asyncio.run(hang_and_judge()) == 1.0


def test_a_judge_serves_one_event_loop_after_the_other() -> None:
    well = judge(lambda problem, text: 1.0)

    async def judge_many() -> list[float]:
        return await asyncio.gather(*(well({}, ANSWER) for _ in range(32)))

    assert [asyncio.run(judge_many()) for _ in range(2)] == [[1.0] * 32] * 2


def test_a_worker_that_leaves_cancels_what_it_judges_and_fails_nothing() -> None:
    async def leave() -> None:
        judge_of = judge(lambda problem, text: 1.0)
        judge_of.close()
        await judge_of({}, ANSWER)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(leave())


LINKED = """
import asyncio, my_rewards
from corral.workers.rollout.judging import RewardJudge
from tests.workers.rollout.test_judging import Characters
asyncio.run(RewardJudge(my_rewards.score, Characters(), stop_token_ids=(), timeout_s=60, retries=0).judge({}, [52]))
"""


def test_a_failure_names_the_users_line_where_corral_is_installed_behind_a_link(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    (tmp_path / "corral").symlink_to(root)
    (tmp_path / "my_rewards.py").write_text("def score(problem, answer):\n    return problem['none']\n")
    path = os.pathsep.join([str(tmp_path), str(root)])
    failed = subprocess.run(
        [sys.executable, "-c", LINKED],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert failed.stderr.endswith("failed 1 times, last: KeyError: 'none' (my_rewards.py:2)\n"), failed.stderr
