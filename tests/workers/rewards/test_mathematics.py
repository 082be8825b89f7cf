"""math-verify as a reward; that its verdicts are its own is in tests/workers/rollout/test_judging.py."""

import sys

import pytest

from corral.workers.rewards.mathematics import math


@pytest.fixture(scope="module", autouse=True)
def _is_loaded() -> None:
    """What math-verify loads with its first comparison is not within the time limit of a test's."""
    math({"answer": "$x^2 - 1$"}, r"\boxed{(x-1)(x+1)}")


# What a row's answer has, and answers that are right and wrong for it.
JUDGED: dict[str | float, tuple[list[str], list[str]]] = {
    # what is equal as mathematics
    "42": (["so the answer is 42"], ["that is 41", "I do not know"]),
    "$x^2 - 1$": ([r"\boxed{(x-1)(x+1)}"], [r"\boxed{x-1}"]),
    "3x+2": (["$2+3x$"], [r"\boxed{2}"]),
    "10!": ([r"\boxed{3628800}"], ["10"]),
    "2(x+1)": ([r"\boxed{2x+2}"], [r"\boxed{2}"]),
    "1 + 2i": ([r"\boxed{2i + 1}"], ["2"]),
    # several values
    "1,2,3": ([r"\boxed{3,2,1}"], ["3"]),
    "1331 and 1728": (
        [r"\boxed{1331, 1728}", r"\boxed{1728, 1331}", r"\boxed{1331} and \boxed{1728}"],
        [r"\boxed{1728}", "1331"],
    ),
    "-3 or 3": ([r"\boxed{-3, 3}", r"\boxed{\pm 3}", r"$x = 3$ or $x = -3$"], [r"\boxed{3}", r"\boxed{-3}"]),
    r"\{1,2\}": ([r"\boxed{\{2, 1\}}", r"\boxed{1, 2}", r"\boxed{1} or \boxed{2}"], [r"\boxed{2}", r"\boxed{1, 3}"]),
    "(1, 2)": ([r"\boxed{(1,2)}", "$(1, 2)$"], [r"\boxed{(2,1)}", r"\boxed{[1,2]}"]),
    "[1, 2)": ([r"\boxed{[1,2)}"], [r"\boxed{(1,2)}", r"\boxed{1}"]),
    # numbers of JSON and exponents
    1e-05: (
        [r"\boxed{0.00001}", r"\boxed{10^{-5}}", "The answer is 1e-5", r"\boxed{1 \times 10^{-5}}"],
        [r"\boxed{2e-5}", r"\boxed{0}", r"\boxed{5}", r"\boxed{0.0001}"],
    ),
    1e-07: (
        [r"\boxed{0.0000001}", r"\boxed{10^{-7}}", "1.0e-7"],
        [r"\boxed{0.0000002}", r"\boxed{0}", r"\boxed{2 \cdot 10^{-7}}"],
    ),
    1e16: ([r"\boxed{10000000000000000}", r"\boxed{10^{16}}", "1e16"], [r"\boxed{10^{15}}", r"\boxed{16}"]),
    1e22: ([r"\boxed{10^{22}}"], [r"\boxed{10^{21}}"]),
    -2.5: (["-2.5", r"\boxed{-\frac{5}{2}}"], ["2.5"]),
    0.5: ([r"\boxed{1/2}", r"\boxed{50\%}"], [r"\boxed{5}"]),
    3: (["3", "3.0", r"\boxed{\frac{6}{2}}"], ["4", "0.3", "33"]),
    "1e-5": ([r"\boxed{0.00001}", r"\boxed{10^{-5}}"], [r"\boxed{e-5}"]),
    "1.5e3": ([r"\boxed{1500}", "1,500"], ["1.5", "3"]),
    r"2 \times 10^{3+1}": ([r"\boxed{20000}", r"\boxed{2 \cdot 10^4}"], [r"\boxed{2000}"]),
    "6.02E23": ([r"\boxed{6.02 \times 10^{23}}"], [r"\boxed{6.02}", r"\boxed{6.02 \times 10^{22}}"]),
    # thousands
    "1 000": ([r"\boxed{1000}", "1000", "1,000"], ["1", "0"]),
    r"1\,000": ([r"\boxed{1000}"], [r"\boxed{1}"]),
    r"12\,345": ([r"\boxed{12345}", r"\boxed{12,345}"], [r"\boxed{357}", r"\boxed{345}"]),
    "12345": (
        [r"\boxed{12\,345}", r"\boxed{12 345}", r"\boxed{12{,}345}", r"\boxed{12,\!345}", "The answer is 12\\,345."],
        [r"\boxed{12\,346}", r"\boxed{12}"],
    ),
    "1,234,567": (
        [
            r"\boxed{1\,234\,567}",
            r"\boxed{1~234~567}",
            r"\boxed{1\ 234\ 567}",
            "1\u202f234\u202f567",
            "It is 1{,}234{,}567.",
        ],
        ["567"],
    ),
    # the last box
    "7": (
        [
            r"\boxed{3}, wait, no: \boxed{7}",
            r"\boxed{3} \boxed{7}",
            r"\fbox{7}",
            r"\boxed 7",
            r"\boxed7",
            r"\boxed{\boxed{7}}",
        ],
        [
            r"\boxed{7}, wait, no: \boxed{3}",
            r"\boxed{7} no, so \boxed{5",
            r"\boxed{7} so \boxed{",
            r"\boxed{7} and \boxed{}",
        ],
    ),
    "5": (
        [r"so $x = \boxed{5}$.", r"\boxed{7}\boxed{5}"],
        [r"\boxed{5} so \boxed{\frac{1}{", r"\boxed{7} no, so \boxed{5"],
    ),
    # signs
    "-5": (["The answer is \u22125.", "\\boxed{\u22125}", "-5", "x = \u22125"], ["5", "The answer is +5."]),
    "\u22128": (["-8", r"\boxed{-8}"], ["8"]),
    "+6": (["6", "The answer is +6.", r"\boxed{+6}"], ["-6"]),
    # fractions, mixed numbers, periods
    "3 1/2": (
        [r"\boxed{3.5}", r"\boxed{\frac{7}{2}}", r"\boxed{3\frac{1}{2}}", "3 1/2"],
        [r"\boxed{1/2}", r"\boxed{2}", r"\boxed{31/2}"],
    ),
    "-1 1/4": ([r"\boxed{-1.25}"], [r"\boxed{-0.75}", r"\boxed{1.25}"]),
    "3\u00bd": ([r"\boxed{3.5}", r"\boxed{7/2}"], [r"\boxed{31/2}"]),
    "\u00be": ([r"\boxed{0.75}", r"\boxed{\frac{3}{4}}"], [r"\boxed{3}"]),
    r"0.\overline{3}": ([r"\boxed{\frac{1}{3}}", r"\boxed{1/3}"], [r"\boxed{0}", r"\boxed{0.3}"]),
    r"0.1\overline{6}": ([r"\boxed{\frac{1}{6}}"], [r"\boxed{0.1}"]),
    r"\frac{1}{2}": ([r"\boxed{.5}", r"\boxed{\dfrac{2}{4}}", r"\boxed{\frac12}", "0.5"], [r"\boxed{2}"]),
    # functions, roots, powers, constants without a backslash
    "pi": ([r"\boxed{\pi}", "\\boxed{\u03c0}"], [r"\boxed{i}", r"\boxed{3}"]),
    r"2\pi": ([r"\boxed{2pi}", "\\boxed{2\u03c0}", r"\boxed{\pi \cdot 2}"], [r"\boxed{2}"]),
    "sin(x)": ([r"\boxed{\sin x}", r"\boxed{\sin(x)}"], [r"\boxed{\cos x}"]),
    "ln(2)": ([r"\boxed{\ln 2}"], [r"\boxed{2}"]),
    "sqrt(2)": ([r"\boxed{\sqrt{2}}", r"\boxed{sqrt(2)}", "\\boxed{\u221a2}", r"\boxed{2^{1/2}}"], [r"\boxed{2}"]),
    "\u221a12": ([r"\boxed{2\sqrt{3}}"], [r"\boxed{12}"]),
    "x**2": ([r"\boxed{x^2}"], [r"\boxed{2x}"]),
    "x\u00b2 + 1": ([r"\boxed{1 + x^{2}}"], [r"\boxed{x2 + 1}"]),
    "\u221e": ([r"\boxed{\infty}"], [r"\boxed{-\infty}"]),
    "2n": ([r"\boxed{2n}", r"\boxed{n \cdot 2}"], [r"\boxed{2}", "2"]),
    "x = 4": ([r"\boxed{4}", r"\boxed{x = 4}"], [r"\boxed{x = 3}"]),
    # units, money, degrees, words
    "18": (
        [
            r"\boxed{18 dollars}",
            r"\boxed{\$18}",
            "\\boxed{\u20ac18}",
            r"\boxed{18.}",
            r"\boxed{18\text{ apples}}",
            "\uff11\uff18",
            r"\boxed{18 \text{ cm}}",
            r"\boxed{18 square units}",
        ],
        [r"\boxed{18x}", r"\boxed{1.8}"],
    ),
    "$5": ([r"\boxed{5}", "$5"], ["4"]),
    "$5 and $6": ([r"\boxed{5, 6}"], [r"\boxed{6}"]),
    "$1,250.50": (["1250.5", r"\boxed{\$1{,}250.50}"], ["1250"]),
    "\u20ac18": (["18"], ["8"]),
    "45\u00b0": ([r"\boxed{45}", r"\boxed{45^\circ}", "\\boxed{45\u00b0}"], [r"\boxed{54}"]),
    "50%": ([r"\boxed{50 percent}", r"\boxed{0.5}", r"\boxed{50\%}"], [r"\boxed{5}"]),
    "5 apples": (["5", r"\boxed{5}", r"\boxed{5 apples}"], ["6"]),
    "2 1/2 cups": ([r"\boxed{2.5}"], [r"\boxed{0.5}", r"\boxed{2}"]),
    "so 3 + 4 = 7 apples": (["7"], ["3", "4"]),
    "She has 3 and 4, #### 12 apples": (["12"], ["3", "4"]),
    # tags and marks around an answer
    "72": (
        [
            "<think>1</think><answer>72</answer>",
            "<answer> 72 </answer>",
            "#### 72",
            "#### **72**",
            "**72**",
            "Answer: 72",
            r"\[72\]",
            r"\(72\)",
            "It is 72.",
        ],
        ["<answer>71</answer>", "", "####", "#### ,", "\ud800"],
    ),
}


