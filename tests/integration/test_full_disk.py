"""A disk that runs full under a trial, and has room again: the trial waits, says why, and loses nothing."""

import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from corral.experiments.exit_codes import WorkerExit
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import Material, Trial, submit

SIZE_MB = 64
MAX_RESTARTS = 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("a file system of its own needs the right to mount one")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.slow
def test_a_trial_on_a_full_disk_says_so_and_goes_on_when_there_is_room(small_disk: Path, material: Material) -> None:
    trial = submit(
        "grpo",
        small_disk,
        material,
        num_rows=96,
        pause_s=0.1,
        overrides={"supervision.max_restarts": MAX_RESTARTS, "evaluation.every": "1000 steps"},
    )
    try:
        fill_and_empty(trial, small_disk / "filler")
        check_nothing_is_left(trial)
        check_every_sample_was_consumed_once(trial)
        check_no_token_was_too_old(trial, eta=1)
    finally:
        trial.close()


def fill_and_empty(trial: Trial, filler: Path) -> None:
    trial.wait_for_steps(2)
    with open(filler, "wb") as file, pytest.raises(OSError, match="No space left"):
        while True:
            os.write(file.fileno(), bytes(1 << 20))
    trial.full_speed()
    said = trial.wait_for(words_of(trial, "is full: 0.0 MB of 67.1 MB are free; make room"), "rl-status to say so")
    assert "goes on by itself" in said
    starts: defaultdict[str, set[str]] = defaultdict(set)  # the journal has no room for its lines, either

    def starts_again_and_again() -> str:
        for pid in trial.processes():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if "--incarnation" in command:
                    values = dict(zip(command, command[1:], strict=False))
                    starts[f"{values['--kind']}/{values['--index']}"].add(values["--incarnation"])
        return next((worker for worker, known in starts.items() if len(known) > MAX_RESTARTS + 1), "")

    worker = trial.wait_for(starts_again_and_again, "a worker to be started more often than a crash would be")
    filler.unlink()
    trial.wait_for_end()
    exits = trial.events("task_ended", who=worker)
    assert len(exits) > MAX_RESTARTS, "what could not be written is written once there is room"
    assert {event["code"] for event in exits} <= {WorkerExit.NO_ROOM, 0}


def words_of(trial: Trial, words: str) -> Callable[[], str]:
    def look() -> str:
        note = str(trial.status()["note"])
        return note if words in note else ""

    return look
