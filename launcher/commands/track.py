"""rl-track: a trial's numbers, to where people look at those of all their runs."""

import os
import sys
import time
from typing import Annotated

import typer

from corral.launcher.commands.common import TRIAL_HELP, Fileroot, find_in_time, leaving, run, user_errors
from corral.launcher.commands.completion import complete_trial

_LOOK_S = 2.0
_TO_HELP = "tensorboard, or the import path of a tracker of your own."


def track(
    trial: Annotated[str, typer.Argument(metavar="TRIAL", help=TRIAL_HELP, autocompletion=complete_trial)],
    to: Annotated[str, typer.Option("--to", metavar="TRACKER", help=_TO_HELP)] = "tensorboard",
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Until the trial has been trained to its end.")
    ] = False,
    fileroot: Fileroot = None,
) -> None:
    """Hand a trial's numbers to a tracker, each train step and evaluation once."""
    with user_errors():
        from corral.launcher.files.patient_files import PatientFiles
        from corral.launcher.tracking.lines import CommittedLines
        from corral.launcher.tracking.trackers import tracker_named
        from corral.launcher.trial.find import default_fileroot

        sys.path.insert(0, os.getcwd())
        make, files = tracker_named(to), PatientFiles()
        facts = find_in_time(files, trial, fileroot or default_fileroot())
        folder = facts.directory.path / "tracking" / to.replace(":", ".")
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        lines, tracker, num_lines = CommittedLines(facts.directory), make(folder, facts.name), 0
        with leaving(f"(the trial goes on; rl-track {facts.name} begins anew)"):
            while True:
                new = files.run(lambda: list(lines.new()), facts.directory.path)
                if lines.begins_anew:
                    tracker.close()
                    tracker, num_lines = make(folder, facts.name), 0
                for line in new:
                    values = {name: float(value) for name, value in line.items() if _is_metric(name, value)}
                    tracker.add(int(line["step"]), float(line["time"]), values)
                    num_lines += 1
                tracker.flush()
                if lines.is_done or not follow:
                    break
                time.sleep(_LOOK_S)
        tracker.close()
        print(f"{num_lines} lines of {facts.name} to {to}, in {folder}")


def _is_metric(name: str, value: object) -> bool:
    return name not in ("step", "time") and isinstance(value, int | float)


def main() -> None:
    """rl-track"""
    run(track)
