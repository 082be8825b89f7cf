"""How a host calls what gives numbers: a reward, and a sampler's function.

    {"run", "problem", "answers", "is_weighed"} ──► reward(problem, answer | answers | episodes) ──► [Judged, ...]
    {"run", "histories"}                        ──► weigh(rewards) of each                       ──► [weight, ...]

A plain function is called in forked processes, an async function in the host.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from corral.workers.user_code.checks import as_taken, checked_rewards, is_async, what_it_takes
from corral.workers.user_code.host import Ask, Program, Setup
from corral.workers.user_code.loading import configured, load_callable
from corral.workers.user_code.run import Run

TRIED_ON = ([0.0], [1.0], [0.0, 0.5, 1.0])
"""Histories that a sampler's function has to have weights for before a trial starts."""
_MAX_AWAITED = 256  # calls of an async reward at a time


def reward(setup: Setup) -> Program:
    """
    Args:
        setup: its options are `concurrency`, which is that of the part, and `num_processes` of a plain function.
    """
    function = configured(load_callable(setup.function), setup.settings, key="settings")
    takes, is_awaited = what_it_takes(function), is_async(function)
    number = setup.options["concurrency"] or (_MAX_AWAITED if is_awaited else setup.options["num_processes"])

    def called(asked: Mapping[str, Any]) -> Any:
        return function(json.loads(asked["problem"]), as_taken(takes, asked["answers"]))

    def checked(asked: Mapping[str, Any], value: Any) -> Any:
        judged = checked_rewards(function, value, len(asked["answers"]), is_weighed=asked["is_weighed"])
        return msgspec.to_builtins(judged)

    async def judge(asked: Mapping[str, Any]) -> Any:
        return checked(asked, await called(asked))

    async def play(asked: Mapping[str, Any], run: Run, ask: Ask) -> Any:
        return await run.wait(judge(asked))

    ready = {"takes": takes}
    if is_awaited:
        return Program(function=function, ready=ready, concurrency=number, play=play)
    return Program(function=function, ready=ready, concurrency=number, call=lambda asked: checked(asked, called(asked)))


def sampler(setup: Setup) -> Program:
    """How often prompts are drawn."""
    weigh = load_callable(setup.function)
    return Program(function=weigh, concurrency=1, call=lambda asked: weights_of(weigh, asked["histories"]))


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
