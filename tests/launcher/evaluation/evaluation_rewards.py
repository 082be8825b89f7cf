"""Rewards that misbehave on purpose, for evaluations in tests."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from corral.workers.sandbox.base import needs_sandbox


@needs_sandbox  # so that the evaluation is not hidden from it
def crash(problem: Mapping[str, Any], answer: str) -> float:
    """Ends the evaluation as a segmentation fault would: no exception, no clean-up."""
    host, evaluation, *_ = psutil.Process().parents()
    evaluation.kill()
    host.wait()  # it ends with its parent, and this process with it
    return 0.0


def digits(problem: Mapping[str, Any], answer: str) -> float:
    """The share of digits, of which untrained models earn some."""
    return sum(character.isdigit() for character in answer) / max(len(answer), 1)


def gated(problem: Mapping[str, Any], answer: str) -> float:
    """Judges as many problems as the number in a file allows; with one more, all wait until it allows more."""
    gate = Path(os.environ["CORRAL_TEST_GATE"])
    judged = gate.with_suffix(".judged")
    with judged.open("a") as file:
        file.write(f"{problem['id']}\n")
    while len(judged.read_text().split()) > int(gate.read_text() or 0):
        time.sleep(0.05)
    return float(len(answer) > 0)


def wants_result(problem: Mapping[str, Any], answer: str) -> float:
    """Reads a column that held-out rows do not have."""
    return float(problem["result"] == answer)
