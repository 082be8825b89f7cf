"""math: whether an answer equals the row's as mathematics, by math-verify (https://github.com/huggingface/Math-Verify).

Its time limits are signals, which a reward's own process has.
"""

import re

from corral.workers.rewards.contract import Problem

try:
    from math_verify import parse, verify
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{__package__}:math needs math-verify; pip install 'corral-rl[math]' in the workers' environment",
        name=error.name,
    ) from error


_WORD = re.compile("[A-Za-z]{3}")  # read as LaTeX it would be a product of letters


def math(problem: Problem, answer: str) -> float:
    """1.0 if the answer ends in what equals the row's `answer`, else 0.0. LaTeX stands between `$` or in `\\boxed{}`;
    of the row's it need not.

    Raises:
        ValueError: if there is no mathematics in the row's answer.
    """
    wanted = str(problem["answer"]).replace("\\$", "")  # of money
    is_marked = any(mark in wanted for mark in ("$", "\\boxed", "\\("))
    # Of a text a number is looked for: 2 in 2n.
    is_bare = not is_marked and ("\\" in wanted or not _WORD.search(wanted))
    gold = parse(f"${wanted}$" if is_bare else wanted)
    if not gold:
        raise ValueError(f"math-verify reads no mathematics in the row's answer {wanted!r:.80}")
    return float(verify(gold, parse(answer)))
