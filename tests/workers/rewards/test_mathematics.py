"""math-verify as a reward; that its verdicts are its own is in tests/workers/rollout/test_judging.py."""

import sys

import pytest

from corral.workers.rewards.mathematics import math

EQUAL = {
    "42": "so the answer is 42",
    r"\frac{1}{2}": r"\boxed{0.5}",
    "1/2": r"$\frac{2}{4}$",
    "$x^2 - 1$": r"\boxed{(x-1)(x+1)}",
    r"\boxed{7}": "7",
    "2n": r"\boxed{2n}",
    "3x+2": "$2+3x$",
    "(1,2)": r"\boxed{(1,2)}",
    "1,2,3": r"\boxed{3,2,1}",
    "10!": r"\boxed{3628800}",
    "1,234": "1234",
    "50%": r"\boxed{50\%}",
    r"\$18.90": r"\boxed{18.90}",
    "5 cm": r"\boxed{5}",
    "3/4 cup": r"$\frac{3}{4}$",
}


@pytest.mark.parametrize("wanted", EQUAL)
def test_what_is_equal_as_mathematics_is_right(wanted: str) -> None:
    assert math({"answer": wanted}, EQUAL[wanted]) == 1.0
    assert math({"answer": wanted}, "that is 41") == math({"answer": wanted}, "I do not know") == 0.0


def test_a_number_in_the_rows_answer_is_not_all_of_it() -> None:
    answers = {"2n": "2", "10!": "10", "2(x+1)": r"\boxed{2}", "1 + 2i": "2", "10:30": "10"}
    assert {wanted: math({"answer": wanted}, said) for wanted, said in answers.items()} == dict.fromkeys(answers, 0.0)


def test_a_row_without_mathematics_is_a_failure_and_no_zero() -> None:
    with pytest.raises(ValueError, match="reads no mathematics in the row's answer ''"):
        math({"answer": ""}, "42")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "corral.workers.rewards.mathematics")
    with pytest.raises(ModuleNotFoundError, match=r"rewards:math needs math-verify; pip install 'corral-rl\[math\]'"):
        __import__("corral.workers.rewards.mathematics")
