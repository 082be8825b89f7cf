"""Judging: what user code fails at is a failure, a reward that hangs, dies or blocks costs nobody else, and a
worker that leaves has failed at nothing.
"""

import asyncio
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from math_verify import parse, verify

from corral.agents import Episode
from corral.experiments.config.rollout import RewardConfig, reward_parts
from corral.workers.lifecycle.worker import UserCodeError
from corral.workers.rollout.judging import RewardFailedError, RewardJudge
from tests.workers.data.tiny_tokenizer import Characters
from tests.workers.rollout import some_rewards

HERE = some_rewards.__name__


ANSWER = [52, 50, 0]


@pytest.fixture(scope="module")
def judges() -> Iterator[Any]:
    opened: dict[str, RewardJudge] = {}

    def judge(
        reward: Any = "does",
        *,
        timeout_s: float = 60.0,
        retries: int = 0,
        processes: int | None = None,
        is_new: bool = False,
    ) -> RewardJudge:
        """A judge of these settings, with processes that an earlier test may have used.

        Args:
            reward: a name of a function here, a whole import path, or parts.
            is_new: it is closed, or its processes are counted or killed.
        """
        named = f"{HERE}:{reward}" if isinstance(reward, str) and ":" not in reward else reward
        parts = RewardConfig(reward=reward_parts(named)).reward
        if processes is not None:
            parts = {name: part.model_copy(update={"concurrency": processes}) for name, part in parts.items()}
        spec = RewardConfig(reward=parts, reward_timeout_s=timeout_s, reward_retries=retries)
        key = f"{len(opened) if is_new else 0} {spec}"
        if key not in opened:
            opened[key] = RewardJudge(spec, Characters(), stop_token_ids={0, 1}, hidden=())
        return opened[key]

    yield judge
    for each in opened.values():
        each.close()


async def reward_of(judge: RewardJudge, problem: Mapping[str, Any], ids: list[int]) -> float:
    return (await judge.judge(problem, [ids]))[0].reward


def judged(judge: RewardJudge, *problems: Mapping[str, Any]) -> list[Any]:
    async def judge_all() -> list[Any]:
        async with asyncio.timeout(240):
            return await asyncio.gather(*(reward_of(judge, each, ANSWER) for each in problems), return_exceptions=True)

    return asyncio.run(judge_all())


@pytest.mark.parametrize("ids", [[52, 50, 0], [52, 50, 1], [52, 50]])
def test_an_answer_is_judged_without_its_end_in_one_event_loop_after_the_other(ids: list[int], judges: Any) -> None:
    judge = judges()
    assert [asyncio.run(reward_of(judge, {"do": "nothing"}, ids)) for _ in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize("error", sorted(some_rewards.ERRORS))
def test_whatever_a_reward_raises_on_every_try_is_a_failure_with_its_cause(error: str, judges: Any) -> None:
    (failure,) = judged(judges(retries=2), {"do": "raise", "error": error})
    assert isinstance(failure, RewardFailedError)
    assert f"failed 3 times, last: {type(some_rewards.ERRORS[error]).__name__}" in str(failure)
    assert str(failure).endswith(f"(some_rewards.py:{some_rewards.does.__code__.co_firstlineno + 4})")


def test_a_reward_that_is_no_finite_float32_is_a_failure(judges: Any) -> None:
    failures = judged(judges(), *({"do": "", "value": value} for value in (math.nan, math.inf, -math.inf, 1e39)))
    assert all(", and a reward is a finite float32 number" in str(failure) for failure in failures)


def test_a_reward_that_prints_into_a_full_log_judges_as_ever() -> None:
    program = f"""
import asyncio
from corral.experiments.config.rollout import RewardConfig, reward_parts
from corral.workers.rollout.judging import RewardJudge
from tests.workers.data.tiny_tokenizer import Characters
for name in ("prints", "awaits_and_prints"):
    spec = RewardConfig(reward=reward_parts("{HERE}:" + name), reward_retries=0)
    judge = RewardJudge(spec, Characters(), stop_token_ids={{0, 1}}, hidden=())
    (one,) = asyncio.run(judge.judge({{"value": 3.0}}, [{ANSWER}]))
    judge.close()
    assert one.reward == 3.0
"""
    with open("/dev/full", "wb") as full:
        subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full, check=True, timeout=120)


