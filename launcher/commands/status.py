"""rl-status: how trials stand."""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from corral.experiments.exit_codes import CommandExit
from corral.launcher.commands.common import (
    TRIAL_HELP,
    Fileroot,
    complete_trial,
    find_in_time,
    run,
    terminal_width,
    wait_for_trial,
    wants_colour,
)

if TYPE_CHECKING:
    from corral.launcher.trial.view import TrialFacts

_REDRAW_S = 5.0
_TRIAL_HELP = f"{TRIAL_HELP} Or an experiment's name: all its trials."
_CHECK_HELP = (
    "Only trouble of one trial: its state, what is wrong besides, alarms and watchers; exit 8 if there is some."
)


def status(
    trial: Annotated[
        str | None, typer.Argument(metavar="TRIAL|EXPERIMENT", help=_TRIAL_HELP, autocompletion=complete_trial)
    ] = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Draw again every five seconds.")] = False,
    show_all: Annotated[bool, typer.Option("-a", "--all", help="Trials that ended long ago, too.")] = False,
    output: Annotated[
        Literal["table", "wide", "json", "name"],
        typer.Option("-o", "--output", help="wide: a row per worker; name: for a shell's loop."),
    ] = "table",
    explain: Annotated[bool, typer.Option("--explain", help="The facts behind each word.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Show the progress of one trial until it has ended.")] = False,
    check: Annotated[bool, typer.Option("--check", help=_CHECK_HELP)] = False,
    fileroot: Fileroot = None,
) -> None:
    """Show how trials stand: one row each, or one trial by its groups."""
    from corral.experiments.trial.directory import list_names
    from corral.launcher.files.file_thread import PatientFiles
    from corral.launcher.trial.view import TrialNotFoundError, default_fileroot

    root = fileroot or default_fileroot()
    facts, experiment, missing = None, None, None
    try:
        facts = find_in_time(PatientFiles(), trial, root) if trial is not None else None
    except TrialNotFoundError as error:
        if wait or check:
            raise
        experiment, missing = (trial, None) if trial in list_names(root) else (None, error)
    if wait:
        if trial is None or facts is None:
            raise typer.BadParameter("--wait needs the name of one trial")
        wait_for_trial(facts, trial)
        return
    if check:
        if facts is None:
            raise typer.BadParameter("--check needs the name of one trial")
        _check(facts)
        return
    from corral.launcher.status.page import StatusPage

    page = StatusPage(
        root,
        experiment=experiment,
        output=output,
        show_all=show_all,
        explain=explain,
        colour=wants_colour(),
        width=terminal_width(),
    )
    if missing is not None:
        if trial is None or not (rows := page.trial_without_folder(trial)):
            raise missing
        print(rows)
        return
    look = page.all_trials if facts is None else partial(page.one_trial, facts)
    if facts is not None and output in ("table", "wide"):
        look = partial(_with_times, look, facts, most=None if explain else 1)
    if watch:
        _redraw(look)
    else:
        print(look())


def _with_times(look: Callable[[], str], facts: "TrialFacts", *, most: int | None) -> str:
    """The page, and below it where the time of the last steps went: `most` sentences, the largest share first."""
    from corral.launcher.files.file_thread import PatientFiles
    from corral.launcher.terminal import fold
    from corral.launcher.timeline.sentence import describe_latest_steps

    try:
        sentences = PatientFiles().run(lambda: describe_latest_steps(facts), facts.directory.timeline_path)
    except TimeoutError as error:
        sentences = [str(error)]
    return "\n".join([look(), *(fold(f"time       {line}", terminal_width()) for line in sentences[:most])])


def _check(facts: "TrialFacts") -> None:
    from corral.launcher.status.reader import polite_reader
    from corral.launcher.terminal import printable
    from corral.launcher.trial.words import IN_TROUBLE

    (status,) = polite_reader().read([facts])
    found = [*(finding for finding in status.findings if finding.is_alarm), *status.watch]
    sentences = [f"{status.state}: {status.cause}"] if status.state in IN_TROUBLE else []
    sentences += status.troubles
    sentences += [f"step {finding.step}: {finding.text}; {finding.details}" for finding in found]
    for line in sentences:
        print(printable(line))
    if sentences:
        raise typer.Exit(CommandExit.SUFFERS)


def _redraw(look: Callable[[], str]) -> None:
    from rich.live import Live
    from rich.text import Text

    try:
        with Live(Text.from_ansi(look()), auto_refresh=False) as live:
            while True:
                time.sleep(_REDRAW_S)
                live.update(Text.from_ansi(look()), refresh=True)
    except KeyboardInterrupt:
        return


main = partial(run, status)
"""rl-status"""
