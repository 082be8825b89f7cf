"""Witnesses of a trial log: files that only an epoch can have written that the log has seen claimed.

    checkpoints/step-00000012-e3-*   weights/v00000012-e3   ledger/3-12-*    and no claim of epoch 3: entries are lost

A log that lost its last entries reads like one that never had them. Going on from it would give the number of a lost
epoch to another one, and a log that is gone altogether would start the trial from scratch, silently.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import CorruptLogError, LogState

_EPOCH_OF_DIRECTORY: Final = re.compile(r"(?:step-|v)\d{8,}-e(?P<epoch>\d+)(?:-[0-9a-f]{8})?", re.ASCII)
_EPOCH_OF_DELTA: Final = re.compile(r"(?P<epoch>\d+)-\d+-[0-9a-f]{8}\.json", re.ASCII)


def read_whole_log(trial: TrialDirectory, log: TrialLog, *, patience_s: float | None = None) -> LogState:
    """What is in `log`, once it is clear that nothing of it is missing.

    Args:
        patience_s: how long a slot that a later one shows to be there may stay hidden by a cache; None: as long as any
            file system may take.

    Raises:
        CorruptLogError: an entry is damaged, or missing, as far as the trial's other files can tell.
    """
    # Files first: an epoch that begins in the meantime is claimed before it writes any.
    seen = max(_epochs_of_files(trial), default=(0, trial.path))
    state = log.read_whole(patience_s=patience_s)
    epoch, witness = seen
    if epoch > state.epoch:
        raise CorruptLogError(
            f"{witness} was written by epoch {epoch}, but the trial log {trial.log_path} ends with slot "
            f"{state.next_slot - 1:08d}, in epoch {state.epoch}: later entries are lost; restore them from a backup, "
            f"or start a new trial from the last good checkpoint"
        )
    return state


def _epochs_of_files(trial: TrialDirectory) -> Iterator[tuple[int, Path]]:
    for folder, pattern in (
        (trial.checkpoints_path, _EPOCH_OF_DIRECTORY),
        (trial.weights_path, _EPOCH_OF_DIRECTORY),
        (trial.ledger_path, _EPOCH_OF_DELTA),
    ):
        for name in os.listdir(folder) if folder.is_dir() else ():
            if match := pattern.fullmatch(name):
                yield int(match["epoch"]), folder / name
