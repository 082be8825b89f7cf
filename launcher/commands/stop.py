"""rl-stop: a last checkpoint, then the end."""

from typing import Annotated

import typer

from corral.launcher.commands.common import TRIAL_HELP, Fileroot, run, user_errors


def stop(
    trials: Annotated[list[str], typer.Argument(metavar="TRIAL...", help=TRIAL_HELP)],
    now: Annotated[bool, typer.Option("--now", help="Do not wait for a last checkpoint.")] = False,
    grace: Annotated[float | None, typer.Option("--grace", min=0, help="Seconds to checkpoint in.")] = None,
    fileroot: Fileroot = None,
) -> None:
    """Let trials checkpoint, then stop them; rl-submit --resume continues them."""
    with user_errors():
        from corral.launcher.stop import stop_trial
        from corral.launcher.trials import default_fileroot, find_trial

        found = [find_trial(trial, fileroot or default_fileroot()) for trial in trials]
        for facts in found:
            print(f"stopping {facts.name}" + ("" if now else " after a last checkpoint"), flush=True)
            ended = stop_trial(facts, now=now, grace_s=grace)
            print(f"{facts.name} {ended.state}" + (f": {ended.note}" if ended.note else ""))


def main() -> None:
    """rl-stop"""
    run(stop)
