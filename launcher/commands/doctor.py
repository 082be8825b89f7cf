"""rl-doctor: checks whether trials can run here, and names the remedies if not."""

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from corral.experiments.exit_codes import CommandExit
from corral.launcher.commands.common import Fileroot, Output, run

if TYPE_CHECKING:
    from corral.launcher.doctor.look import Finding


def doctor(
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Where the probe runs.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Check only what trials on this machine need.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Submit no probe to the nodes.")] = False,
    output: Annotated[Output, typer.Option("-o", "--output", help="For people, or for programs.")] = "table",
    fileroot: Fileroot = None,
) -> None:
    """Check this machine, the cluster and its nodes: one line each, and what to do."""
    from corral.launcher.doctor.look import judge_commands, look_at_cluster, look_here, render, worst
    from corral.launcher.slurm.client import missing_commands
    from corral.launcher.trial.view import default_fileroot

    root = (fileroot or default_fileroot()).absolute()
    findings: list[Finding] = list(look_here(root))
    is_reachable = True
    missing = [] if local else missing_commands()
    if not local:
        findings.append(judge_commands(missing))
    if not local and not missing:
        is_reachable, seen = look_at_cluster(root, partition=partition, is_quick=quick)
        findings += seen
    print(json.dumps([asdict(one) for one in findings], indent=1) if output == "json" else render(findings))
    if not is_reachable:
        raise typer.Exit(CommandExit.UNREACHABLE)
    if worst(findings) == "fail":
        raise typer.Exit(CommandExit.ERROR)


main = partial(run, doctor)
"""rl-doctor"""