def test_numbers_that_nothing_is_trained_on_cost_no_answer_though_they_are_not_finite(judges: Any) -> None:
    parts = {
        "right": {"function": f"{HERE}:says_more"},
        "unweighed": {"function": f"{HERE}:does", "weight": 0.0},
        "async": {"function": f"{HERE}:awaits", "weight": 0.0},
    }
    for value in (math.nan, math.inf, 1e39):
        problem = {"do": "", "value": value}
        (one,) = asyncio.run(judges(parts).judge(problem, [ANSWER]))
        assert one.reward == 1.0
        for name in ("right/more", "unweighed", "async"):
            np.testing.assert_equal(one.statistics[f"reward/part/{name}"], value)
        assert one.statistics["reward/part/right/huge"] == math.inf


def test_slow_rewards_run_at_the_same_time_and_beside_those_that_hang_and_die(judges: Any) -> None:
    judge = judges(timeout_s=5.0, processes=72)
    bad = [{"do": "hang"}] * 4 + [{"do": "die"}] * 4
    outcomes = judged(judge, *bad, *({"do": "sleep", "value": number} for number in range(64)))
    line = some_rewards.does.__code__.co_firstlineno + 6
    for hung in outcomes[:4]:
        assert str(hung).endswith(f"no result within 5 s, in some_rewards.py:{line}"), hung
    assert all(str(died).endswith("its process ended by itself, exit code 3") for died in outcomes[4:8]), outcomes[4:8]
    assert outcomes[8:] == [float(number) for number in range(64)]


def test_a_process_is_kept_for_the_next_call_and_may_handle_signals(judges: Any) -> None:
    judge = judges(processes=1, is_new=True)
    assert judged(judge, {"do": "count"}, {"do": "alarm"}, {"do": "count"}) == [0.0, 1.0, 1.0]


def test_math_verify_judges_answers_of_many_forms_as_it_does_by_itself(judges: Any) -> None:
    forms = (r"$\frac{{{0}}}{{8}}$", "so it is {1}", r"\boxed{{\frac{{{2}}}{{16}}}}", "the answer is {0}/7")
    pairs = [
        ({"answer": forms[0].format(number)}, form.format(number, number / 8, 2 * number))
        for number in range(60)
        for form in forms
    ]
    judge = judges("corral.workers.rewards:math", processes=4)

    async def judge_all() -> list[float]:
        return await asyncio.gather(*(reward_of(judge, problem, list(map(ord, text))) for problem, text in pairs))

    rewards = asyncio.run(judge_all())
    assert rewards == [float(verify(parse(problem["answer"]), parse(text))) for problem, text in pairs]
    assert 60 <= sum(rewards) < 240


def test_a_call_that_nobody_waits_for_any_more_blocks_nobody_else(judges: Any) -> None:
    """An agent may give a judgement less time than the deadline of a reward."""
    judge = judges(processes=1)

    async def give_up_and_judge() -> float:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reward_of(judge, {"do": "hang"}, ANSWER), 0.05)
        async with asyncio.timeout(60):
            return await reward_of(judge, {"do": "nothing"}, ANSWER)

    assert asyncio.run(give_up_and_judge()) == 1.0


