"""rl-submit: an experiment file becomes a trial, on SLURM or on this machine."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from corral.experiments.exit_codes import CommandExit
from corral.experiments.trial.login_shell import leave_login_shell
from corral.launcher.commands.common import Fileroot, fail, leaving, run, terminal_width, wait_for_trial
from corral.scheduling.scheduling import AskedLayout

if TYPE_CHECKING:
    from corral.launcher.submit.preflight import ClusterShape
    from corral.launcher.submit.prepare import Submission
    from corral.launcher.trial.view import TrialFacts


_NAME_TRIES = 100  # of as many who submit at the same time, the last one needs as many


DryRun = Annotated[
    Literal["plan", "script", "graph", "prompts"] | None,
    typer.Option(
        "--dry-run",
        help="Check and show the plan, or print the batch script (=script); or, without asking the cluster, the "
        "dataflow graph as a Mermaid chart (=graph) or the first rows as the model will see them (=prompts). "
        "Write nothing.",
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        "--shape",
        metavar="NODESxGPUSxMEMORY",
        help="With --dry-run: plan for a cluster that need not be there, such as 4x8x80G.",
    ),
]


def submit(
    experiment: Annotated[Path | None, typer.Argument(metavar="EXPERIMENT", help="The experiment file (YAML).")] = None,
    trial: Annotated[
        str | None, typer.Option("-n", "--trial", metavar="NAME", help="Name of the trial; default trial-N.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("-s", "--set", metavar="KEY=VALUE", help="key.path=value, over the file's.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="PROFILE", help="Name or path of a profile beneath the experiment file.")
    ] = None,
    layout: Annotated[AskedLayout | None, typer.Option(help="As launch.layout.")] = None,
    sbatch_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Further option of sbatch, as --licenses=a:1; repeatable."),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Run on this machine, without SLURM.")] = False,
    dry_run: DryRun = None,
    shape: Shape = None,
    no_checks: Annotated[
        bool,
        typer.Option("--no-checks", help="Submit without looking at the cluster, and try none of your functions."),
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Show progress until the trial has ended.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Print what the workers print until it has ended.")] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="TRIAL", help="Continue this trial from its last commit; -s allocation=... moves it."),
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the call of sbatch.")] = False,
    fileroot: Fileroot = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of experiment files, for editors, and do no more.")
    ] = False,
) -> None:
    """Start a trial of an experiment, on SLURM or on this machine."""
    if schema:
        from corral.experiments.registry import schema_text

        print(schema_text())
        return
    from corral.launcher.trial.processes import sweep

    leave_login_shell()  # what is tried here of the user's code takes CPU time, and may ask a model on this machine
    _check_together(wait=wait, follow=follow, no_checks=no_checks, local=local)
    sweep()  # what an rl-submit left that was killed
    cluster_shape = _cluster_shape(shape, is_dry=dry_run is not None, local=local, resumes=resume is not None)
    if resume is not None:
        unfit: dict[str, object] = {str(experiment): experiment, "-n": trial, "--profile": profile}
        unfit |= {"--layout": layout, "--sbatch-arg": sbatch_arg, "--local": local}
        prepare = partial(_prepared_resume, resume, fileroot, override or [], unfit=unfit)
    elif experiment is None:
        raise typer.BadParameter("name an experiment file, or a trial to --resume")
    else:
        from corral.launcher.submit.prepare import prepare as prepare_trial

        _check_working_folder()
        prepare = partial(
            prepare_trial,
            experiment,
            _changes(override, fileroot=fileroot, layout=layout),
            trial_name=trial,
            mode="local" if local else "slurm",
            shape=cluster_shape,
            has_place=dry_run not in ("graph", "prompts"),
            profile=profile,
            sbatch_arguments=sbatch_arg or [],
        )
    submission = prepare(has_checks=not no_checks)
    if dry_run not in (None, "plan"):
        {"script": _print_script, "graph": _print_graph, "prompts": _print_prompts}[dry_run](submission)
        return
    _print_plan(submission, sys.stdout)
    if dry_run is None:
        if resume is None:
            submission = create_under_a_free_name(submission, partial(prepare, has_checks=not no_checks))
        _start(submission, is_resumed=resume is not None, wait=wait, follow=follow, verbose=verbose)


def _check_together(*, wait: bool, follow: bool, no_checks: bool, local: bool) -> None:
    """typer.BadParameter for options of which one makes the other pointless."""
    if wait and follow:
        raise typer.BadParameter("--follow waits too; choose one of --wait and --follow")
    if no_checks and local:
        raise typer.BadParameter("--no-checks is about a cluster; with --local there is none")


def _check_working_folder() -> None:
    """ConfigError if paths relative to the current directory lead nowhere."""
    from corral.experiments.errors import ConfigError

    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError.of(
            f"the folder that rl-submit was started in is not there any more ({error.strerror})",
            hint="cd to one that is, and submit again",
        ) from error


def _cluster_shape(text: str | None, *, is_dry: bool, local: bool, resumes: bool) -> "ClusterShape | None":
    if text is None:
        return None
    if not is_dry:
        raise typer.BadParameter("--shape imagines a cluster, on which nothing can run; add --dry-run")
    if local or resumes:
        raise typer.BadParameter("--shape plans a new trial for a cluster; leave --local and --resume out")
    from corral.launcher.submit.preflight import ClusterShape

    return ClusterShape.parse(text)


def create_under_a_free_name(submission: "Submission", prepare: "Callable[..., Submission]") -> "Submission":
    """The submission whose directory was made: another one where somebody else took a name that nobody chose.

    Args:
        prepare: plans the trial under the next free name, with code that has been tried.
    """
    from corral.launcher.submit.prepare import NameTakenError
    from corral.launcher.submit.start import create

    for tries_left in reversed(range(_NAME_TRIES)):
        try:
            create(submission)
            break
        except NameTakenError:
            if not submission.has_default_name or not tries_left:
                raise
        taken, submission = submission.plan.trial.trial, prepare(code=submission.code)
        print(f"{taken} was taken in the meantime; this trial is {submission.plan.trial.trial}", flush=True)
    return submission


def _changes(overrides: Sequence[str] | None, *, fileroot: Path | None, layout: AskedLayout | None) -> list[str]:
    """Options that stand for a key of the experiment file, after the overrides."""
    import yaml

    changes = list(overrides or [])
    if fileroot is not None:
        # In quotes it is text whatever it looks like, and what would be a line's end to YAML is written as its code.
        quoted = yaml.safe_dump(str(fileroot.absolute()), default_style='"', width=float("inf"), allow_unicode=True)
        changes.append(f"cluster.fileroot={quoted.strip()}")
    if layout is not None:
        changes.append(f"launch.layout={layout}")
    return changes


def _prepared_resume(
    name: str, fileroot: Path | None, overrides: Sequence[str], *, unfit: Mapping[str, object], has_checks: bool
) -> "Submission":
    from corral.launcher.submit.prepare import AlreadyCompleteError, prepare_resume
    from corral.launcher.trial.view import default_fileroot, find_trial

    keys = [override.partition("=")[0] for override in overrides]
    others = [name for name, value in unfit.items() if value]
    others += [*(f"-s {key}" for key in keys if key != "allocation"), *(["-s twice"] if len(keys) > 1 else [])]
    if others:
        raise typer.BadParameter(
            f"--resume continues a trial where and as it was planned; leave out {', '.join(others)}: of all "
            "settings only one -s allocation=NEW may go with it"
        )
    allocation = overrides[0].partition("=")[2] if overrides else None
    try:
        facts = find_trial(name, fileroot or default_fileroot())
        return prepare_resume(facts, allocation=allocation, has_checks=has_checks)
    except AlreadyCompleteError as complete:
        print(complete)
        raise typer.Exit(0) from None


def _print_plan(submission: "Submission", out: TextIO) -> None:
    from corral.experiments.errors import display_path
    from corral.launcher.submit.memory_plan import gpu_uses, render_memory
    from corral.launcher.submit.plan_text import THIS_MACHINE, render_layout, render_plan
    from corral.launcher.terminal import fold

    here = THIS_MACHINE if submission.plan.mode == "local" else ("nodes      not planned",)
    nodes = render_layout(submission.layout) if submission.layout else here
    width = terminal_width(out)
    print(fold(render_plan(submission.plan, nodes=nodes), width), file=out)
    if uses := gpu_uses(submission.plan):
        print(fold(f"\n{render_memory(uses, gpu_memory_mb=submission.plan.cluster.gpu_memory)}", width), file=out)
    if submission.warnings:
        print(file=out)
    for warning in submission.warnings:
        print(fold(f"warning:   {warning}", width), file=out)
    print(f"\nchecks     {' - '.join(submission.checks)}", file=out, flush=True)
    for number, file in enumerate(submission.profiles):
        print(f"{'' if number else 'profiles':<9}  {display_path(file)}", file=out, flush=True)


def _print_script(submission: "Submission") -> None:
    """The bytes that sbatch would get, and nothing else, on stdout."""
    from corral.launcher.submit.start import script_of

    script = script_of(submission)
    if script is None:
        raise typer.BadParameter("--dry-run=script shows what SLURM gets; with --local there is no script")
    _print_plan(submission, sys.stderr)
    sys.stdout.flush()
    sys.stdout.buffer.write(script)
    sys.stdout.buffer.flush()


def _print_graph(submission: "Submission") -> None:
    """The chart, and nothing else, on stdout."""
    from corral.launcher.page.graph import graph_of, render_mermaid

    _print_plan(submission, sys.stderr)
    master = submission.plan.master
    graph = graph_of(master.step_plan, samples=master.samples_from, published_to=master.weights_go_to)
    print(render_mermaid(graph), flush=True)


def _print_prompts(submission: "Submission") -> None:
    from rich.console import Console

    from corral.launcher.submit.prompts_text import print_prompts

    for warning in submission.warnings:
        print(f"warning:   {warning}", file=sys.stderr)
    print_prompts(submission.plan, Console(highlight=False))


def _start(submission: "Submission", *, is_resumed: bool, wait: bool, follow: bool, verbose: bool) -> None:
    from corral.experiments.errors import display_path
    from corral.experiments.trial.mode import has_jobs
    from corral.launcher.submit.start import start
    from corral.launcher.trial.view import default_fileroot, read_facts

    identifier = start(submission, resume=is_resumed)
    plan = submission.plan
    if not has_jobs(plan.mode):
        print(f"started    supervisor {identifier} on this machine; it goes on when this terminal closes")
    else:
        print(f"job        {identifier}   {display_path(submission.directory.sbatch_path)}")
    if verbose and submission.layout is not None:
        from corral.launcher.slurm.sbatch import submission_command

        print(f"command    {submission_command(submission.directory)}")
    is_default = submission.directory.path.parent.parent == default_fileroot().absolute()
    name = f"{plan.trial.experiment}/{plan.trial.trial}" if is_default else shlex.quote(str(submission.directory.path))
    print(f"next       rl-status {name}\n           rl-logs {name} -f\n           rl-stop {name}", flush=True)
    if not wait and not follow:
        return
    facts = read_facts(submission.directory)
    if facts is None:
        fail(f"{submission.directory.plan_path} cannot be read any more", CommandExit.ERROR)
    if follow:
        _follow(facts, name)
    wait_for_trial(facts, name)


def _follow(facts: "TrialFacts", name: str) -> None:
    """Prints the workers' lines from the first one of this attempt on, until the trial has ended."""
    from corral.experiments.trial.attempts import last_attempt
    from corral.launcher.follow import follow_trial, logs_before
    from corral.launcher.logs.files import LinePrinter, LogFinder

    attempt = last_attempt(facts.directory)
    read_before = logs_before(facts.directory, attempt.attempt if attempt else 0)
    with leaving(f"the trial keeps running; rl-stop {name} ends it, rl-logs {name} -f shows it"):
        follow_trial(facts, LogFinder(facts.directory, []), LinePrinter(), read_before=read_before)


def normalise(arguments: Sequence[str]) -> list[str]:
    """`--dry-run` alone means `--dry-run=plan`: the parser knows no option whose value may be left out."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    options = ["--dry-run=plan" if argument == "--dry-run" else argument for argument in arguments[:end]]
    return [*options, *arguments[end:]]


def main() -> None:
    """rl-submit"""
    run(submit, normalise(sys.argv[1:]))
