"""Rewards that look at nothing but the text of an answer.

exact_match, multiple_choice    the row's `answer`      1.0 or 0.0
Format                          a regular expression    1.0 or 0.0
Length, Repetition              penalties               0.0 down to -1.0
"""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from corral.experiments.config.base import FrozenConfig
from corral.experiments.config.patterns import Pattern
from corral.workers.rewards.contract import Problem


def exact_match(problem: Problem, answer: str) -> float:
    """1.0 if the answer equals the row's `answer` but for surrounding white space, else 0.0."""
    return float(answer.strip() == str(problem["answer"]).strip())


def no_reward(problem: Problem, answer: str) -> float:
    """0.0, whatever the answer: for training by a teacher alone, on rows that need no answer."""
    return 0.0


_LETTER = r"[\s(*$`\"\\]{0,20}([A-Z])(?![\w'])"
_CHOICES = re.compile(
    rf"\\boxed\{{\s*(?:\\(?:text|math)\w*\{{)?{_LETTER}"
    rf"|(?i:\b(?:answer|choice|option)(?:\s+is)?\s*:?){_LETTER}"
    rf"|<answer>{_LETTER}"
)
_ALONE = re.compile(r"^\s*\*{0,2}\(?([A-Z])(?:[).:].*)?\*{0,2}\s*$")


def multiple_choice(problem: Problem, answer: str) -> float:
    """1.0 if the letter that the answer chooses is the row's `answer`, else 0.0.

    The last of "the answer is (B)", "Answer: B", "option B", "\\boxed{B}" and "<answer>B" counts; without any of
    them, a last line that is the letter alone or begins with "B)" or "B.". A letter is a capital.

    Raises:
        ValueError: if the row's answer is no letter.
    """
    wanted = _ALONE.match(str(problem["answer"]))
    if wanted is None:
        raise ValueError(f"the answer of a row of multiple choice is a capital letter, got {problem['answer']!r:.40}")
    return float(_chosen(answer) == wanted[1])


def _chosen(answer: str) -> str:
    if named := list(_CHOICES.finditer(answer)):
        return str(next(filter(None, named[-1].groups())))
    alone = _ALONE.match(answer.strip().rpartition("\n")[2])
    return alone[1] if alone else ""


_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"


class Format(FrozenConfig):
    """1.0 if the whole answer has a form, else 0.0. Without a setting the form is that of DeepSeek-R1 (2025,
    https://arxiv.org/abs/2501.12948, table 1): <think>...</think> <answer>...</answer>, each tag once."""

    pattern: Pattern = rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"
    """What all of the answer has to match; `.` matches line breaks, too."""

    def __call__(self, problem: Problem, answer: str) -> float:
        return float(re.fullmatch(self.pattern, answer, re.DOTALL) is not None)


class Length(FrozenConfig):
    """0.0 where an answer is as long as it shall be, and falling evenly to -1.0 outside: the soft limit of DAPO (Yu et
    al. 2025, https://arxiv.org/abs/2503.14476, eq. 13), on both sides. A target is `shortest` equal to `longest`."""

    shortest: int = Field(default=0, ge=0)
    longest: int | None = Field(default=None, ge=0)
    """None: no limit."""
    margin: int = Field(default=100, ge=1)
    """How much too short or too long costs all of it."""
    unit: Literal["words", "characters"] = "words"

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.longest is not None and self.longest < self.shortest:
            raise ValueError(f"longest {self.longest} is less than shortest {self.shortest}")
        return self

    def __call__(self, problem: Problem, answer: str) -> float:
        length = len(answer.split() if self.unit == "words" else answer)
        over = 0 if self.longest is None else length - self.longest
        return -min(1.0, max(0, self.shortest - length, over) / self.margin)


class Repetition(FrozenConfig):
    """Minus the share of an answer's n-grams of words that it has had before: 0.0 to above -1.0. After Yeo et al. 2025,
    https://arxiv.org/abs/2502.03373, section on the cosine reward."""

    size: int = Field(default=3, ge=1)
    """Words of an n-gram, compared in lower case."""

    def __call__(self, problem: Problem, answer: str) -> float:
        words = answer.lower().split()
        grams = [tuple(words[start : start + self.size]) for start in range(len(words) - self.size + 1)]
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0
