"""Which trials a page is about: from what a user types, names and folders, to directories."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from corral.experiments.errors import ConfigError
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.files.patient_files import PatientFiles
from corral.launcher.trial.find import TrialFacts, find_trial, read_facts

_MOST = 50


def choose_trials(arguments: Sequence[str], fileroot: Path) -> tuple[list[TrialFacts], int]:
    """The trials that are meant, the newest last, and how many older ones have no room beside them.

    Args:
        arguments: trials, and folders with trials in them; without any the fileroot is one.

    Raises:
        ConfigError: if a folder has none, or cannot be read.
        TimeoutError: if a file system does not answer.
        TrialNotFoundError, PlanDamagedError: see `find_trial`.
    """
    files = PatientFiles()
    chosen: dict[Path, TrialFacts] = {}
    for argument in arguments or [str(fileroot.absolute())]:
        place = Path(os.path.expanduser(argument))
        try:
            found = files.run(partial(_find, argument, place, fileroot), place)
        except TimeoutError:
            raise
        except OSError as error:
            hint = "trials are private to their owners; ask whose it is for a page: rl-view TRIAL -o FILE"
            raise ConfigError.of(f"{error.filename or place} cannot be read: {error.strerror}", hint=hint) from error
        chosen |= {facts.directory.path: facts for facts in found}
    newest = list(chosen.values())[-_MOST:]
    return newest, len(chosen) - len(newest)


def _find(argument: str, place: Path, fileroot: Path) -> list[TrialFacts]:
    is_path = os.sep in argument or argument.startswith((".", "~"))
    if not is_path or not place.is_dir() or (place / "plan.json").exists():
        return [find_trial(argument, fileroot)]
    os.listdir(place)  # a glob passes over what may not be read
    plans = [plan for pattern in ("*/plan.json", "*/*/plan.json") for plan in place.glob(pattern)]
    plans.sort(key=lambda plan: plan.stat().st_mtime)
    if found := [facts for plan in plans if (facts := read_facts(TrialDirectory(Path(os.path.realpath(plan.parent)))))]:
        return found
    hint = "a folder of trials is a file root, or an experiment's folder in it; rl-status lists trials"
    raise ConfigError.of(f"{place} has no trials in it", hint=hint)
