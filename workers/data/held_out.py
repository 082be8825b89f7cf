"""Results of held-out problems: sums over their answers, which can be added up in any order, and their means.

answers to a problem ──sums_of──► sums ──added to those of other problems──► means ──► eval/accuracy, ...
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

_CORRECT_FROM = 1.0  # rewards of correct answers reach it, where nobody says otherwise
_PASS, MAJORITY = "pass@", "majority"


def sums_of(
    rewards: Sequence[float],
    lengths: Sequence[int],
    *,
    are_correct: Sequence[bool | None] | None = None,
    asked: int = 1,
    votes: Sequence[str | None] | None = None,
) -> dict[str, float]:
    """The sums of one problem.

    Args:
        rewards: of the answers to it; none if they could not be judged.
        lengths: their tokens.
        are_correct: whether they are right, None where nobody knows: of a problem with such an answer nothing is said
            of accuracy. Without it rewards say so.
        asked: answers that were asked for.
        votes: what each of the answers says, None where it says nothing; None where nobody counts them.
    """
    judged = [reward >= _CORRECT_FROM for reward in rewards] if are_correct is None else are_correct
    known = [bool(one) for one in judged if one is not None]
    correct, is_known = sum(known), len(known) == len(rewards)
    sums = {
        "problems": 1.0,
        "judged_problems": float(bool(rewards)),
        "judged": float(len(rewards)),
        "unjudged": 0.0 if rewards else float(asked),
        "known": float(len(known) if is_known else 0),
        "correct": float(correct if is_known else 0),
        "reward": math.fsum(rewards),
        "tokens": float(sum(lengths)),
    }
    k = 2
    while is_known and k <= asked:
        sums[f"{_PASS}{k}"] = pass_at(k, num=len(rewards), correct=correct)
        k *= 2
    if votes is not None and is_known:
        sums[MAJORITY] = majority_of(known, votes)
    return sums


def majority_of(are_correct: Sequence[bool], votes: Sequence[str | None]) -> float:
    """Probability that the most frequent vote is correct. Chance decides among votes that are equally frequent.

    Wang et al. 2022, https://arxiv.org/abs/2203.11171. If answers of one vote are judged differently, the vote counts
    as correct by the fraction of its answers that are.
    """
    saying: dict[str, list[bool]] = defaultdict(list)
    for is_correct, vote in zip(are_correct, votes, strict=True):
        if vote is not None:
            saying[vote].append(is_correct)
    most = max(map(len, saying.values()), default=0)
    fractions = [sum(correct) / most for correct in saying.values() if len(correct) == most]
    return math.fsum(fractions) / max(len(fractions), 1)


def pass_at(k: int, *, num: int, correct: int) -> float:
    """How probable it is that one of `k` answers is right, without bias, from `num` answers to one problem.

    Chen et al. 2021, https://arxiv.org/abs/2107.03374, section 2.1. Of fewer than `k` answers all are taken.
    """
    drawn = min(k, num)
    return 1.0 - math.comb(num - correct, drawn) / math.comb(num, drawn)


def pass_at_k(values: Mapping[str, float]) -> dict[int, float]:
    """The `pass@k` among means, by k."""
    return {int(name.removeprefix(_PASS)): value for name, value in values.items() if name.startswith(_PASS)}


def means_by_set(sums: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The means of each data set under its name."""
    return {
        f"{name}/{key}" if name else key: value for name, each in sums.items() for key, value in means(each).items()
    }


def unjudged_text(name: str, sums: Mapping[str, float], failure: str) -> str:
    """How many problems of the data set `name` have no reward, and the first failure."""
    num = sums["problems"] - sums["judged_problems"]
    of_set = f" of {name}" if name else ""
    return f"{num:.0f} of {sums['problems']:.0f} held-out problems{of_set} have no reward: {failure}"


def added(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    """The sums of both."""
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in {**left, **right}}


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """`accuracy` (fraction of right answers among the judged ones), `reward/mean`, `response_length/mean`,
    `pass@k`, `majority`, all of answers that were judged, and missing where none was; beside them `problems` and
    `unjudged`, which are counted.
    """
    values = {name: sums.get(name, 0.0) for name in ("problems", "unjudged")}
    if judged := sums.get("judged"):
        values |= {
            "reward/mean": sums["reward"] / judged,
            "response_length/mean": sums["tokens"] / judged,
        }
        values |= {"accuracy": sums["correct"] / known} if (known := sums.get("known")) else {}
        of_problems = {name: total for name, total in sums.items() if name.startswith((_PASS, MAJORITY))}
        values |= {name: total / sums["judged_problems"] for name, total in of_problems.items()}
    return values
