"""rl-view: trials as a page, in a file or as it grows."""

import asyncio
import socket
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from corral.launcher.commands.common import FILEROOT_HELP, TRIAL_HELP, complete_trial, leaving, run, write_output

_TRIALS_HELP = f"{TRIAL_HELP} Or a folder with trials in it. Without any: all trials of the file root."
_PORT_HELP = "Port to serve it at; 0 is one that is free."


def view(
    trials: Annotated[
        list[str] | None, typer.Argument(metavar="TRIAL|FOLDER...", help=_TRIALS_HELP, autocompletion=complete_trial)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the page, as it is now, into a file.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help=_PORT_HELP)] = 0,
    fileroot: Annotated[Path | None, typer.Option(metavar="DIR", help=FILEROOT_HELP)] = None,
) -> None:
    """Show trials as a page: curves, answers, where time goes, events, settings; several beside each other."""
    from corral.launcher.page.server import PageServer
    from corral.launcher.page.view import TrialViews, choose_trials, render_page
    from corral.launcher.trial.view import default_fileroot

    facts, left_out = choose_trials(trials or [], fileroot or default_fileroot())
    title = facts[0].name if len(facts) == 1 else f"{len(facts)} trials"
    views = TrialViews(facts, left_out=left_out)
    if output is not None:
        write_output("-o", output, render_page(views.data(), title=title))
        print(f"page       {output}")
        return
    with leaving("(nothing of the trials has changed)"):
        asyncio.run(PageServer(views.data, title=title).serve(_tell, port=port))


def _tell(address: str, port: int) -> None:
    print(f"page       {address}")
    print(f"elsewhere  ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}    on that machine, then the same address")
    print("Ctrl-C ends it. The address is a key: anyone who has it and reaches this host sees the page.", flush=True)


main = partial(run, view)
"""rl-view"""
