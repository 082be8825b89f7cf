"""The judge beside a real HTTP server on this machine: well, down, slow, busy, and one that answers rubbish."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from corral.experiments.config.rollout import RewardConfig, reward_parts
from corral.workers.lifecycle.worker import UserCodeError
from corral.workers.rewards import endpoint as endpoint_module
from corral.workers.rewards.contract import StopTrialError
from corral.workers.rewards.endpoint import EndpointDownError
from corral.workers.rewards.judge import BudgetSpentError, Judge
from corral.workers.rollout.judging import RewardFailedError, RewardJudge
from corral.workers.user_code.loading import configured
from tests.workers.data.tiny_tokenizer import Characters
from tests.workers.rewards.scripted_endpoint import Endpoint
from tests.workers.rollout.rollout_rig import RolloutRig

PROMPT = "Question: {problem[question]}\nAnswer: {answer}\nEnd with 'Score: N', N from 0 to 10."
ROW = {"question": "What is 6 times 7?"}
KEY = "sk-a-very-secret-key"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    opened = Endpoint()
    yield opened
    opened.close()


@pytest.fixture
def make_judge(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Judge]:
    monkeypatch.setattr(endpoint_module, "_LONGEST_PAUSE_S", 0.01)
    return lambda **settings: Judge(**{"url": endpoint.url, "model": "m", "prompt": PROMPT, **settings})


def asked(judge: Judge, *answers: str) -> list[Any]:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(judge(ROW, answer) for answer in answers), return_exceptions=True)

    return asyncio.run(ask())


def numbers(judge: Judge, *answers: str) -> list[float]:
    return [verdict[0] for verdict in asked(judge, *answers)]


def test_the_judge_is_asked_once_for_what_is_equal_and_its_number_is_the_reward(
    endpoint: Endpoint, make_judge: Callable[..., Judge]
) -> None:
    endpoint.answers = [(200, "A score: 3 would be harsh. **Score: -1.5**", {})]
    judge = make_judge(lowest=-2.0, sampling={"temperature": 0.0, "seed": 3})
    verdict = (-1.5, {"said": "A score: 3 would be harsh. **Score: -1.5**"})
    assert asked(judge, "42", "42") == [verdict, verdict] and asked(judge, "42") == [verdict]
    (request,) = endpoint.asked
    assert request["path"] == "/v1/chat/completions"
    assert (request["model"], request["temperature"], request["seed"]) == ("m", 0.0, 3)
    assert request["messages"] == [{"role": "user", "content": PROMPT.format(problem=ROW, answer="42")}]
    asked(judge, "43")
    assert len(endpoint.asked) == 2


def test_verdicts_beyond_the_limit_are_forgotten_the_least_recently_used_first(
    endpoint: Endpoint, make_judge: Callable[..., Judge]
) -> None:
    judge = make_judge(known_verdicts=2)
    for answer in ("a", "b", "a", "c", "a", "b"):
        asked(judge, answer)
    assert [request["messages"][0]["content"].split("Answer: ")[1][0] for request in endpoint.asked] == list("abcb")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_one_that_is_busy_is_asked_again(status: int, endpoint: Endpoint, make_judge: Callable[..., Judge]) -> None:
    busy = (status, "later", {"Retry-After": "7"})
    endpoint.answers = [busy, busy, (200, "Score: 9", {})]
    assert asked(make_judge(), "42") == [(9.0, {"said": "Score: 9"})] and len(endpoint.asked) == 3
    endpoint.answers, endpoint.asked = [busy], []
    (failure,) = asked(make_judge(tries=2), "42")
    assert isinstance(failure, EndpointDownError) and f"failed 2 times, last: _BusyError: status {status}" in str(
        failure
    )
    assert len(endpoint.asked) == 2


def test_one_that_is_down_or_slow_is_named(endpoint: Endpoint, make_judge: Callable[..., Judge]) -> None:
    endpoint.delay_s = 1.0
    (late,) = asked(make_judge(tries=1, request_timeout_s=0.1), "42")
    assert isinstance(late, EndpointDownError) and endpoint.url in str(late) and "Timeout" in str(late)
    endpoint.close()
    (down,) = asked(make_judge(tries=3), "42")
    assert isinstance(down, EndpointDownError) and f"{endpoint.url} failed 3 times" in str(down)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ((200, "I would rather not say.", {}), "the judge gave no verdict"),
        ((200, "Score: 11", {}), "verdict 11.0 is not between 0 and 10"),
        ((200, b"<html>", {}), "what is no chat completion"),
        ((200, {"choices": []}, {}), "what is no chat completion"),
        ((401, f"wrong key {KEY}", {}), r"refuses the request, status 401: wrong key \*\*\*"),
    ],
)
def test_rubbish_is_a_failure_at_once_and_is_not_remembered(
    answer: Any, cause: str, endpoint: Endpoint, make_judge: Callable[..., Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    endpoint.answers = [answer, (200, "Score: 5", {})]
    judge = make_judge(key="$JUDGE_KEY")
    (failure,) = asked(judge, "42")
    with pytest.raises(ValueError, match=cause):
        raise failure
    assert KEY not in str(failure)
    assert numbers(judge, "42") == [5.0]


def test_an_endpoint_that_does_not_say_what_it_used_is_one(
    endpoint: Endpoint, make_judge: Callable[..., Judge]
) -> None:
    endpoint.usage = None
    assert numbers(make_judge(), "42") == [7.0]


def test_a_budget_of_calls_or_tokens_ends_the_trial_or_drops(
    endpoint: Endpoint, make_judge: Callable[..., Judge]
) -> None:
    judge = make_judge(max_calls=2)
    assert numbers(judge, "a") == numbers(judge, "b") == [7.0]
    (over,) = asked(judge, "c")
    assert isinstance(over, StopTrialError) and "the judge's max_calls is 2, and so many were spent" in str(over)
    assert numbers(judge, "a") == [7.0], "what is known costs nothing"
    judge = make_judge(max_tokens=100, when_spent="drop")
    assert numbers(judge, "a", "b") == [7.0, 7.0]
    (over,) = asked(judge, "c")
    assert isinstance(over, BudgetSpentError) and "the judge's max_tokens is 100" in str(over)
    assert len(endpoint.asked) == 4


def test_the_key_comes_from_a_variable_or_a_file_that_nobody_else_reads(
    endpoint: Endpoint, make_judge: Callable[..., Judge], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    for judge in (make_judge(key=str(path)), make_judge(key="$JUDGE_KEY")):
        assert numbers(judge, "42") == [7.0]
    assert endpoint.keys == [f"Bearer {KEY}"] * 2
    path.chmod(0o640)
    (open_to_others,) = asked(make_judge(key=str(path)), "42")
    assert f"others can read the key of {endpoint.url}" in str(open_to_others)
    monkeypatch.delenv("JUDGE_KEY")
    (missing,) = asked(make_judge(key="$JUDGE_KEY"), "42")
    assert f"the environment variable JUDGE_KEY with the key of {endpoint.url} is not set" in str(missing)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"url": "judge:8000"}, "url"),
        ({"url": "https://me:secret@judge/v1"}, "url"),
        ({"verdict": r"\d+"}, "has no group"),
        ({"prompt": "How good is it?"}, "has no {answer}"),
        ({"prompt": "How good is {{answer}}?"}, "has no {answer}"),
        ({"prompt": "How good is {answer}? {"}, "is no format string"),
        ({"lowest": 5.0, "highest": 1.0}, "lowest 5 is above highest 1"),
        ({"key": "sk-123"}, "key"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    settings: dict[str, Any], rule: str, make_judge: Callable[..., Judge]
) -> None:
    with pytest.raises(ValidationError, match=rule):
        make_judge(**settings)


def test_in_a_reward_process_a_judge_that_is_down_fails_and_one_without_budget_ends_the_trial(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the processes of a rollout worker: the key gets there, calls run at a time, and failures say why."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    endpoint.delay_s = 0.2
    settings = {"url": endpoint.url, "model": "m", "prompt": PROMPT, "key": "$JUDGE_KEY", "max_calls": 10}
    part = {"function": "corral.workers.rewards:Judge", "settings": {**settings, "tries": 1}, "concurrency": 4}
    spec = RewardConfig(reward=reward_parts({"good": part}), reward_timeout_s=60.0, reward_retries=1)
    judge = RewardJudge(spec, Characters(), stop_token_ids=set(), hidden=())

    async def judged(*answers: str) -> list[Any]:
        return await judge.judge(ROW, [list(map(ord, answer)) for answer in answers])

    try:
        assert [one.reward for one in asyncio.run(judged(*"abcdefgh"))] == [7.0] * 8
        assert endpoint.most_at_a_time == 4 and set(endpoint.keys) == {f"Bearer {KEY}"}
        endpoint.close()
        with pytest.raises(RewardFailedError, match="good failed 2 times, last: EndpointDownError: "):
            asyncio.run(judged("i"))
        with pytest.raises(UserCodeError, match="reward good: StopTrialError: the judge's max_calls is 10"):
            asyncio.run(judged("j"))
    finally:
        judge.close()
    assert os.environ["JUDGE_KEY"] not in json.dumps(spec.model_dump(mode="json"))


def test_prompts_that_the_judge_does_not_answer_are_dropped_with_its_name_and_no_zero(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.answers = [(200, "Well done \u2013 \x1b[31mScore: 7", {}), (503, "loading", {})]
    settings = {"url": endpoint.url, "model": "m", "prompt": "{problem[prompt]}{answer}", "tries": 1}
    good = {"function": "corral.workers.rewards:Judge", "settings": settings, "weight": 0.5, "words": 16}
    rollout = {"reward": {"good": good}, "reward_retries": 1, "max_concurrent_rollouts": 1}
    with RolloutRig(tmp_path, ["1+2=", "2+2=", "1+1="], rollout=rollout) as rig:
        rig.run_until(lambda: len(rig.received) == 3, "three prompts")
    answered, *dropped = (rig.outcomes()[row] for row in "012")
    assert answered == "finished" and list(rig.tensors[0]["rewards"]) == [3.5, 3.5]
    assert rig.received[0].scalars["reward/part/good"] == 7.0
    (said, _) = rig.tensors[0]["remarks"].reshape(2, -1)
    assert said.tobytes().rstrip(b"\0").decode() == "good:  \x1b[31mScore: 7", "half a dash is none"
    cause = f"EndpointDownError: {endpoint.url} failed 1 times, last: _BusyError: status 503"
    assert dropped == [f"reward_error: the reward function good failed 2 times, last: {cause}"] * 2
    shown = Counter(body["messages"][0]["content"][:4] for body in endpoint.asked)
    assert shown["1+2="] == 1, "equal answers of a group are one call"
    # One that fails is one for those that wait for it by then.
    assert set(shown) == {"1+2=", "2+2=", "1+1="} and all(2 <= shown[row] <= 2 * 2 for row in ("2+2=", "1+1="))


VERDICTS = {
    "Score (0-10): 7": 7.0,
    "Rating (1-10): 8": 8.0,
    "The score is 6.": 6.0,
    "Scores: 7": 7.0,
    "Score: 7": 7.0,
    "score 7": 7.0,
    "Score: 7/10": 7.0,
    "Score: **7**": 7.0,
    "**Score:** 7": 7.0,
    "**Score**: 7": 7.0,
    "Score = 7": 7.0,
    "Final score: 7 out of 10": 7.0,
    "I'd give it a score of 7": 7.0,
    "I give a score of 7.": 7.0,
    "Rating: 8.5": 8.5,
    "Score (out of 10): 7": 7.0,
    "Score [0-10]: 7": 7.0,
    "Score [0, 10]: 7": 7.0,
    "Score on a scale of 0 to 10: 7": 7.0,
    "Score (on a scale from 0 to 10): 7": 7.0,
    "Score from 0 to 10: 7": 7.0,
    "Score out of 10: 7": 7.0,
    "Score (/10): 7": 7.0,
    "Score/10: 7": 7.0,
    "Score (max 10): 7": 7.0,
    "Verdict: 1": 1.0,
    "Score - 7": 7.0,
    "Score – 7": 7.0,
    "Score: 7. The scale is 0-10": 7.0,
    "Score: 7\nExplanation: a score of 10 means perfect": 7.0,
    "Score: 8, 2 less than the perfect score of 10": 8.0,
    "Score:\n7": 7.0,
    "Score: [7]": 7.0,
    "Score: [[7]]": 7.0,
    "Score: <7>": 7.0,
    "Score is: 7": 7.0,
    "The score for this answer is 7": 7.0,
    "The score of the answer is 7": 7.0,
    "The score should be 7": 7.0,
    "Grade: 7": 7.0,
    "SCORE: 7": 7.0,
    "Score: 3\nNo, Score: 9": 9.0,
    "Score (0-10) is 7": 7.0,
    "Score (0–10): 7": 7.0,
    "Score (0-10):\n7": 7.0,
    "Score 0-10: 7": 7.0,
    "Score: 10/10": 10.0,
    "Score (0-10) = 7": 7.0,
    "Score: 7 points": 7.0,
    "Score:7": 7.0,
    '"score": 7': 7.0,
    '{"score": 7}': 7.0,
    "Score (0.0 to 1.0): 0.7": 0.7,
    "Score (-1 to 1): 0.5": 0.5,
    "rating of 7": 7.0,
    "Score (1 to 10): 7": 7.0,
    "Score (between 0 and 10): 7": 7.0,
    "Score (range 0-10): 7": 7.0,
    "Score: 7 (scale 0-10)": 7.0,
    "Score: 7 (0-10)": 7.0,
}
NO_VERDICTS = (
    "Score: -3",
    "Score: 7,5",
    "Score: 7-8",
    "Score: N/A",
    "Score: seven",
    "Score: 70",
    "Score (0-10)",
    "Score: 3 + 4 = 7",
    "7",
    "Score: 7 to 8",
    "Score from 0 to 10",
)


def test_a_verdict_is_found_in_its_usual_spellings_and_its_scale_is_none() -> None:
    judge = Judge(url="http://127.0.0.1:1/v1", prompt="{answer}")
    assert {said: judge._verdict_of(said)[0] for said in VERDICTS} == VERDICTS


@pytest.mark.parametrize("said", NO_VERDICTS)
def test_what_is_no_single_number_in_range_is_a_failure_and_no_verdict(said: str) -> None:
    with pytest.raises(ValueError, match="no verdict|is not between"):
        Judge(url="http://127.0.0.1:1/v1", prompt="{answer}")._verdict_of(said)


def test_a_setting_of_a_wrong_form_is_told_by_what_it_means_and_not_by_its_pattern() -> None:
    with pytest.raises(ValueError) as refused:
        configured(Judge, {"url": "judge.example", "prompt": "{answer}"}, key="settings")
    told = str(refused.value)
    assert told.startswith("settings: url is not in the form that it must have (url: Of the API, to which ")
    assert "https://host/v1" in told and "pattern" not in told and "?:" not in told
