"""Side numbers: what rewards, agents and environments say of an answer beside its reward, and the means of these.

Nothing is trained on them, so none costs a prompt: a mean leaves out the numbers that are not finite, and counts them.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any


def side_number(value: Any) -> float:
    """A number of whatever size as a float; TypeError or ValueError if it is no number."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def finite_means(numbers_by_name: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """The mean of the finite numbers of each name, and, where some are not finite, how many as `NAME/not_finite`."""
    means: dict[str, float] = {}
    for name, numbers in numbers_by_name.items():
        every = list(numbers)
        finite = [number for number in every if math.isfinite(number)]
        if finite:
            means[name] = _mean(finite)
        if len(finite) < len(every):
            means[f"{name}/not_finite"] = float(len(every) - len(finite))
    return means


def _mean(numbers: list[float]) -> float:
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:  # their sum is too large, and their mean is not
        return math.fsum(number / len(numbers) for number in numbers)
