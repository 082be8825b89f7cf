"""rl-logs: what workers print, and what went wrong first."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from corral.launcher.commands.common import EXIT_NOT_FOUND, TRIAL_HELP, Fileroot, fail, run, user_errors

if TYPE_CHECKING:
    from corral.launcher.trials import TrialFacts


def logs(
    trial: Annotated[str, typer.Argument(help=TRIAL_HELP)],
    workers: Annotated[list[str] | None, typer.Argument(help="kind or kind/index; default all.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on printing what is written.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Last lines of each worker.")] = 100,
    attempt: Annotated[str | None, typer.Option("--attempt", help="A number, or all; default the last.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The first failure, and what followed it.")] = False,
    path: Annotated[bool, typer.Option("--path", help="Print the files' paths only.")] = False,
    fileroot: Fileroot = None,
) -> None:
    """Show what a trial's workers print."""
    with user_errors():
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
            fail(str(error), EXIT_NOT_FOUND)


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


def main() -> None:
    """rl-logs"""
    run(logs)
