"""Rewards of texts, beside cases that were judged by hand."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from corral.workers import rewards
from corral.workers.rewards.texts import Format, Length, Repetition, exact_match, multiple_choice


def test_every_reward_that_ships_is_found_by_its_name() -> None:
    assert {name: callable(getattr(rewards, name)) for name in dir(rewards)} == dict.fromkeys(dir(rewards), True)
    with pytest.raises(AttributeError, match="has no 'maths'"):
        _ = rewards.maths


def test_an_exact_match_is_one_but_for_white_space_around() -> None:
    assert [exact_match({"answer": 42}, text) for text in (" 42\n", "42.0", "4 2")] == [1.0, 0.0, 0.0]


CHOOSE_B = (
    "B",
    "(B)",
    "b is wrong, so\nB.",
    "**B**",
    "B) because it is larger",
    "The answer is B.",
    "The answer is (B)",
    "the answer is: **B**",
    "Answer: B",
    "ANSWER: (B)",
    "Answer: **(B)**",
    r"the answer is \(B\)",
    "The answer is $B$.",
    "The answer is `B`",
    "I choose option B.",
    r"Thus \boxed{B}",
    r"\boxed{\text{B}}",
    r"\boxed{(B)}",
    r"\boxed{\mathrm{B}}",
    r"the answer is $\boxed{\textbf{(B)}}$",
    "<think>The answer is A? No.</think> <answer>B</answer>",
    "At first the answer is A, but no: the answer is B",
    "The answer is B. Option A is a trap.",
    "Option A is wrong because of x. So it must be (B).",
    "Therefore, **B**",
    "Therefore, $B$",
    "Therefore, $B$.",
    "The answer would be B",
    "答案：B",
    "答案是B",
    "答案为 B",
    "正确答案：（B）",
    "故选B",
    "The correct answer is option B.",
    "The correct option is B",
    "I choose option B.",
    "I choose B",
    "I would go with B",
    "Going with (B).",
    "B is correct",
    "(B) is the correct answer.",
    "Option B is correct",
    "Option B is the right choice",
    "Final answer: \\text{B}",
    "**Answer:** B",
    "**Answer**: B",
    "Answer - B",
    "Answer\n\nB",
    "The answer must be B.",
    "The answer should be B.",
    "The best choice is (B)",
    "So the answer: 'B'",
    "\\boxed{\\text{(B) } 42}",
    "\\boxed{B. 42}",
    "<answer>(B)</answer>",
    "The answer is B, and A is wrong.",
    "The answer is B, A is wrong.",
    "The answer is not A. The answer is B.",
    "I rule out option A.\nB",
    "[B]",
    "(B) 42",
    "$B$",
    "`B`",
    "“B”",
    "The answer is: B) 42",
    "It's B.",
    "This is B",
    "thus B.",
    "So the answer is: \n**B**",
    "The answer to this question is B",
    "A is wrong. C is wrong. Hence B",
    "answer B",
    "ANSWER IS B",
    "I think it is B",
    "The answer is \\(\\text{B}\\).",
    "the answer is **B.** 12",
    "Answer: B or so",
)
CHOOSE_ANOTHER = (
    "",
    "C",
    "The answer is C",
    "Because of B, the answer is C",
    "The answer is Bern",
    "A, B or C",
    "Vitamin B",
    "The answer is B. Wait: the answer is D.",
    "The answer is A, B and C",
    "The answer is B and C",
    "The answer is B or C",
    "The answer is A, B",
    "\\boxed{A, B}",
    "Answer: A/B",
    "<answer>A and B</answer>",
    "The answer is B, C.",
    "Answer: I think A",
    "The answer is (A) and (B).",
    "I do not know",
    "The answer is B and C are wrong.",
)


@pytest.mark.parametrize("row", ["B", "(B)", " B. "])
def test_a_choice_is_found_in_its_usual_spellings(row: str) -> None:
    assert {text: multiple_choice({"answer": row}, text) for text in CHOOSE_B} == dict.fromkeys(CHOOSE_B, 1.0)
    others = dict.fromkeys(CHOOSE_ANOTHER, 0.0)
    assert {text: multiple_choice({"answer": row}, text) for text in CHOOSE_ANOTHER} == others


def test_a_row_without_a_letter_is_a_failure_and_no_zero() -> None:
    with pytest.raises(ValueError, match="a capital letter, got '42'"):
        multiple_choice({"answer": "42"}, "B")


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>2 + 2\nis 4</think>\n<answer>4</answer>", 1.0),
        (" <think></think><answer></answer>\n", 1.0),
        ("<answer>4</answer>", 0.0),
        ("<think>a</think> so <answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer> Done.", 0.0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<answer>4</answer><think>a</think>", 0.0),
        ("2 + 2 is 4</think>\n<answer>4</answer>", 1.0),  # the prompt has begun the reasoning
        ("a</think>b</think><answer>4</answer>", 0.0),
    ],
)
def test_the_form_is_thought_and_answer_each_once(text: str, reward: float) -> None:
    assert Format()({}, text) == reward


def test_a_form_of_ones_own_has_to_match_all_of_the_answer() -> None:
    form = Format(pattern=r"#### \d+")
    assert [form({}, text) for text in ("#### 12", "so #### 12", "#### 12 apples")] == [1.0, 0.0, 0.0]
    with pytest.raises(ValidationError, match="must be a regular expression: missing"):
        Format(pattern="(")


def test_a_length_costs_nothing_inside_and_evenly_more_outside() -> None:
    soft = Length(shortest=2, longest=4, margin=2)
    assert [soft({}, "a " * count) for count in range(8)] == [-1.0, -0.5, 0.0, 0.0, 0.0, -0.5, -1.0, -1.0]
    assert Length(shortest=3, longest=3, margin=3, unit="characters")({}, "abcd") == pytest.approx(-1 / 3)
    assert Length()({}, "a " * 10_000) == 0.0
    with pytest.raises(ValidationError, match="longest 1 is less than shortest 2"):
        Length(shortest=2, longest=1)


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 4))
def test_repetition_is_minus_the_share_of_n_grams_that_were_there_before(words: list[str], size: int) -> None:
    grams = [tuple(words[start : start + size]) for start in range(max(0, len(words) - size + 1))]
    repeated = sum(gram in grams[:place] for place, gram in enumerate(grams))
    expected = -repeated / len(grams) if grams else 0.0
    assert Repetition(size=size)({}, "  ".join(words).upper()) == pytest.approx(expected)


@given(st.text(), st.integers(0, 50), st.integers(0, 50), st.integers(1, 50))
def test_penalties_lie_between_minus_one_and_zero(text: str, shortest: int, more: int, margin: int) -> None:
    length = Length(shortest=shortest, longest=shortest + more, margin=margin)
    assert -1.0 <= length({}, text) <= 0.0 and -1.0 < Repetition()({}, text) <= 0.0


@given(st.text(alphabet=st.sampled_from("AB()*:. \n\\{}boxedanswri<>"), max_size=60))
def test_no_text_chooses_two_letters_or_breaks_the_reward(text: str) -> None:
    chosen = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if multiple_choice({"answer": letter}, text)]
    assert len(chosen) <= 1
    assert all(re.search(letter, text) for letter in chosen)
