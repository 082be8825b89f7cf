"""Rewards of programs: what a model wrote runs in a sandbox on the tests of its row.

    answer ──its last block of code, else all of it──► program.py in a new sandbox
    each test ──► one run ──► passed, or not                          shares: unit_tests; all or nothing: all_unit_tests
                     └── no sandbox: BubblewrapError, a failure of the reward and no zero

A row has `tests`, a list of either

    {"input": "2 3\\n", "output": "5\\n"}     the program reads the one, and has to print the other
    "assert add(2, 3) == 5"                 Python that is run after the program, by the same interpreter

What a program prints is compared outside of the sandbox, where it can forge nothing. With an assertion it shares a
process: it learns of the test only when it has been run, and leaving early is no pass, but objects that equal
everything deceive an assertion as they always do. Prefer tests of input and output.

A program that runs into a limit of time is not run on the tests after it: they fail.
"""

import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any

from corral.workers.rewards.contract import Problem
from corral.workers.sandbox.base import Limits, needs_sandbox
from corral.workers.sandbox.bubblewrap import Bubblewrap

_FENCED = re.compile(r"^ {0,3}```[^\n`]*\n(.*?)^ {0,3}```[ \t]*$", re.MULTILINE | re.DOTALL)
_PROGRAM = "program.py"
_CPU_S = 4
_TIMEOUT_S = 10.0  # of one test: where other processes compete, its CPU time takes longer
# The program has been run, and what it has read is /dev/null, before the test and the word that it passed are there.
_THEN_TEST = f"""
import json, os, sys
_own = os.dup(0)
_null = os.open(os.devnull, os.O_RDONLY)
os.dup2(_null, 0)
_words = {{"__name__": "program"}}
with open("{_PROGRAM}", encoding="utf-8") as _file:
    exec(compile(_file.read(), "{_PROGRAM}", "exec"), _words)
with open(_own, encoding="utf-8") as _file:
    _asked = json.load(_file)
exec(compile(_asked["test"], "test", "exec"), _words)
sys.stdout.flush()
os.write(1, _asked["passed"].encode())
"""


@needs_sandbox
def unit_tests(problem: Problem, answer: str) -> float:
    """The fraction of the row's `tests` that the answer's program passes, 0.0 to 1.0.

    Raises:
        ValueError: if the row has no such tests.
        SandboxError: if no sandbox can be made.
    """
    tests = tests_of(problem)
    return asyncio.run(_count_passed(answer, tests)) / len(tests)


@needs_sandbox
def all_unit_tests(problem: Problem, answer: str) -> float:
    """1.0 if the answer's program passes all of the row's `tests`, else 0.0; raises as `unit_tests` does."""
    tests = tests_of(problem)
    return float(asyncio.run(_count_passed(answer, tests, stops_at_failure=True)) == len(tests))


def tests_of(problem: Problem) -> Sequence[Any]:
    """The tests of a row; ValueError if there are none, or one is of no known form."""
    tests = problem.get("tests")
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"a row of programs has a list of `tests` that is not empty, got {tests!r:.80}")
    for test in tests:
        if not (isinstance(test, str) or _is_case(test)):
            raise ValueError(f"a test is Python or a mapping of `input` and `output` to texts, got {test!r:.80}")
    return tests


def program_of(answer: str) -> str:
    """The last block of code that is fenced by three backticks, else the whole answer."""
    blocks = _FENCED.findall(answer)
    return blocks[-1] if blocks else answer


async def _count_passed(answer: str, tests: Sequence[Any], *, stops_at_failure: bool = False) -> int:
    passed = 0
    async with await Bubblewrap.create() as sandbox:
        # Half a surrogate pair, which a decoded token may be, is no UTF-8.
        await sandbox.upload(_PROGRAM, program_of(answer).encode(errors="replace"))
        for test in tests:
            has_passed, has_time = await _run(sandbox, test)
            passed += has_passed
            if not has_time or (stops_at_failure and not has_passed):
                break
    return passed


async def _run(sandbox: Bubblewrap, test: Any) -> tuple[bool, bool]:
    """Whether the program passes, and whether it did not run out of time."""
    limits, python = Limits(cpu_s=_CPU_S), [sys.executable, "-I"]
    if _is_case(test):
        stdin = test["input"].encode()
        result = await sandbox.exec([*python, _PROGRAM], stdin=stdin, timeout_s=_TIMEOUT_S, limits=limits)
        has_passed = result.is_success and _lines(result.stdout.decode(errors="replace")) == _lines(test["output"])
        return has_passed, not result.timed_out
    word = token_hex(16)
    stdin = json.dumps({"test": test, "passed": word}).encode()
    result = await sandbox.exec([*python, "-c", _THEN_TEST], stdin=stdin, timeout_s=_TIMEOUT_S, limits=limits)
    return result.is_success and result.stdout.endswith(word.encode()), not result.timed_out


def _lines(text: str) -> list[str]:
    """Without white space at the ends of lines, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _is_case(test: Any) -> bool:
    return isinstance(test, Mapping) and all(isinstance(test.get(name), str) for name in ("input", "output"))
