"""rl-status: how trials stand."""

import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer

from corral.launcher.commands.common import TRIAL_HELP, Fileroot, run, user_errors, wait_for_trial


def status(
    trial: Annotated[str | None, typer.Argument(help=TRIAL_HELP)] = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Draw again every two seconds.")] = False,
    output: Annotated[str, typer.Option("-o", "--output", help="table or json.")] = "table",
    wait: Annotated[bool, typer.Option("--wait", help="Show the progress of one trial until it has ended.")] = False,
    fileroot: Fileroot = None,
) -> None:
    """Show how trials stand: one row each, or one trial with all its workers."""
    with user_errors():
        from corral.launcher.status_reader import StatusReader
        from corral.launcher.status_view import render_json, render_trial, render_trials
        from corral.launcher.trials import default_fileroot, find_trial, list_trials

        if output not in ("table", "json"):
            raise typer.BadParameter(f"-o is table or json, not {output!r}")
        root, reader, colour = fileroot or default_fileroot(), StatusReader(), sys.stdout.isatty()
        if wait:
            if trial is None:
                raise typer.BadParameter("--wait needs the name of one trial")
            wait_for_trial(find_trial(trial, root), trial)
            return

        def look() -> str:
            if trial is None:
                statuses = reader.read(list_trials(root))
                return render_json(statuses) if output == "json" else render_trials(statuses, colour=colour)
            statuses = reader.read([find_trial(trial, root)])
            return render_json(statuses) if output == "json" else render_trial(statuses[0], colour=colour)

        if watch:
            _redraw(look)
        else:
            print(look())


def _redraw(look: Callable[[], str]) -> None:
    from rich.live import Live
    from rich.text import Text

    try:
        with Live(Text.from_ansi(look()), auto_refresh=False) as live:
            while True:
                time.sleep(2.0)
                live.update(Text.from_ansi(look()), refresh=True)
    except KeyboardInterrupt:
        return


def main() -> None:
    """rl-status"""
    run(status)
