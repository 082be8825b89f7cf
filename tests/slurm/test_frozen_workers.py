"""A worker that stands still, of every kind, in a real job: rl-status names it, and who waits for whom ends at it."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.trial_helpers import WORKERS, Trial

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_frozen_worker_of_each_kind_is_named_with_who_waits_for_it(start_job: Callable[..., Trial]) -> None:
    trial = start_job(
        "grpo",
        num_rows=400,
        num_passes=4,
        pause_s=0.3,
        runs_on=True,
        overrides={
            "groups.generation_server.scheduling.cpu": 7,
            "control.max_steps": 10000,
        },
    )
    rows = trial.wait_until_running()
    seconds = {}
    for worker in WORKERS:
        before = trial.starts(worker)
        frozen_at = time.monotonic()
        os.kill(rows[worker]["pid"], signal.SIGSTOP)
        try:
            status = trial.wait_for(lambda worker=worker: _silent(trial, worker), f"{worker} silent", pause_s=0.1)
            seconds[worker] = time.monotonic() - frozen_at
            assert status["state"] == ("UNRESPONSIVE" if worker == "master_worker/0" else "DEGRADED")
            assert worker in status["note"] and "silent" in status["note"]
            # Its lease ends while it stands still; what it said last does not.
            time.sleep(max(0.0, 11.0 - (time.monotonic() - frozen_at)) if worker == "generation_server/0" else 0.0)
            assert _silent(trial, worker)
            status = trial.wait_for(lambda worker=worker: _ends_at(trial, worker), f"somebody to wait for {worker}")
            chains = [" > ".join(step["worker"] for step in chain["steps"]) for chain in status["waits"]]
            print(f"{worker} frozen: named after {seconds[worker]:.1f} s, {status['note']!r}, chains {chains}")
        finally:
            os.kill(rows[worker]["pid"], signal.SIGCONT)
        rows = trial.wait_until_running()
        if worker != "generation_server/0":
            assert trial.starts(worker) == before  # nobody took it for dead
    print("seconds until rl-status names a frozen worker:", {name: round(value, 1) for name, value in seconds.items()})
    trial.run("rl-stop", "--now")


def _silent(trial: Trial, worker: str) -> dict[str, Any]:
    status = trial.status()
    (row,) = [row for row in status["workers"] if row["worker"] == worker]
    return status if row["state"] == "SILENT" else {}


def _ends_at(trial: Trial, worker: str) -> dict[str, Any]:
    status = trial.status()
    return status if worker in [chain["steps"][-1]["worker"] for chain in status["waits"]] else {}
