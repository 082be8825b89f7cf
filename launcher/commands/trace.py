"""rl-trace: when each worker did what, and where the time of train steps went."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from corral.launcher.commands.common import TRIAL_HELP, Fileroot, complete_trial, find_in_time, run, write_output

_STEPS_HELP = "A train step, a span such as 40:44, latest, or all."
_OUTPUT_HELP = (
    "Write when each worker did what there, for ui.perfetto.dev; a trial's folder is private, and so is this."
)


def trace(
    trial: Annotated[str, typer.Argument(metavar="TRIAL", help=TRIAL_HELP, autocompletion=complete_trial)],
    steps: Annotated[str, typer.Option(metavar="STEPS", help=f"{_STEPS_HELP} Default: the last 20.")] = "",
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help=_OUTPUT_HELP)] = None,
    fileroot: Fileroot = None,
) -> None:
    """Say where the time of train steps went, and what would change that; or write their timeline."""
    from corral.experiments.errors import ConfigError
    from corral.launcher.files.file_thread import PatientFiles
    from corral.launcher.timeline.reader import spans_of, steps_of, trace_of
    from corral.launcher.timeline.sentence import LATEST_STEPS, describe_steps
    from corral.launcher.trial.view import chosen_steps, default_fileroot

    files = PatientFiles()
    facts = find_in_time(files, trial, fileroot or default_fileroot())
    folder = facts.directory.timeline_path
    if not (there := files.run(lambda: steps_of(folder), folder)):
        hint = "the first part of it is there after the first train step"
        raise ConfigError.of("this trial has kept no timeline", hint=hint)
    chosen = chosen_steps(
        steps or f"{max(0, max(there) - LATEST_STEPS + 1)}:",
        there,
        option="--steps",
        limit="the 16 MB of each worker",
    )
    spans = files.run(lambda: spans_of(folder, chosen), folder)
    if output is None:
        print("\n".join(files.run(lambda: describe_steps(spans, facts), folder)))
        return
    write_output("-o", output, json.dumps(trace_of(spans)).encode())
    print(
        f"{output}: {len(spans)} spans of steps {chosen[0]} to {chosen[-1]}; open it in ui.perfetto.dev",
        file=sys.stderr,
    )


main = partial(run, trace)
"""rl-trace"""