@pytest.mark.parametrize("wanted", JUDGED)
def test_answers_are_right_and_wrong_for_a_row_whatever_their_spelling(wanted: str | float) -> None:
    right, wrong = JUDGED[wanted]
    judged = {said: math({"answer": wanted}, said) for said in (*right, *wrong)}
    assert judged == {**dict.fromkeys(right, 1.0), **dict.fromkeys(wrong, 0.0)}


NO_MATHEMATICS = [
    "",
    "True",
    "Three",
    "yes",
    "no",
    "No",
    "no solution",
    "?",
    "...",
    "None",
    True,
    None,
    [5],
    float("nan"),
]
SEVERAL_NUMBERS = ["12 apples and 5 pears", "3 hours 20 minutes", "between 3 and 5", "2 out of 5", "Room 3, then 4"]


@pytest.mark.parametrize("wanted", NO_MATHEMATICS)
def test_a_row_without_mathematics_is_a_failure_and_no_zero(wanted: object) -> None:
    with pytest.raises(ValueError, match="reads no mathematics in the row's answer|compares with a number or a text"):
        math({"answer": wanted}, "5")


@pytest.mark.parametrize("wanted", SEVERAL_NUMBERS)
def test_words_with_several_numbers_do_not_say_which_one_counts(wanted: str) -> None:
    with pytest.raises(ValueError, match="has words and several numbers; write what is compared alone"):
        math({"answer": wanted}, "5")


@pytest.mark.parametrize(
    "said", ["1" * 6000, "1 1/" + "2" * 6000, "0." + "1" * 6000, "9e999", "{" * 3000, r"\boxed{" * 50]
)
def test_no_answer_makes_the_reward_fail(said: str) -> None:
    assert math({"answer": "5"}, said) == 0.0


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "corral.workers.rewards.mathematics")
    with pytest.raises(ModuleNotFoundError, match=r"rewards:math needs math-verify; pip install 'corral-rl\[math\]'"):
        __import__("corral.workers.rewards.mathematics")
