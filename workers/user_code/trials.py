"""Tries of a user's functions, as workers will call them: what does not fit is said with its file and line."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from corral.workers.user_code.blame import describe_error, shown_path

LARGEST_REWARD = float(np.finfo(np.float32).max)  # rewards are float32 in a sample


class UnfitError(ValueError):
    """A function is not of the form that its place asks for."""


class UntriedError(AttributeError):
    """A function asks for what only a trial has, so that nothing more can be said of it before there is one."""


def checked_reward(value: Any) -> float:
    """A value as a reward; ValueError if no training step could use it."""
    reward = float(value)
    if not abs(reward) <= LARGEST_REWARD:
        raise ValueError(f"a reward must be a finite float32, got {reward}")
    return reward


def takes_group(reward: Callable[..., Any]) -> bool:
    """Whether a reward is called with all answers of a group: its second parameter is called `answers`."""
    try:
        return list(inspect.signature(reward).parameters)[1:2] == ["answers"]
    except (TypeError, ValueError):
        return False  # a compiled one says nothing


def checked_rewards(reward: Callable[..., Any], value: Any, num_answers: int) -> list[float]:
    """What a reward returned, as one number for each answer; TypeError or ValueError if it is not."""
    rewards = [checked_reward(one) for one in (value if takes_group(reward) else [value])]
    if len(rewards) != num_answers:
        raise ValueError(f"a reward of groups returns one number for each answer, got {len(rewards)} for {num_answers}")
    return rewards


def try_reward(reward: Callable[..., Any], problem: Mapping[str, Any], answers: Sequence[str]) -> None:
    """Calls the reward on answers to one problem until it judges one.

    Raises:
        UnfitError: if it can never be called, or judged none of them.
    """
    is_of_groups = takes_group(reward)
    _check_arguments(reward, ("problem", "answers" if is_of_groups else "answer"))
    causes: list[str] = []
    for group in [list(answers)] if is_of_groups else [[answer] for answer in answers]:
        try:
            value = reward(problem, group if is_of_groups else group[0])
            if is_async(reward):
                value = asyncio.run(_result(value))
        except BaseException as error:
            causes.append(describe_error(error))
            continue
        try:
            checked_rewards(reward, value, len(group))
            return
        except (TypeError, ValueError) as error:
            rule = f"{error}" if is_of_groups else "a reward is a finite number"
            causes.append(f"{_where(reward)}: {_name(reward)} returned {value!r:.100}, and {rule}")
    tried = " and ".join(f"{answer!r:.40}" for answer in answers)
    raise UnfitError(f"it judged no answer to the first row of the data set, tried with {tried}: {causes[0]}")


def check_agent(agent: Callable[..., Any]) -> None:
    """UnfitError if it is no coroutine function of an agent's four arguments."""
    _check_arguments(agent, ("problem", "prompt_ids", "sample_group", "judge"))
    if not is_async(agent):
        raise UnfitError(f"{_where(agent)}: {_name(agent)} is not an async function; write 'async def {_name(agent)}'")


def _check_arguments(function: Callable[..., Any], names: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a compiled one says nothing
    try:
        signature.bind(*names)
    except TypeError as error:
        raise UnfitError(
            f"{_where(function)}: {_name(function)}{signature} cannot be called with ({', '.join(names)}): {error}"
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
    return f"{shown_path(code.co_filename)}:{code.co_firstlineno}" if code is not None else _name(function)
