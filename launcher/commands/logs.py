"""rl-logs: the output of workers, and the first failure."""

import json
import re
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corral.experiments.exit_codes import CommandExit
from corral.launcher.commands.common import (
    TRIAL_HELP,
    Fileroot,
    complete_trial,
    complete_worker,
    fail,
    find_in_time,
    leaving,
    run,
)

if TYPE_CHECKING:
    from corral.launcher.logs.lines import LineFilter
    from corral.launcher.trial.view import TrialFacts

_DEFAULT_LINES = 100
_WORKERS_HELP = "kind, kind/index, redis or supervisor; default all workers."
_BUNDLE_HELP = "Pack what is needed to understand a failure elsewhere, without secrets."
_SINCE_HELP = "Only what was printed since: 10m, 2h, 08:14, or a date and time."


def logs(
    trial: Annotated[str, typer.Argument(metavar="TRIAL", help=TRIAL_HELP, autocompletion=complete_trial)],
    workers: Annotated[
        list[str] | None, typer.Argument(metavar="WORKER", help=_WORKERS_HELP, autocompletion=complete_worker)
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on printing what is written.")] = False,
    lines: Annotated[
        int | None,
        typer.Option("-n", "--lines", min=0, metavar="N", help=f"Last lines of each worker; default {_DEFAULT_LINES}."),
    ] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help=_SINCE_HELP)] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only lines that match this regular expression.")
    ] = None,
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Lines as they are, without their worker.")] = False,
    attempt: Annotated[str | None, typer.Option(metavar="N", help="A number, or all; default the last.")] = None,
    errors: Annotated[
        bool, typer.Option("--errors", help="What ended the trial, or its newest failure; then the others.")
    ] = False,
    path: Annotated[bool, typer.Option("--path", help="Print the files' paths only.")] = False,
    bundle: Annotated[Path | None, typer.Option(metavar="FILE", help=_BUNDLE_HELP)] = None,
    with_texts: Annotated[bool, typer.Option("--with-texts", help="In a bundle, prompts and answers, too.")] = False,
    fileroot: Fileroot = None,
) -> None:
    """Show what a trial's workers print."""
    from corral.launcher.files.file_thread import PatientFiles
    from corral.launcher.follow import follow_trial
    from corral.launcher.logs.bundle import write_bundle
    from corral.launcher.logs.failures import describe_failures
    from corral.launcher.logs.files import LinePrinter, LogFinder, attempt_number
    from corral.launcher.logs.lines import end_of_lines
    from corral.launcher.status.reader import polite_reader
    from corral.launcher.trial.view import TrialView, default_fileroot

    chosen, files = _line_filter(since, grep), PatientFiles()
    facts = find_in_time(files, trial, fileroot or default_fileroot())
    directory = facts.directory
    if bundle is not None:
        num_files = write_bundle(directory, bundle, others=_others(facts), with_texts=with_texts)
        print(f"{num_files} files in {bundle}, {'with' if with_texts else 'without'} prompts and answers")
        return
    if errors:
        number = files.run(lambda: attempt_number(directory, attempt), directory.logs_path)
        ((status, evidence),), _ = polite_reader().read_with_answer([facts])
        now = status.troubles if number in (None, status.attempt) else ()
        view = evidence.view if evidence is not None else files.run(lambda: TrialView.open(directory), directory.path)
        print(files.run(lambda: describe_failures(view, directory, attempt=number, troubles=now), directory.path))
        return
    finder = LogFinder(directory, workers or [], attempt=attempt)
    found = files.run(finder.find, directory.path)
    if path:
        print("\n".join(str(log.path) for log in found))
        return
    count = lines if lines is not None else (None if since else _DEFAULT_LINES)
    # Where following goes on: a line that is being written is printed once it is whole.
    ends = {log.path: end_of_lines(log.path, files=files) for log in found} if follow else {}
    write = partial(print, flush=follow)
    printer = LinePrinter(files=files, write=write, chosen=chosen, has_prefix=not no_prefix)
    printer.tails(found, count, ends=ends)
    if follow:
        with leaving(f"(the trial keeps running; rl-stop {facts.name} ends it)"):
            follow_trial(facts, finder, printer, read_before=ends)


def _others(facts: "TrialFacts") -> dict[str, bytes]:
    """What a bundle has beside the trial's files: how it stands, this machine, and what SLURM knows of its jobs."""
    from corral.launcher.doctor.look import look_here, render
    from corral.launcher.slurm.client import SlurmClient, SlurmError
    from corral.launcher.status.reader import polite_reader
    from corral.launcher.status.text import render_json
    from corral.launcher.trial.view import TrialView

    found = {
        "status.json": render_json(polite_reader().read([facts])).encode(),
        "doctor.txt": render(list(look_here(facts.directory.path.parents[1]))).encode(),
    }
    jobs = [str(event["job_id"]) for event in TrialView.open(facts.directory).events if event.get("job_id")]
    records: dict[str, object] = {}
    for job_id in dict.fromkeys(jobs):
        try:
            records[job_id] = SlurmClient().job(job_id) or SlurmClient().accounted_state(job_id)
        except SlurmError as error:
            records[job_id] = str(error)
    return found | ({"slurm.json": json.dumps(records).encode()} if records else {})


def _line_filter(since: str | None, grep: str | None) -> "LineFilter":
    from corral.launcher.logs.lines import LineFilter, parse_since

    try:
        pattern = re.compile(grep) if grep is not None else None
    except re.error as error:
        fail(f"--grep {grep!r} is no regular expression: {error}", CommandExit.BAD_CONFIGURATION)
    try:
        moment = parse_since(since, now=time.time()) if since is not None else None
    except ValueError as error:
        fail(str(error), CommandExit.BAD_CONFIGURATION)
    return LineFilter(since=moment, pattern=pattern)


main = partial(run, logs)
"""rl-logs"""
