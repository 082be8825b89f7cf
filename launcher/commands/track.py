"""rl-track: a trial's numbers, to where people look at those of all their runs."""

import time
from functools import partial
from typing import Annotated

import typer

from corral.launcher.commands.common import TRIAL_HELP, Fileroot, complete_trial, find_in_time, leaving, run

_TO_HELP = "tensorboard, wandb, mlflow, prometheus, or the import path of a tracker of your own."


def track(
    trial: Annotated[str, typer.Argument(metavar="TRIAL", help=TRIAL_HELP, autocompletion=complete_trial)],
    to: Annotated[str, typer.Option(metavar="TRACKER", help=_TO_HELP)] = "tensorboard",
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Until the trial has been trained to its end.")
    ] = False,
    fileroot: Fileroot = None,
) -> None:
    """Hand a trial's numbers to a tracker, each train step and evaluation once."""
    from corral.experiments.inputs.users_process import add_users_root
    from corral.launcher.files.file_thread import PatientFiles
    from corral.launcher.tracking.tracker import TrackedTrial
    from corral.launcher.tracking.trackers import hand_on
    from corral.launcher.trial.view import default_fileroot

    add_users_root()
    files = PatientFiles()
    facts = find_in_time(files, trial, fileroot or default_fileroot())
    tracked = files.run(lambda: TrackedTrial.of(facts.directory), facts.directory.plan_path)

    def wait(timeout_s: float) -> bool:
        if follow:
            time.sleep(timeout_s)
        return follow

    with leaving(f"(the trial goes on; rl-track {facts.name} begins anew)"):
        num_lines = hand_on(tracked, to, wait=wait, files=files)
        print(f"{num_lines} lines of {facts.name} to {to}")


main = partial(run, track)
"""rl-track"""
