"""Tries of a user's functions, as workers will call them: what does not fit is said with its file and line."""

import inspect
from collections.abc import Callable, Mapping, Sequence
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


def try_reward(reward: Callable[..., Any], problem: Mapping[str, Any], answers: Sequence[str]) -> None:
    """Calls the reward on answers to one problem until it judges one.

    Raises:
        UnfitError: if it can never be called, or judged none of them.
    """
    _check_arguments(reward, ("problem", "answer"))
    if _is_async(reward):
        raise UnfitError(f"{_where(reward)}: {_name(reward)} is an async function, and a reward is a plain one")
    causes: list[str] = []
    for answer in answers:
        try:
            value = reward(problem, answer)
        except BaseException as error:
            causes.append(describe_error(error))
            continue
        try:
            checked_reward(value)
            return
        except (TypeError, ValueError):
            causes.append(f"{_where(reward)}: {_name(reward)} returned {value!r:.100}, and a reward is a finite number")
    tried = " and ".join(f"{answer!r:.40}" for answer in answers)
    raise UnfitError(f"it judged no answer to the first row of the data set, tried with {tried}: {causes[0]}")


def check_agent(agent: Callable[..., Any]) -> None:
    """UnfitError if it is no coroutine function of an agent's four arguments."""
    _check_arguments(agent, ("problem", "prompt_ids", "sample_group", "judge"))
    if not _is_async(agent):
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


def _is_async(function: Callable[..., Any]) -> bool:
    inner = inspect.unwrap(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _where(function: Callable[..., Any]) -> str:
    inner: Any = inspect.unwrap(function)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return f"{shown_path(code.co_filename)}:{code.co_firstlineno}" if code is not None else _name(function)
