"""Sweeps up after owners that ended without doing so themselves, on this host: by the records that they have left."""

import os
from pathlib import Path

from corral.experiments.trial.leftovers import records_folder, take
from corral.launcher.trial.processes import kill_session


def sweep() -> list[str]:
    """Ends the processes of dead owners, of whatever trial of this user's, and removes what these have noted.

    Returns:
        The trials, by their ids. Sweeping only gives space back, so that nothing of it is an error.
    """
    swept = []
    for path in _records():
        record = take(path)
        if record is None:
            continue
        if record.head.session:
            kill_session(record.head.session, start_ticks=record.head.start_ticks, trial_uuid=record.head.trial)
        record.remove()
        swept.append(record.head.trial)
    return swept


def _records() -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(records_folder())]
    except OSError:
        return []