def test_async_rewards_are_awaited_at_the_same_time_and_one_that_blocks_fails_alone(judges: Any) -> None:
    judge = judges("awaits", timeout_s=4.0)
    assert judged(judge, *({"do": "", "value": number} for number in range(64))) == [float(n) for n in range(64)]
    hung, well = judged(judge, {"do": "hang"}, {"do": "", "value": 1})
    line = some_rewards.awaits.__code__.co_firstlineno
    assert str(hung).endswith(f"no result within 4 s, in some_rewards.py:{line + 3}") and well == 1.0
    blocks, well = judged(judge, {"do": "block"}, {"do": "", "value": 3})
    assert "blocked the event loop for 4 s (rollout.reward_timeout_s)" in str(blocks) and well == 3
    assert str(blocks).endswith(f"(some_rewards.py:{line + 2})")
    assert judged(judge, {"do": "", "value": 2}) == [2.0]


def test_a_reward_of_episodes_gets_all_that_was_said_noted_and_given(judges: Any) -> None:
    episodes = [Episode(["1", "2"], {"calls": 3.0}, "turns", 0.5), Episode(["4"])]
    rewards = asyncio.run(judges("weighs").judge_episodes({}, episodes))
    assert [one.reward for one in rewards] == [2 + 3.0 + 5 + 0.5, 1.0]
    (of_last,) = asyncio.run(judges("does").judge_episodes({"do": "nothing"}, [Episode(["41", "42"])]))
    assert of_last.reward == 1.0


def test_a_reward_of_groups_gets_all_answers_and_returns_as_many_numbers(judges: Any) -> None:
    answers = [[52] * (1 + number) for number in range(3)]
    rewards = asyncio.run(judges("compares").judge({"number": 3}, answers))
    assert [one.reward for one in rewards] == [0.0, 1.0, 2.0]
    with pytest.raises(RewardFailedError, match="one number for each answer, got 2 for 3"):
        asyncio.run(judges("compares").judge({"number": 2}, answers))


PARTS = {
    "right": {"function": f"{HERE}:Scales", "settings": {"factor": 3.0}, "weight": 2.0},
    "long": {"function": f"{HERE}:counts", "weight": -0.5},
    "beside": {"function": f"{HERE}:compares", "weight": 0.0},
}


def test_a_reward_is_the_weighted_sum_of_its_parts_and_tells_each(judges: Any) -> None:
    judge = judges(PARTS)
    assert judge.takes_groups
    first, second = asyncio.run(judge.judge({"do": "", "value": 5.0, "number": 9}, [[52, 50], [52, 120, 121]]))
    assert [first.reward, second.reward] == [2 * 3 * 5.0 - 0.5 * 2, 2 * 3 * 5.0 - 0.5 * 3]
    assert first.statistics.pop("reward/seconds") > 0.0
    assert first.statistics == {
        "reward/part/right": 15.0,
        "reward/part/long": 2.0,
        "reward/part/long/digits": 2.0,
        "reward/part/beside": 0.0,
    }
    assert second.statistics["reward/part/beside"] == 1.0


def test_a_part_that_fails_fails_the_reward_and_is_named(judges: Any) -> None:
    (failure,) = judged(judges(PARTS), {"do": "raise", "error": "value", "number": 9})
    assert isinstance(failure, RewardFailedError) and "reward function right failed 1 times" in str(failure)


def test_a_part_has_a_concurrency_of_its_own(judges: Any) -> None:
    most = {"function": f"{HERE}:most_at_a_time", "concurrency": 3}
    assert max(judged(judges({"most": most}), *[{"do": ""}] * 16)) == 3.0


def test_a_reward_that_ends_the_trial_is_not_tried_again(judges: Any) -> None:
    (failure,) = judged(judges("gives_up", retries=5), {"do": ""})
    assert isinstance(failure, UserCodeError)
    assert "reward gives_up: StopTrialError: nothing is left to spend" in str(failure)


