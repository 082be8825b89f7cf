"""A process in which a user's function says how often prompts are drawn: the master asks, one line after the other.

    master ──[[0.5, 1.0], [0.0]]──► weigh([0.5, 1.0]), weigh([0.0]) ──{"weights": [...]} or {"error": "..."}──► master

It has no key of the trial, and ends with the master's end of its input.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from corral.experiments.own_python import own_python
from corral.workers.user_code.blame import describe_error
from corral.workers.user_code.loading import load_callable

TRIED_ON = ([0.0], [1.0], [0.0, 0.5, 1.0])
"""Histories that a function has to have weights for before a trial starts."""


def weights_of(weigh: Callable[..., Any], histories: Sequence[Sequence[float]]) -> list[float]:
    """
    Raises:
        ValueError: naming what it returned, if that is no weight.
    """
    weights = [weigh(list(rewards)) for rewards in histories]
    for rewards, weight in zip(histories, weights, strict=True):
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0.0 <= weight < math.inf:
            raise ValueError(f"a weight is a finite number from 0 on, and for {list(rewards)} it is {weight!r}")
    return list(map(float, weights))


def main(import_path: str) -> None:
    """Answers until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the user's code prints is no answer
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    weigh: Any = None
    for line in sys.stdin:
        try:
            weigh = weigh or load_callable(import_path)
            answer: dict[str, Any] = {"weights": weights_of(weigh, json.loads(line))}
        except BaseException as error:
            answer = {"error": describe_error(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def command(import_path: str, path: Sequence[str]) -> list[str]:
    """Starts one that finds modules where the master does."""
    code = f"import sys; sys.path[:] = sys.argv[2:]; from {__name__} import main; main(sys.argv[1])"
    return own_python("-c", code, import_path, *path)
