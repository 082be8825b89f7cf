"""A reward for the trials here, imported by their workers: untrained models earn some of it, and it can be slow.

A test writes the pace into the file that CORRAL_TEST_PACE names: {"pause_s": 0.1, "until_step": 7}. Every reward takes
so long; and from that train step on none is given, so that however slow the test is, the trial does not run out of work
before the test has acted. A trial that is asked to stop goes on, slowly: where the step itself answers the prompts, the
stop waits for its end. Without the file rewards take no time. CORRAL_TEST_TRIAL names the trial's directory.
"""

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_POLL_INTERVAL_S = 0.05


def digits(problem: Mapping[str, Any], answer: str) -> float:
    """The share of digits in the answer, at the pace of the test."""
    _keep_pace()
    return sum(character.isdigit() for character in answer) / max(len(answer), 1)


def by_row(problem: Mapping[str, Any], answers: Sequence[str]) -> list[float]:
    """What follows from the row alone, at the pace of the test: of one row in three all answers are as good."""
    _keep_pace()
    return rewards_by_row(str(problem["id"]), len(answers))


def rewards_by_row(row_id: str, num_answers: int) -> list[float]:
    """What `by_row` gives."""
    kind = sum(map(ord, row_id)) % 3
    return [1.0 if kind == 0 else float(number <= kind) / kind for number in range(num_answers)]


def _keep_pace() -> None:
    # A worker that leaves waits for its threads.
    while (pace := _read_pace()) is not None and threading.main_thread().is_alive():
        if pace["until_step"] is None or _last_step() < pace["until_step"] or _is_asked_to_stop():
            time.sleep(pace["pause_s"])
            break
        time.sleep(_POLL_INTERVAL_S)


def _read_pace() -> dict[str, Any] | None:
    try:
        return dict(json.loads(Path(os.environ["CORRAL_TEST_PACE"]).read_bytes()))
    except FileNotFoundError:
        return None


def _is_asked_to_stop() -> bool:
    return (Path(os.environ["CORRAL_TEST_TRIAL"]) / "control/stop.json").exists()


def _last_step() -> int:
    """The newest train step in the trial's metrics."""
    try:
        lines = (Path(os.environ["CORRAL_TEST_TRIAL"]) / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return max((int(json.loads(line)["step"]) for line in lines), default=0)  # an evaluation is of an earlier step
