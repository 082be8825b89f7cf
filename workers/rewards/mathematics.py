"""math: whether an answer equals the row's as mathematics, by math-verify (https://github.com/huggingface/Math-Verify).

Its time limits are signals, which a reward's own process has.
"""

from corral.workers.rewards.contract import Problem

try:
    from math_verify import parse, verify
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{__package__}:math needs math-verify; pip install 'corral-rl[math]' in the workers' environment",
        name=error.name,
    ) from error


def math(problem: Problem, answer: str) -> float:
    """1.0 if the answer ends in what equals the row's `answer`, else 0.0. LaTeX stands between `$` or in `\\boxed{}`;
    of the row's it need not.

    Raises:
        ValueError: if there is no mathematics in the row's answer.
    """
    wanted = str(problem["answer"])
    is_bare = "\\" in wanted and "$" not in wanted and "\\boxed" not in wanted and "\\(" not in wanted
    gold = parse(f"${wanted}$" if is_bare else wanted)
    if not gold:
        raise ValueError(f"math-verify reads no mathematics in the row's answer {wanted!r:.80}")
    return float(verify(gold, parse(answer)))
