"""Checks of a user's functions, called as workers will call them: what does not fit is said with its file and line."""

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import numpy as np

from corral.experiments.inputs.users_code import TriedRow
from corral.workers.agents.contract import Episode
from corral.workers.data.side_numbers import side_number
from corral.workers.user_code.blame import LONGEST_NAME, describe_error, printable, short_path

Takes = Literal["answer", "answers", "episodes"]

_MOST_SAID = 8192  # characters; `words` of a part of the reward asks for no more
_MOST_NUMBERS = 1024  # beside a reward: each has a mean in metrics.jsonl
_TRIED_FRACTION = 0.25  # of a deadline, after which no further answer is tried
_ODD_ANSWERS = ("", "####", "#### ,", "\\boxed{}", "-", "\u0664\u2212 \u7b54\u6848", "so it is " * 1000)
LARGEST_REWARD = float(np.finfo(np.float32).max)  # rewards are float32 in a sample


class Judged(msgspec.Struct, frozen=True):
    """What a reward says of an answer."""

    reward: float
    statistics: dict[str, float] = {}
    """Other numbers, by name, finite or not."""
    said: str = ""
    """In words, for people."""


class UnfitError(ValueError):
    """A function is not of the form that its place asks for."""


class UntriedError(AttributeError):
    """A function asks for what only a trial has, so that nothing more can be said of it before there is one."""


class LateError(TimeoutError):
    """A function has not come back in time; the text says where it stood."""


def cause_of(error: BaseException) -> str:
    """What is wrong, and in which line of the user's."""
    return str(error) if isinstance(error, UnfitError | UntriedError | LateError) else describe_error(error)


def checked_reward(value: Any) -> float:
    """A value as a reward; ValueError if no training step could use it."""
    reward = float(value)
    if not abs(reward) <= LARGEST_REWARD:
        raise ValueError(f"a reward must be a finite float32, got {reward}")
    return reward


def what_it_takes(reward: Callable[..., Any]) -> Takes:
    """What a reward is called with beside the problem, by the name of its second parameter: all answers, or all
    episodes of a group, or else one answer."""
    try:
        second = list(inspect.signature(reward).parameters)[1:2]
    except (TypeError, ValueError):
        return "answer"  # a compiled one says nothing
    return "answers" if second == ["answers"] else "episodes" if second == ["episodes"] else "answer"


def as_taken(takes: Takes, texts: Sequence[str]) -> str | list[str] | list[Episode]:
    """The second argument of a reward: a text, texts, or episodes, each of which is JSON here."""
    if takes == "answer":
        return texts[0]
    return list(texts) if takes == "answers" else [Episode(**json.loads(text)) for text in texts]


