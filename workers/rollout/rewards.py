"""Rewards: functions from a problem and an answer to a number, async or not. One whose second parameter is called
`answers` gets all answers of a group, and returns a list.

A reward is named in the experiment file by its import path. It is called in a process without keys, with a deadline;
what it raises is an explicit failure (retried, then counted), never a reward of zero.
"""

from collections.abc import Mapping
from typing import Any

Problem = Mapping[str, Any]
"""One row of the dataset, as it stands in the file."""


def exact_match(problem: Problem, answer: str) -> float:
    """1.0 if the answer equals the row's `answer` but for surrounding white space, else 0.0."""
    return float(answer.strip() == str(problem["answer"]).strip())


def no_reward(problem: Problem, answer: str) -> float:
    """0.0, whatever the answer: for training by a teacher alone, on rows that need no answer."""
    return 0.0
