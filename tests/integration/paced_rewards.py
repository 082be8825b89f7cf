"""A reward for the trials here, imported by their workers: untrained models earn some of it, and it can be slow."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def digits(problem: Mapping[str, Any], answer: str) -> float:
    """The share of digits in the answer. Takes as many seconds as the file CORRAL_TEST_PAUSE says, if there is one."""
    pause = Path(os.environ["CORRAL_TEST_PAUSE"])
    if pause.exists():
        time.sleep(float(pause.read_text()))
    return sum(character.isdigit() for character in answer) / max(len(answer), 1)
