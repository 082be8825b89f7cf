"""The commands: rl-submit, rl-status, rl-stop, rl-logs. Each imports what it needs when it runs, so it answers at once.

Exit codes: 0 ok, 1 unexpected, 2 bad configuration or usage, 3 no such trial, 4 cluster unreachable, 5 SLURM refuses,
6 the trial failed (--wait), 7 it was stopped (--wait)
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from corral.launcher.submit import Submission
    from corral.launcher.trials import TrialFacts

EXIT_ERROR = 1
EXIT_BAD_CONFIGURATION = 2
EXIT_NOT_FOUND = 3
EXIT_UNREACHABLE = 4
EXIT_REFUSED = 5

_FILEROOT_HELP = "Folder of the trials; default $CORRAL_FILEROOT, else ~/corral."
_TRIAL_HELP = "A trial's name, experiment/trial, or the path of its directory."
Fileroot = Annotated[Path | None, typer.Option("--fileroot", help=_FILEROOT_HELP)]


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
    with _errors():
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


def status(
    trial: Annotated[str | None, typer.Argument(help=_TRIAL_HELP)] = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Draw again every two seconds.")] = False,
    output: Annotated[str, typer.Option("-o", "--output", help="table or json.")] = "table",
    wait: Annotated[bool, typer.Option("--wait", help="Show the progress of one trial until it has ended.")] = False,
    fileroot: Fileroot = None,
) -> None:
    """Show how trials stand: one row each, or one trial with all its workers."""
    with _errors():
        from corral.launcher.status_reader import StatusReader
        from corral.launcher.status_view import render_json, render_trial, render_trials
        from corral.launcher.trials import default_fileroot, find_trial, list_trials

        if output not in ("table", "json"):
            raise typer.BadParameter(f"-o is table or json, not {output!r}")
        root, reader, colour = fileroot or default_fileroot(), StatusReader(), sys.stdout.isatty()
        if wait:
            if trial is None:
                raise typer.BadParameter("--wait needs the name of one trial")
            _wait(find_trial(trial, root), trial)
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


def stop(
    trials: Annotated[list[str], typer.Argument(metavar="TRIAL...", help=_TRIAL_HELP)],
    now: Annotated[bool, typer.Option("--now", help="Do not wait for a last checkpoint.")] = False,
    grace: Annotated[float | None, typer.Option("--grace", min=0, help="Seconds to checkpoint in.")] = None,
    fileroot: Fileroot = None,
) -> None:
    """Let trials checkpoint, then stop them; rl-submit --resume continues them."""
    with _errors():
        from corral.launcher.stop import stop_trial
        from corral.launcher.trials import default_fileroot, find_trial

        found = [find_trial(trial, fileroot or default_fileroot()) for trial in trials]
        for facts in found:
            print(f"stopping {facts.name}" + ("" if now else " after a last checkpoint"), flush=True)
            ended = stop_trial(facts, now=now, grace_s=grace)
            print(f"{facts.name} {ended.state}" + (f": {ended.note}" if ended.note else ""))


def logs(
    trial: Annotated[str, typer.Argument(help=_TRIAL_HELP)],
    workers: Annotated[list[str] | None, typer.Argument(help="kind or kind/index; default all.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on printing what is written.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Last lines of each worker.")] = 100,
    attempt: Annotated[str | None, typer.Option("--attempt", help="A number, or all; default the last.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The first failure, and what followed it.")] = False,
    path: Annotated[bool, typer.Option("--path", help="Print the files' paths only.")] = False,
    fileroot: Fileroot = None,
) -> None:
    """Show what a trial's workers print."""
    with _errors():
        from corral.launcher.logs import NoLogsError, describe_failures, find_logs, print_tails
        from corral.launcher.trials import default_fileroot, find_trial

        facts = find_trial(trial, fileroot or default_fileroot())
        try:
            if errors:
                number = int(attempt) if attempt and attempt.isdigit() else None
                print(describe_failures(facts.directory, attempt=number))
                return
            files = find_logs(facts.directory, workers or [], attempt=attempt)
            if path:
                print("\n".join(str(file.path) for file in files))
                return
            print_tails(files, lines, print)
            if follow:
                _follow(facts, workers or [], attempt)
        except NoLogsError as error:
            _fail(str(error), EXIT_NOT_FOUND)


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
    from corral.experiments.render import render_plan

    print(render_plan(submission.plan, warnings=submission.warnings))
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
            _fail(f"{submission.directory.plan_path} cannot be read any more", EXIT_ERROR)
        _wait(facts, name)


def _wait(facts: "TrialFacts", name: str) -> None:
    from corral.launcher.progress import exit_code, wait_for_end

    try:
        ended = wait_for_end(facts)
    except KeyboardInterrupt:
        print(f"\nthe trial keeps running; rl-stop {name} ends it, rl-status {name} -w shows it")
        raise typer.Exit(0) from None
    code = exit_code(ended)
    print(f"{facts.name} {ended.state}" + (f": {ended.note}" if ended.note else ""))
    if (facts.directory.report_path / "curves.png").exists():
        print(f"report     {facts.directory.report_path / 'curves.png'}")
    if code:
        print(f"see        rl-logs {name} --errors", file=sys.stderr)
        raise typer.Exit(code)


def _follow(facts: "TrialFacts", workers: list[str], attempt: str | None) -> None:
    from corral.launcher.logs import find_logs, follow
    from corral.launcher.status_reader import StatusReader

    reader = StatusReader()
    last_look = [0.0, False]

    def has_ended() -> bool:
        if time.monotonic() - last_look[0] > 2.0:
            last_look[:] = [time.monotonic(), reader.read([facts])[0].is_final]
        return bool(last_look[1])

    try:
        follow(
            lambda: find_logs(facts.directory, workers, attempt=attempt),
            lambda line: print(line, flush=True),
            has_ended=has_ended,
        )
    except KeyboardInterrupt:
        print(f"(the trial keeps running; rl-stop {facts.name} ends it)")


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


@contextmanager
def _errors() -> Iterator[None]:
    """Turns what a user can mend into a message and an exit code; anything else is a bug and shows itself."""
    from corral.experiments.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(EXIT_BAD_CONFIGURATION) from None
    except (LookupError, RuntimeError, OSError) as error:
        code = _exit_code_of(error)
        if code is None:
            raise
        _fail(str(error), code)


def _exit_code_of(error: Exception) -> int | None:
    from corral.launcher.slurm import SlurmError, SlurmUnreachableError
    from corral.launcher.submit import SubmissionError
    from corral.launcher.trials import TrialNotFoundError

    if isinstance(error, TrialNotFoundError):
        return EXIT_NOT_FOUND
    if isinstance(error, SlurmUnreachableError):
        return EXIT_UNREACHABLE
    if isinstance(error, SlurmError):
        return EXIT_REFUSED
    if isinstance(error, SubmissionError | TimeoutError):
        return EXIT_ERROR
    return None


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _run(command: Callable[..., None]) -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    app()


def submit_main() -> None:
    """rl-submit"""
    _run(submit)


def status_main() -> None:
    """rl-status"""
    _run(status)


def stop_main() -> None:
    """rl-stop"""
    _run(stop)


def logs_main() -> None:
    """rl-logs"""
    _run(logs)
