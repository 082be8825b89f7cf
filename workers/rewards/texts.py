"""Rewards that look at nothing but the text of an answer.

exact_match, multiple_choice    the row's `answer`      1.0 or 0.0
Format                          a regular expression    1.0 or 0.0
Length, Repetition              penalties               0.0 down to -1.0
"""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from corral.experiments.config.base import FrozenConfig
from corral.experiments.config.condition import Pattern
from corral.workers.rewards.contract import Problem


def exact_match(problem: Problem, answer: str) -> float:
    """1.0 if the answer equals the row's `answer` but for surrounding white space, else 0.0."""
    return float(answer.strip() == str(problem["answer"]).strip())


def no_reward(problem: Problem, answer: str) -> float:
    """0.0, whatever the answer: for training by a teacher alone, on rows that need no answer."""
    return 0.0


# A letter, and whether others of a list follow it: "A, B and C" chooses none, "B, and A is wrong" does.
_OPEN = r"[\s(*_$`\"'\\（【\[“]{0,20}(?:\\?(?:text|math|bm)\w*\{[\s(*]*)?"
_CLOSE = r"[)\]*_$`\"'}\\）】”]{0,10}"
_OTHER = rf"{_OPEN}[A-Z]{_CLOSE}(?!['\w]|\s(?:[a-z]+s|was|can)\b)"  # and not: A is wrong
_MORE = rf"{_CLOSE}\s{{0,3}}(?:(?:,\s?)?(?:\b(?:and|or)\b|[&/、和或])|,){_OTHER}"
_LETTER = rf"{_OPEN}(?!I\s+[a-z])([A-Z])(?!\w|'\w)({_MORE})?"
_VERB = (
    r"(?:[\s*_]{0,4}(?:[:：=]|[是为選选]|-(?=\s)|\b(?:is|was|be|to|would|should|must|has|will|the|this|question|letter|option"
    r"|choice|therefore|thus|hence|probably|clearly|indeed|only|correct)\b)){1,8}"
)
_STATEMENTS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\\boxed\{{{_LETTER}",
        rf"<answer>{_LETTER}",
        rf"(?i:(?:\b(?:answer|choice|option)|答案){_VERB}){_LETTER}",
        rf"(?i:\banswer|答案|[选選]){_LETTER}",
        rf"(?i:\b(?:choose|chose|select|pick|go(?:ing)? with)(?:\s+(?:option|choice|answer|letter))?){_LETTER}",
        rf"(?i:\b(?:it|this|that)(?:{_VERB}|'s)){_LETTER}(?!\s+[a-z])",
        rf"(?i:\b(?:therefore|thus|hence|so)\b,?){_LETTER}(?={_CLOSE}[.!]?[ \t]{{0,3}}(?:\n|$))",
        rf"(?<![\w']){_LETTER}{_CLOSE}\s?(?:is|must be|would be)\s+(?:the\s+)?(?:correct|right|best|answer)\b",
    )
)
_ALONE = re.compile(r"[\s*_$`(（【\[“\\]{0,8}([A-Z])()(?:[).:）】].*|[\s*_$`)\]”\\]{0,8})")
_MENTIONED = re.compile(rf"(?i:\b(?:option|choice)){_LETTER}(?!{_CLOSE}\s+(?:is|was)\s+(?:not|wrong|in|false))")


def multiple_choice(problem: Problem, answer: str) -> float:
    """1.0 if the letter that the answer chooses is the row's `answer`, else 0.0.

    The last statement of a choice counts: "the answer is (B)", "Answer: B", "I choose B", "B is correct", "so B.",
    "\\boxed{B}" or "<answer>B"; without any, a last line that is the letter alone or begins with "B)" or "B."; without
    such a line, the last "option B". Several letters, "A and B", choose none. A letter is a capital.

    Raises:
        ValueError: if the row's answer is no letter.
    """
    wanted = _ALONE.fullmatch(str(problem["answer"]))
    if wanted is None:
        raise ValueError(f"the answer of a row of multiple choice is a capital letter, got {problem['answer']!r:.40}")
    return float(_chosen(answer) == wanted[1])


def _chosen(answer: str) -> str:
    statements = [found for pattern in _STATEMENTS for found in pattern.finditer(answer)]
    alone = _ALONE.fullmatch(answer.strip().rpartition("\n")[2])
    mentions = list(_MENTIONED.finditer(answer))
    last = max(statements, key=lambda found: found.start(1), default=alone or (mentions[-1] if mentions else None))
    return "" if last is None or last[2] else str(last[1])


_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"


class Format(FrozenConfig):
    """1.0 if the whole answer has a form, else 0.0. Without a setting the form is that of DeepSeek-R1 (2025,
    https://arxiv.org/abs/2501.12948, table 1): <think>...</think> <answer>...</answer>, each tag once. The
    first tag may be missing: the prompts of many models end with it."""

    pattern: Pattern = rf"\s*(?:<think>)?{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"
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
    """Minus the fraction of an answer's n-grams of words that repeat earlier ones: 0.0 to above -1.0. Yeo et al. 2025,
    https://arxiv.org/abs/2502.03373, section on the cosine reward."""

    size: int = Field(default=3, ge=1)
    """Words of an n-gram, compared in lower case."""

    def __call__(self, problem: Problem, answer: str) -> float:
        words = answer.lower().split()
        grams = [tuple(words[start : start + self.size]) for start in range(len(words) - self.size + 1)]
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0
