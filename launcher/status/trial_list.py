"""Which trials there are below a fileroot.

fileroot/*/*/plan.json  --ended long ago, as control/ and the journal's age say--> left out, unless it is asked for
                        --else--> facts of its plan
                        --damaged, or no answer--> what is wrong
"""

import os
import time
from functools import partial
from pathlib import Path

from corral.experiments.trial.attempts import last_attempt, read_end
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.files.lookout import Lookout, Unanswered
from corral.launcher.trial.find import PlanDamagedError, TrialFacts, load_facts

SHOWN_AFTER_END_S = 86400.0
Found = TrialFacts | str | None
"""A trial that is to be read, what is wrong, or None for one that ended long ago."""


def list_trials(
    fileroot: Path, lookout: Lookout[Path], *, with_old: bool, experiment: str | None = None
) -> dict[Path, Found]:
    """The trials below a fileroot, the newest last; folders that do not answer come first.

    Args:
        experiment: the only one that is looked at; None is all.
        with_old: whether those are to be read that ended long ago.

    Raises:
        OSError: if the fileroot cannot be read; a TimeoutError if its file system does not answer.
    """
    experiments = lookout.look({fileroot: partial(_folders, fileroot)})[fileroot]
    if isinstance(experiments, Unanswered):
        raise experiments.error or TimeoutError(experiments.about(fileroot))
    found: dict[Path, tuple[float, Found]] = {}
    paths: list[Path] = []
    wanted = [path for path in experiments if experiment in (None, path.name)]
    for place, folders in lookout.look({path: partial(_folders, path) for path in wanted}).items():
        if isinstance(folders, Unanswered):
            found[place] = 0.0, folders.about(place)
        else:
            paths += folders
    for path, look in lookout.look({path: partial(_look_at, path, with_old=with_old) for path in paths}).items():
        if look is not None:
            found[path] = (0.0, look.about(path)) if isinstance(look, Unanswered) else look
    return {path: found[path][1] for path in sorted(found, key=lambda path: (found[path][0], path))}


def _folders(path: Path) -> list[Path]:
    """What is in a folder; nothing if it is none. Whether these are folders is not asked: that may hang."""
    try:
        return [path / name for name in sorted(os.listdir(path))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _look_at(path: Path, *, with_old: bool) -> tuple[float, Found] | None:
    """When the plan was written, and what a first look finds; None if there is no plan."""
    directory = TrialDirectory(path)
    try:
        created_at = directory.plan_path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not with_old and _ended_long_ago(directory):
        return created_at, None
    try:
        facts = load_facts(directory)
    except PlanDamagedError:
        return created_at, f"its plan.json is damaged; rl-status {path.parent.name}/{path.name} says what to do"
    return None if facts is None else (created_at, facts)


def _ended_long_ago(directory: TrialDirectory) -> bool:
    """Whether its end is on record, and nothing has happened since for a long time."""
    try:
        silent_s = time.time() - directory.journal_path.stat().st_mtime
    except FileNotFoundError:
        return False
    attempt = last_attempt(directory) if silent_s > SHOWN_AFTER_END_S else None
    end = read_end(directory, attempt.attempt) if attempt else None
    return end is not None and end.is_final
