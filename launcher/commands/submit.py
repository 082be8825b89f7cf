"""rl-submit: an experiment file becomes a trial, on SLURM or on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corral.launcher.commands.common import EXIT_ERROR, Fileroot, fail, run, user_errors, wait_for_trial

if TYPE_CHECKING:
    from corral.launcher.submit import Submission


def submit(
    experiment: Annotated[Path | None, typer.Argument(help="The experiment file (YAML).")] = None,
    trial: Annotated[str | None, typer.Option("-n", "--trial", help="Name of the trial; default trial-N.")] = None,
    override: Annotated[list[str] | None, typer.Option("-s", "--set", help="key.path=value, over the file's.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Run on this machine, without SLURM.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and show the plan; write nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Show progress until the trial has ended.")] = False,
    resume: Annotated[str | None, typer.Option("--resume", help="Continue this trial from its last commit.")] = None,
    fileroot: Fileroot = None,
) -> None:
    """Start a trial of an experiment, on SLURM or on this machine."""
    with user_errors():
        if resume is not None:
            _resume(resume, fileroot, dry_run=dry_run, wait=wait, other_options=bool(experiment or trial or override))
            return
        if experiment is None:
            raise typer.BadParameter("name an experiment file, or a trial to --resume")
        from corral.launcher.submit import create, prepare, start

        overrides = list(override or [])
        if fileroot is not None:
            overrides.append(f"cluster.fileroot={fileroot.absolute()}")
        submission = prepare(experiment, overrides, trial_name=trial, mode="local" if local else "slurm")
        _print_plan(submission)
        if dry_run:
            return
        create(submission)
        identifier = start(submission)
        _after_start(submission, identifier, wait=wait)


def _resume(name: str, fileroot: Path | None, *, dry_run: bool, wait: bool, other_options: bool) -> None:
    from corral.launcher.submit import prepare_resume, start
    from corral.launcher.trials import default_fileroot, find_trial

    if other_options:
        raise typer.BadParameter("--resume continues a trial as it was planned; it takes no experiment, name or -s")
    submission = prepare_resume(find_trial(name, fileroot or default_fileroot()))
    _print_plan(submission)
    if not dry_run:
        _after_start(submission, start(submission, resume=True), wait=wait)


def _print_plan(submission: "Submission") -> None:
    from corral.experiments.render import THIS_MACHINE, render_plan
    from corral.launcher.layout_view import render_layout

    nodes = render_layout(submission.layout) if submission.layout else THIS_MACHINE
    print(render_plan(submission.plan, nodes=nodes, warnings=submission.warnings))
    print(f"\nchecks     {' - '.join(submission.checks)}", flush=True)


def _after_start(submission: "Submission", identifier: str, *, wait: bool) -> None:
    from corral.launcher.trials import default_fileroot

    plan = submission.plan
    if plan.mode == "local":
        print(f"started    supervisor {identifier} on this machine; it goes on when this terminal closes")
    else:
        print(f"job        {identifier}   {submission.directory.sbatch_path}")
    is_default = submission.directory.path.parent.parent == default_fileroot().absolute()
    name = f"{plan.trial.experiment}/{plan.trial.trial}" if is_default else str(submission.directory.path)
    print(f"next       rl-status {name}\n           rl-logs {name} -f\n           rl-stop {name}", flush=True)
    if wait:
        from corral.launcher.trials import read_facts

        facts = read_facts(submission.directory)
        if facts is None:
            fail(f"{submission.directory.plan_path} cannot be read any more", EXIT_ERROR)
        wait_for_trial(facts, name)


def main() -> None:
    """rl-submit"""
    run(submit)