def checked_rewards(
    reward: Callable[..., Any], value: Any, num_answers: int, *, is_weighed: bool = True
) -> list[Judged]:
    """What a reward returned, one for each answer: a number, or a pair of it and numbers by name, or text by the name
    `said`; UnfitError if it is not.

    Args:
        is_weighed: whether something is trained on the number; that of a part without weight need not be finite.
    """
    is_of_groups = what_it_takes(reward) != "answer"
    number_of = checked_reward if is_weighed else side_number
    rule = "a reward is a finite float32 number, or a pair of it and other numbers by name"
    try:
        values: Iterable[Any] = value if is_of_groups else [value]
        pairs = [one if isinstance(one, tuple) and len(one) == 2 else (one, {}) for one in values]
        rewards = [_judged(number_of(one), statistics) for one, statistics in pairs]
        if len(rewards) == num_answers:
            return rewards
        rule = f"a reward of groups returns one number for each answer, got {len(rewards)} for {num_answers}"
    except (AttributeError, TypeError, ValueError) as error:
        rule = str(error) if is_of_groups or isinstance(error, UnfitError) else rule
    # The type of what is no number: prompts that were dropped are counted by these words.
    shown = repr(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"
    raise UnfitError(f"{_where(reward)}: {_name(reward)} returned {shown}, and {rule}")


def _judged(reward: float, statistics: Any) -> Judged:
    if len(statistics) > _MOST_NUMBERS:
        raise UnfitError(f"a reward has at most {_MOST_NUMBERS} numbers beside it, got {len(statistics)}")
    numbers = {printable(str(name)[:LONGEST_NAME]): number for name, number in statistics.items()}
    said = printable(numbers.pop("said")[-_MOST_SAID:]) if isinstance(numbers.get("said"), str) else ""
    return Judged(reward, {name: side_number(number) for name, number in numbers.items()}, said)


def try_reward(
    reward: Callable[..., Any],
    row: TriedRow,
    *,
    is_weighed: bool = True,
    timeout_s: float = 15.0,
) -> dict[str, float]:
    """Calls the reward on answers to one row: on all spellings of the row's own answer, as long as that takes little of
    the deadline, or until an async reward, which may cost something, or one of groups, has judged one.

    Args:
        is_weighed: as in `checked_rewards`.
        timeout_s: the deadline of one call.

    Returns:
        The numbers of the answers that it judged; none if it was not tried on all spellings.

    Raises:
        UnfitError: if it can never be called, or judged none of them.
        UntriedError: if it cannot reach, from here, whom it asks.
    """
    takes = what_it_takes(reward)
    is_of_groups = takes != "answer"
    _check_arguments(reward, ("problem", takes))
    answers, started = [*row.right, *row.others], time.monotonic()
    causes, judged = list[str](), dict[str, float]()
    for group in [answers] if is_of_groups else [[answer] for answer in answers]:
        is_enough = is_async(reward) or time.monotonic() - started > _TRIED_FRACTION * timeout_s
        if judged and group[0] not in row.right:
            break
        if judged and is_enough:
            return {}
        try:
            texts = [json.dumps(asdict(Episode([text]))) for text in group] if takes == "episodes" else group
            value = reward(row.problem, as_taken(takes, texts))
            if is_async(reward):
                value = asyncio.run(_result(value))
        except (ConnectionError, TimeoutError) as error:
            raise UntriedError(describe_error(error)) from error
        except BaseException as error:
            causes.append(describe_error(error))
            continue
        try:
            rewards = checked_rewards(reward, value, len(group), is_weighed=is_weighed)
            judged |= {answer: one.reward for answer, one in zip(group, rewards, strict=True)}
        except UnfitError as error:
            causes.append(str(error))
    if not judged:
        tried = " and ".join(f"{answer!r:.40}" for answer in dict.fromkeys([*row.right[:1], *row.others]))
        raise UnfitError(f"it judged no answer to {row.place}, tried with {tried}: {causes[0]}")
    return judged


def fails_on(reward: Callable[..., Any], row: TriedRow, *, timeout_s: float) -> str:
    """How a plain reward fails on an answer that a model may give, so that its prompt is lost; "" if it does not."""
    started = time.monotonic()
    for answer in _ODD_ANSWERS if what_it_takes(reward) == "answer" and not is_async(reward) else ():
        if time.monotonic() - started > _TRIED_FRACTION * timeout_s:
            break
        try:
            checked_rewards(reward, reward(row.problem, answer), 1)
        except Exception as error:
            return f"fails on an answer such as {answer!r:.40}, whose prompt is then dropped: {cause_of(error)}"
    return ""


def check_agent(agent: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """UnfitError if it is no coroutine function of a task, a session and its settings."""
    _check_arguments(agent, ("task", "session"), settings)
    if not is_async(agent):
        raise UnfitError(f"{_where(agent)}: {_name(agent)} is not an async function; write 'async def {_name(agent)}'")


def _check_arguments(
    function: Callable[..., Any], names: Sequence[str], settings: Mapping[str, Any] = MappingProxyType({})
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a compiled one says nothing
    try:
        signature.bind(*names, **settings)
    except TypeError as error:
        given = ", ".join((*names, *(f"{name}=" for name in settings)))
        raise UnfitError(
            f"{_where(function)}: {_name(function)}{signature} cannot be called with ({given}): {error}"
        ) from error


async def _result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def is_async(function: Callable[..., Any]) -> bool:
    inner = inspect.unwrap(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _where(function: Callable[..., Any]) -> str:
    inner: Any = inspect.unwrap(function)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return f"{short_path(code.co_filename)}:{code.co_firstlineno}" if code is not None else _name(function)
