"""Rewards of a user, good and bad, in a module that processes of rewards load quickly."""

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from corral.agents import Episode
from corral.experiments.config.base import FrozenConfig
from corral.workers.rewards.contract import StopTrialError

ERRORS = {
    "value": ValueError("no such problem"),
    "exit": SystemExit(1),
    "stop": StopIteration(),
    "interrupt": KeyboardInterrupt(),
}
CALLS = itertools.count()
RUNNING: list[Any] = []


def does(problem: Mapping[str, Any], answer: str) -> float:
    """What the problem asks for."""
    match problem["do"]:
        case "raise":
            raise ERRORS[problem["error"]]
        case "hang":
            threading.Event().wait()
        case "die":
            os._exit(3)
        case "sleep":
            time.sleep(0.25)
        case "alarm":
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            signal.pause()
        case "count":
            return float(next(CALLS))
        case "nothing":
            return float(answer == "42")
    return float(problem.get("value", 1.0))


async def awaits(problem: Mapping[str, Any], answer: str) -> float:
    if problem["do"] == "block":
        time.sleep(600)
    await asyncio.sleep(600 if problem["do"] == "hang" else 0.25)
    return float(problem["value"])


async def most_at_a_time(problem: Mapping[str, Any], answer: str) -> float:
    RUNNING.append(problem)
    number = len(RUNNING)
    await asyncio.sleep(0.05)
    RUNNING.pop()
    return float(number)


def compares(problem: Mapping[str, Any], answers: list[str]) -> list[float]:
    return [float(len(answer) - len(answers[0])) for answer in answers][: problem["number"]]


def weighs(problem: Mapping[str, Any], episodes: list[Episode]) -> list[float]:
    return [len(each.turns) + sum(each.notes.values()) + len(each.ended) + (each.reward or 0.0) for each in episodes]


async def counts(problem: Mapping[str, Any], answer: str) -> tuple[float, dict[str, int]]:
    return len(answer), {"digits": sum(map(str.isdigit, answer))}


def prints(problem: Mapping[str, Any], answer: str) -> float:
    print("judged", answer)
    print("x" * 100_000, file=sys.stderr, flush=True)
    return float(problem["value"])


async def awaits_and_prints(problem: Mapping[str, Any], answer: str) -> float:
    return prints(problem, answer)


def says_more(problem: Mapping[str, Any], answer: str) -> tuple[float, dict[str, float]]:
    return 1.0, {"more": problem["value"], "huge": 10**400}


def says_too_much(problem: Mapping[str, Any], answer: str) -> tuple[float, dict[str, Any]]:
    match problem["how"]:
        case "raise":
            raise ValueError("y" * 10_000_000)
        case "name":
            return 1.0, {"n" * 10_000: 1.0}
        case "many":
            return 1.0, {f"n{number}": 1.0 for number in range(1025)}
        case "raise half a surrogate":
            raise ValueError("bad \ud800")
    return 1.0, {"said": "bad \ud800", "n\ud800": 1.0}


class Scales(FrozenConfig):
    factor: float

    def __call__(self, problem: Mapping[str, Any], answer: str) -> float:
        return self.factor * does(problem, answer)


def gives_up(problem: Mapping[str, Any], answer: str) -> float:
    raise StopTrialError("nothing is left to spend")


def stops(problem: Mapping[str, Any], answer: str) -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


def killed_once(problem: Mapping[str, Any], answer: str) -> float:
    flag = Path(problem["flag"])
    if not flag.exists():
        flag.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def always_killed(problem: Mapping[str, Any], answer: str) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def scribbles(problem: Mapping[str, Any], answer: str) -> float:
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.write(descriptor, problem["words"].encode() + b"\n")
    os._exit(0)


async def ends_its_process(problem: Mapping[str, Any], answer: str) -> float:
    if problem["do"] == "end":
        os._exit(3)
    await asyncio.sleep(600)
    return 1.0


def judge(problem: Mapping[str, Any], answer: str) -> float:
    """1 for the only answer that the fake server gives."""
    return float(answer == "7")


def fails_for_one(problem: Mapping[str, Any], answer: str) -> float:
    """A reward of a user that knows no end to row 1."""
    return 1.0 / (int(problem["id"]) - 1)


def takes_long(problem: Mapping[str, Any], answer: str) -> float:
    """A slow reward."""
    time.sleep(5.0)
    return 1.0
