"""Prompts that a trial has dropped for good, and why, as its ledger says."""

import json
from contextlib import suppress
from pathlib import Path

from corral.experiments.trial.directory import TrialDirectory

MAX_COMMITS = 1000
"""That are looked at, the last ones."""


def dropped_prompts(directory: TrialDirectory) -> tuple[dict[str, str], bool]:
    """The reason by uid, of all attempts, the earliest first; and whether these are of the last commits only."""
    deltas = sorted((path for path in directory.ledger_path.glob("*-*-*.json")), key=_epoch_and_step)
    reasons = dict[str, str]()  # those of a commit that was taken back come again
    for path in deltas[-MAX_COMMITS:]:
        with suppress(OSError, ValueError):  # whoever needs the ledger says what is wrong with it
            reasons |= json.loads(path.read_bytes())["dropped"]
    return reasons, len(deltas) > MAX_COMMITS


def _epoch_and_step(delta: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in delta.name.split("-")[:2])
