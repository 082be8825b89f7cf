"""math: whether an answer equals the row's as mathematics, by math-verify (https://github.com/huggingface/Math-Verify).

    row's answer ──a number, LaTeX, or words with one number──► one notation ──parse──► gold ──┐
    answer ──its last box, else all of it─────────────────────► the same ──────parse───────────┴─verify──► 1.0 or 0.0

Its time limits are signals, which a reward's own process has.
"""

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import Any

from corral.workers.rewards.contract import Problem

try:
    from math_verify import parse, verify
    from sympy import FiniteSet
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{__package__}:math needs math-verify; pip install 'corral-rl[math]' in the workers' environment",
        name=error.name,
    ) from error

_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or)\b)(?:[A-Za-z]{3}|(?i:no)\b)")  # as LaTeX it is a product of letters
_NUMBER = re.compile(r"\d[\d.,]*(?:/\d+)?")
_RESULT = re.compile(r"(?is)(?:.*(?:####|\banswer\s*(?:is\b|:))|[^=]*=)([^=]*)")
_MARKS = ("$", "\\boxed", "\\(", "\\[")
_MONEY = re.compile(r"\\?\$(?=\s*[\d.])|\\\$|[€£¥₹]")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_FUNCTION = re.compile(r"(?<![\\A-Za-z])(pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp)(?![A-Za-z])")
_UNITS = re.compile(r"(?<=[\d}])\s*((?!percent|pct)(?:[A-Za-z]{3,}\s+)*[A-Za-z]{3,})$")
_SIGNS = str.maketrans({"−": "-", "⁄": "/", "∞": r"\infty ", "°": r"^\circ "})
_EXPONENT = re.compile(r"(?<![\w.])((?:\d+\.?\d*|\.\d+)[eE][+-]?\d{1,3})(?!\w)")
_POWER_OF_TEN = re.compile(
    r"(?<![\w.^])(\d+(?:\.\d+)?)\s*(?:\\times|\\cdot|[*×·])\s*10\s*\^\s*(?:\{\s*(-?\d{1,3})\s*\}|(-?\d{1,3})(?!\w|\.\d))"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?: |~|\\[,;:! ]|\{,\}|,\\!)\d{3})+(?!\d)")
_PERIOD = re.compile(r"(?<!\d)(\d{1,30})\.(\d{0,30})\\(?:overline|bar|dot)\s*\{(\d{1,30})\}")
_MIXED = re.compile(r"(?<![\w./^}])(\d{1,30})\s+(\d{1,30})/(\d{1,30})(?![\d/])")


def math(problem: Problem, answer: str) -> float:
    """1.0 if the answer ends in what equals the row's `answer`, else 0.0. LaTeX stands between `$` or in `\\boxed{}`;
    of the row's it need not. The last box counts; where the row has several values, boxes near each other do.

    Raises:
        ValueError: if the row's answer is no mathematics, or has words and several numbers.
    """
    gold, text = _gold(problem["answer"]), _notation(answer)
    last = _with_last_box(text)
    readings = [last, text] if last and isinstance(gold[0], FiniteSet) else [last]
    digits = _digits_behind_the_point(gold[0])
    equal = (verify(gold, parse(one), float_rounding=digits, numeric_precision=digits + 9) for one in readings)
    return float(any(equal))


def _gold(answer: object) -> list[Any]:
    """The row's answer as math-verify reads it."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"math compares with a number or a text, and the row's answer is {answer!r:.80}")
    wanted = _notation(format(Decimal(repr(answer)), "f") if isinstance(answer, float) else str(answer))
    if "$" not in (amounts := _MONEY.sub("", wanted)):
        wanted = amounts
    if not any(mark in wanted for mark in _MARKS):
        latex = _as_latex(wanted)
        if "\\" in _FUNCTION.sub("", wanted) or not _WORD.search(_FUNCTION.sub("", wanted)):
            wanted = f"${latex}$"
        else:  # Of words the number is looked for: 5 in "5 apples".
            wanted = found[1] if (found := _RESULT.fullmatch(wanted)) else wanted
            if len(_NUMBER.findall(wanted)) > 1:
                raise ValueError(
                    f"the row's answer {answer!r:.80} has words and several numbers; write what is compared alone"
                )
    gold = [one for one in parse(wanted) if not isinstance(one, str)]
    if not gold:
        raise ValueError(f"math-verify reads no mathematics in the row's answer {answer!r:.80}")
    return gold


def _notation(text: str) -> str:
    """Text with numbers and signs as math-verify reads them, in LaTeX and outside of it."""
    text = re.sub(r"</?answer>", " ", text)
    text = re.sub("[²³¹⁰⁴-⁹]+", lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = re.sub("[¼-¾⅐-⅞]", r" \g<0>", text)  # 3½ is no 31/2
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS)
    text = re.sub(r"√\s*(\w+)", r"\\sqrt{\1}", text).replace("√", r"\sqrt")
    text = re.sub(r"(?<![A-Za-z\\])\\?sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<=[\w)}])\*\*(?=[\w({-])", "^", text)
    text = re.sub(r"((?:^|[=:]|\bis)\s*)\+(?=[\d.])", r"\1", text)
    text = _POWER_OF_TEN.sub(lambda found: format(Decimal(f"{found[1]}e{found[2] or found[3]}"), "f"), text)
    text = _EXPONENT.sub(lambda found: format(Decimal(found[1]), "f"), text)
    text = _THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    text = _PERIOD.sub(lambda found: str(_with_period(*found.groups())), text)
    return _MIXED.sub(lambda found: f"{int(found[1]) * int(found[3]) + int(found[2])}/{found[3]}", text)


def _with_period(whole: str, before: str, period: str) -> Fraction:
    repeated = Fraction(int(period), 10 ** len(before) * (10 ** len(period) - 1))
    return Fraction(f"{whole}.{before or 0}") + repeated


def _as_latex(text: str) -> str:
    """What is mathematics and nothing else, such as a box has, in LaTeX: `2pi`, `€5.`, `5 apples`."""
    text = _MONEY.sub("", _FUNCTION.sub(r"\\\1", text)).strip().rstrip(".,;").rstrip()
    return _UNITS.sub(r"\\text{\1}", text)


def _with_last_box(text: str) -> str:
    """The text with no box but its last one; nothing, where that is cut."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return text
    start = boxes[-1].end()
    end = _end_of_braces(text, start) if text.startswith("{", start) else start + 1
    if end is None:
        return ""
    content = _as_latex(text[start:end].removeprefix("{").removesuffix("}"))
    return f"{_BOX.sub('', text[: boxes[-1].start()])}\\boxed{{{content}}}{text[end:]}"


def _end_of_braces(text: str, start: int) -> int | None:
    """Behind the brace that closes the one at `start`; None if none does."""
    depth = 0
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    return None


def _digits_behind_the_point(gold: Any) -> int:
    """By which decimals are compared: math-verify's six, and three that count of a number that is less than 0.0001."""
    numbers = [
        one for one in (gold.args if isinstance(gold, FiniteSet) else [gold]) if getattr(one, "is_number", False)
    ]
    sizes = [abs(one.evalf(3)) for one in numbers]
    return max([6, *(2 - Decimal(str(size)).adjusted() for size in sizes if size.is_Float and size > 0)])