def test_a_worker_that_leaves_cancels_what_it_judges_and_leaves_no_process(judges: Any) -> None:
    others = hosts_of_rewards()
    judge = judges(is_new=True)
    judge.start()
    [host] = hosts_of_rewards() - others

    async def leave() -> list[psutil.Process]:
        call = asyncio.create_task(reward_of(judge, {"do": "hang"}, ANSWER))
        while not (forked := host.children()):
            await asyncio.sleep(0.01)
        judge.close()
        with pytest.raises(asyncio.CancelledError):
            await call
        return forked

    assert not any(process.is_running() for process in [host, *asyncio.run(leave())])


def hosts_of_rewards() -> set[psutil.Process]:
    """The processes that rewards are forked from."""
    return {child for child in psutil.Process().children() if "user_code.host" in " ".join(child.cmdline())}


def test_a_reward_whose_process_is_stopped_is_late(judges: Any) -> None:
    with pytest.raises(RewardFailedError, match="last: no result within 0.5 s"):
        asyncio.run(reward_of(judges("stops", timeout_s=0.5), {}, [3]))


def test_a_reward_whose_process_was_killed_is_called_again_and_no_try_is_spent(judges: Any, tmp_path: Path) -> None:
    assert asyncio.run(reward_of(judges("killed_once"), {"flag": str(tmp_path / "flag")}, [3])) == 1.0


def test_a_reward_whose_process_is_killed_again_and_again_fails(judges: Any) -> None:
    with pytest.raises(RewardFailedError, match="its process ended by itself, killed by signal 9"):
        asyncio.run(reward_of(judges("always_killed"), {}, [3]))


def test_the_process_that_rewards_are_forked_from_is_started_again_when_it_was_killed(judges: Any) -> None:
    others = hosts_of_rewards()
    judge = judges(is_new=True)

    async def over_a_kill() -> list[float]:
        before = await reward_of(judge, {"do": "return", "value": 1.0}, [3])
        [host] = hosts_of_rewards() - others
        host.kill()
        return [before, await reward_of(judge, {"do": "return", "value": 1.0}, [3])]

    first, second = asyncio.run(over_a_kill())
    assert first == second


@pytest.mark.parametrize(
    ("words", "cause"),
    [("no result", "it reported no JSON"), ('{"result": []}', "another number of rewards"), ("7", "no JSON")],
)
def test_what_is_no_result_is_a_failure_of_the_reward(words: str, cause: str, judges: Any) -> None:
    with pytest.raises(RewardFailedError, match=cause):
        asyncio.run(reward_of(judges("scribbles", is_new=True), {"words": words}, [3]))


def test_a_call_that_is_cancelled_as_another_one_ends_its_process_stays_cancelled(judges: Any) -> None:
    judge = judges("ends_its_process")

    async def cancelled() -> bool:
        call = asyncio.create_task(reward_of(judge, {"do": "wait"}, [3]))
        with pytest.raises(RewardFailedError, match="its process ended by itself, exit code 3"):
            await reward_of(judge, {"do": "end"}, [3])
        call.cancel()
        await asyncio.wait([call])
        return call.cancelled()

    assert asyncio.run(cancelled())


def test_what_a_reward_says_is_cut_half_of_a_surrogate_pair_replaced_and_too_many_numbers_refused(judges: Any) -> None:
    def judge(how: str) -> Any:
        part = {"much": {"function": f"{HERE}:says_too_much", "words": 20}}
        return asyncio.run(judges(part).judge({"how": how}, [ANSWER]))[0]

    assert judge("name").statistics["reward/part/much/" + "n" * 200] == 1.0
    with pytest.raises(RewardFailedError, match=r"last: ValueError: y{2000} \(some_rewards.py:\d+\)$"):
        judge("raise")
    with pytest.raises(RewardFailedError, match="at most 1024 numbers beside it, got 1025"):
        judge("many")
    with pytest.raises(RewardFailedError, match=r"last: ValueError: bad \? \(some_rewards.py:"):
        judge("raise half a surrogate")
    half = judge("say half a surrogate")
    assert half.said == "much: bad ?" and half.statistics["reward/part/much/n?"] == 1.0
