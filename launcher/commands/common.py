"""What all commands share: exit codes, options, and errors as one message that a user can act on.

Each command imports what it needs when it runs, so that it answers at once.

Exit codes: 0 ok, 1 unexpected, 2 bad configuration or usage (whatever the cluster), 3 no such trial, 4 cluster
unreachable, 5 this cluster can never run it, 6 the trial failed (--wait), 7 it was stopped (--wait)
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from corral.launcher.trials import TrialFacts

EXIT_ERROR = 1
EXIT_BAD_CONFIGURATION = 2
EXIT_NOT_FOUND = 3
EXIT_UNREACHABLE = 4
EXIT_REFUSED = 5

FILEROOT_HELP = "Folder of the trials; default $CORRAL_FILEROOT, else ~/corral."
TRIAL_HELP = "A trial's name, experiment/trial, or the path of its directory."
Fileroot = Annotated[Path | None, typer.Option("--fileroot", help=FILEROOT_HELP)]


def run(command: Callable[..., None], arguments: Sequence[str] | None = None) -> None:
    """A program that is one command; `arguments` are those of the process unless given."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    app(args=list(arguments) if arguments is not None else None)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns what a user can mend into a message and an exit code; anything else is a bug and shows itself."""
    from corral.experiments.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except (LookupError, RuntimeError, OSError) as error:
        code = _exit_code_of(error)
        if code is None:
            raise
        fail(str(error), code)


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


def fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)


def wait_for_trial(facts: "TrialFacts", name: str) -> None:
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
