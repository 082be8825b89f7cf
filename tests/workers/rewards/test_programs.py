"""Programs judged by the tests of their row: what passes, what fails and is 0, and what is no verdict at all."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.config.rollout import RewardConfig, reward_parts
from corral.workers.rewards import programs
from corral.workers.rewards.programs import all_unit_tests, program_of, unit_tests
from corral.workers.rollout.judging import RewardJudge
from corral.workers.sandbox.base import SandboxError, asks_for_sandbox
from corral.workers.user_code.children import HostError
from tests.workers.data.tiny_tokenizer import Characters

SUMS = [{"input": "2 3\n", "output": "5\n"}, {"input": "1 1", "output": "2"}, {"input": "-1 1\n", "output": "0 \n\n"}]
ASSERTIONS = ["assert add(2, 3) == 5", "assert add(1, 1) == 2", "import math\nassert add(math.inf, 1) == math.inf"]
ADDS = "a, b = map(int, input().split())\nprint(a + b)"
CHEATS = {
    "leaves early": "import sys; sys.exit(0)",
    "leaves without a word": "import os; os._exit(0)",
    "reads its input for the word": "import sys; print(sys.stdin.read())",
    "repeats what it was started with": "print(open('/proc/self/cmdline').read())",
    "stops what comes after": "import sys; sys.stdout.close()",
    "raises what nobody catches": "raise SystemExit",
    "is no program": "I would add the two numbers.",
    "is nothing": "",
    "ends its process": "import os; os.kill(os.getpid(), 9)",
    "takes all memory": "x = 'x' * (10 << 30)",
    "fails": "raise ValueError",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_that_does_not_do_it_has_0_by_either_kind_of_tests(cheat: str) -> None:
    tests = [SUMS[0], "assert add(2, 3) == 5"]
    assert unit_tests({"tests": tests}, CHEATS[cheat]) == 0.0
    assert all_unit_tests({"tests": tests}, CHEATS[cheat]) == 0.0


def test_the_share_of_tests_that_pass_or_all_of_them() -> None:
    assert unit_tests({"tests": SUMS}, f"So:\n```python\n{ADDS}\n```\nDone.") == 1.0
    assert all_unit_tests({"tests": SUMS}, ADDS) == 1.0
    assert unit_tests({"tests": SUMS}, "print(2)") == pytest.approx(1 / 3)
    assert all_unit_tests({"tests": SUMS}, "print(2)") == 0.0
    adds = "def add(a, b):\n    return a + b\n\nif __name__ == '__main__':\n    raise SystemExit(1)\n"
    assert unit_tests({"tests": ASSERTIONS}, adds) == 1.0
    assert unit_tests({"tests": ASSERTIONS}, "def add(a, b): return 2") == pytest.approx(1 / 3)


def test_a_program_that_runs_out_of_time_is_not_run_on_later_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_CPU_S", 1)
    tests = ["assert f(0) == 0", "assert f(1) == 1", "assert f(0) == 0"]
    slow = "def f(x):\n    while x: pass\n    return x\n"
    assert unit_tests({"tests": tests}, slow) == pytest.approx(1 / 3)


@pytest.mark.parametrize("tests", [None, [], "assert True", [1], [{"input": "1"}], [{"input": 1, "output": "1"}]])
def test_a_row_without_tests_is_a_failure_of_the_reward_that_names_what_it_has(tests: Any) -> None:
    for reward in (unit_tests, all_unit_tests):
        with pytest.raises(ValueError, match="test"):
            reward({"tests": tests}, ADDS)


LINES = st.text(st.characters(exclude_characters="`", exclude_categories=["Cs", "Cc"]), max_size=20)


@given(before=st.lists(LINES, max_size=3), program=st.lists(LINES, min_size=1, max_size=4), language=LINES)
def test_the_last_block_is_the_program(before: list[str], program: list[str], language: str) -> None:
    text = "\n".join(program) + "\n"
    other = "```\nprint('not this')\n```"
    answer = "\n".join([*before, other, f"``` {language}\n{text}```", *before])
    assert program_of(answer) == text


@given(st.text(st.characters(exclude_characters="`")))
def test_an_answer_without_a_block_is_all_program(answer: str) -> None:
    assert program_of(answer) == answer


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., list[float]]:
    """Judges as a rollout worker does: in a process of the reward's own, found by the import path, from which
    nothing is hidden, since it makes sandboxes."""

    def judge(*answers: str) -> list[float]:
        reward = reward_parts("corral.workers.rewards:unit_tests")
        spec = RewardConfig(reward=reward, reward_timeout_s=60.0, reward_retries=0)
        (tmp_path / "secrets").mkdir()
        judge = RewardJudge(spec, Characters(), stop_token_ids=set(), hidden=[tmp_path / "secrets"])
        try:
            judged = asyncio.run(judge.judge({"tests": SUMS}, [list(map(ord, answer)) for answer in answers]))
        finally:
            judge.close()
        return [one.reward for one in judged]

    return judge


def test_a_rollout_worker_judges_so_in_a_process_without_keys(judge: Callable[..., list[float]]) -> None:
    assert judge(ADDS, "nothing") == [1.0, 0.0]


def test_without_sandboxes_a_worker_says_so_before_it_judges_and_a_reward_fails_and_is_no_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Callable[..., list[float]]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match=f"unit_tests runs in a sandbox, and {os.uname().nodename} can make none"):
        judge(ADDS)
    with pytest.raises(SandboxError, match="no bwrap in the PATH"):
        unit_tests({"tests": SUMS}, ADDS)


def test_the_reward_in_the_documents_works_as_it_stands_there() -> None:
    text = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    names: dict[str, Any] = {}
    exec(text.partition("```python\n# printed.py\n")[2].partition("```")[0], names)
    assert asks_for_sandbox(names["prints_the_answer"])
    assert names["prints_the_answer"]({"answer": "42"}, "print(6 * 7)") == 1.0
    assert names["prints_the_answer"]({"answer": "42"}, "print(6 * 8)") == 0.0
