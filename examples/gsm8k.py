"""Problems in GSM8K's form: a question, and a worked answer whose last line is `#### 72`."""

import re
from collections.abc import Mapping
from typing import Any

_ASKED = "Think step by step, and end with the answer behind four hash signs, as in #### 72."
_NUMBER = re.compile(r"####(?:[\s*$({\\]|boxed){0,12}([-\u2212]?)[\s$\\]{0,3}(\d[\d,]*(?:\.\d+)?|\.\d+)(?![\d/])")


def problem(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row as messages and a number; a row without a number is left out."""
    answer = number_of(row["answer"])
    return (
        None
        if answer is None
        else {"prompt": [{"role": "user", "content": f"{row['question']}\n{_ASKED}"}], "answer": answer}
    )


def number_of(text: str) -> str | None:
    """The number behind the last `####`, without separators of thousands. It may be bold, in a box, or dollars."""
    *_, (sign, digits) = _NUMBER.findall(text) or [("", "")]
    return f"{'-' if sign else ''}{digits.replace(',', '')}" if digits else None


def score(problem: Mapping[str, Any], answer: str) -> float:
    """1.0 for the right number, else 0.0."""
    said = number_of(answer)
    return float(said is not None and float(said) == float(problem["answer"]))
