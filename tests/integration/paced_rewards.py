"""A reward for the trials here, imported by their workers: untrained models earn some of it, and it can be slow."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PAUSE_S = 0.1


def digits(problem: Mapping[str, Any], answer: str) -> float:
    """The share of digits in the answer. Takes its time while the file that CORRAL_TEST_SLOW_WHILE names exists."""
    if Path(os.environ["CORRAL_TEST_SLOW_WHILE"]).exists():
        time.sleep(_PAUSE_S)
    return sum(character.isdigit() for character in answer) / max(len(answer), 1)
