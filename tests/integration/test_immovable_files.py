"""A trial whose folders hold files that nobody can remove: it takes no notice but a word in its logs."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.experiments.trial.leftovers import MEMORY
from tests.immovable import immovable
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import Trial


@pytest.mark.slow
def test_a_trial_goes_on_past_files_that_cannot_be_removed(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(num_rows=160, pause_s=0.02, overrides={"evaluation.every": "1000 steps"})
    trial.wait_for_steps(2)
    trial.wait_for_uncommitted_step(commit_every_steps=1)
    directory, memory = trial.directory, MEMORY / f"corral-weights-{trial.uuid}"
    stays = {  # by who removes it
        "checkpoint": ("master_worker", oldest(directory.checkpoints_path, "step-*/manifest.json")),
        "weights": ("master_worker", oldest(directory.weights_path, "v*/config.json")),
        "spool": ("rollout_worker", oldest(directory.spool_path(0), "record-*")),
        "memory": ("generation_server", oldest(memory, "*/config.json")),
    }
    inodes = {name: path.stat().st_ino for name, (_, path) in stays.items()}
    with immovable(*(path for _, path in stays.values())):
        trial.wait_for_steps(8)
        trial.full_speed()
        trial.wait_for_end()
        check_nothing_is_left(trial)
        check_every_sample_was_consumed_once(trial)
        check_no_token_was_too_old(trial, eta=1)
        for name, (worker, path) in stays.items():
            told = [
                line for line in directory.worker_log(0, worker, 0).read_text().splitlines() if "takes room" in line
            ]
            assert any(path.name in line or path.parent.name in line or str(memory) in line for line in told), name
        doomed = [path for path in MEMORY.glob(".corral-removing-*") if has(path, inodes["memory"])]
        left = {name for name, inode in inodes.items() if has(directory.path, inode) or any(doomed)}
        assert left == stays.keys()
    for path in doomed:
        shutil.rmtree(path)


def oldest(folder: Path, pattern: str) -> Path:
    return min(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def has(folder: Path, inode: int) -> bool:
    return any(path.stat().st_ino == inode for path in folder.rglob("*"))
