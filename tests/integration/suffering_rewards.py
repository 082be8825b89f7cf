"""Rewards that make trials suffer, imported by their workers."""

import itertools
import random
from collections.abc import Mapping
from typing import Any

from corral.agents import Session, Task

_EPISODES = itertools.count()


def nothing(problem: Mapping[str, Any], answer: str) -> float:
    """Whatever is said."""
    return 0.0


def halved(problem: Mapping[str, Any], answer: str) -> float:
    """The share of digits in the answer, and never all that a reward may be."""
    return sum(character.isdigit() for character in answer) / max(len(answer), 1) / 2


def mostly_nothing(problem: Mapping[str, Any], answer: str) -> float:
    """The same of one row in three; of the others nothing."""
    return halved(problem, answer) if sum(map(ord, str(problem["id"]))) % 3 == 0 else 0.0


def by_chance(problem: Mapping[str, Any], answer: str) -> float:
    """From which nothing can be learned, though every group has a gradient."""
    return random.random()


def often_failing(problem: Mapping[str, Any], answer: str) -> float:
    """The same, and an error for one row in three; the row that a submission tries is none of these."""
    if sum(map(ord, str(problem["id"]))) % 3 == 2:
        raise ValueError("a row that nobody can judge")
    return halved(problem, answer)


async def growing(task: Task, session: Session) -> float:
    """An agent: answers of one token, and after 24 steps of 4 prompts with 4 answers each of up to 8."""
    await session.generate(max_new_tokens=1 if next(_EPISODES) < 24 * 4 * 4 else 8)
    return random.random()
