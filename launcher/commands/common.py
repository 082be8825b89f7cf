"""What all commands share: exit codes, options, and errors as one message that a user can act on.

Each command imports what it needs when it runs, so that it answers at once.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, TextIO

import typer
from typer.exceptions import TyperException

from corral.experiments.exit_codes import CommandExit, UserError

if TYPE_CHECKING:
    from corral.launcher.files.patient_files import PatientFiles
    from corral.launcher.trial.find import TrialFacts


Output = Literal["table", "json"]
"""Forms of what a command prints, of those that know two."""

FILEROOT_HELP = "Folder of the trials; default $CORRAL_FILEROOT, else ~/corral."
TRIAL_HELP = "A trial's name, experiment/trial, or the path of its directory."
Fileroot = Annotated[Path | None, typer.Option(metavar="DIR", help=FILEROOT_HELP)]


def run(command: Callable[..., None], arguments: Sequence[str] | None = None) -> NoReturn:
    """A program that is one command; `arguments` are those of the process unless given."""
    # Plain help, and usage errors in the form of all others: what a frame wraps cannot be searched or copied.
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(user_errors()(command))
    try:
        code = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except TyperException as error:
        program = os.path.basename(sys.argv[0])
        print(f"error: {_usage_message(error)}\n  hint: {program} --help shows what there is", file=sys.stderr)
        sys.exit(CommandExit.BAD_CONFIGURATION)
    sys.exit(code or 0)


def _usage_message(error: TyperException) -> str:
    message = error.format_message() if isinstance(error, typer.BadParameter) else str(error)
    message = message.removeprefix("Invalid value: ").replace("Value error, ", "").rstrip(".")
    return message[:1].lower() + message[1:]


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns what a user can mend into a message and an exit code; anything else is a bug and shows itself."""
    from corral.experiments.errors import ConfigError

    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # `rl-status | head -1` has seen enough; what is still buffered must not raise at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except UserError as error:
        fail(str(error), error.exit_code)
    except TimeoutError as error:
        fail(str(error), CommandExit.ERROR)


def fail(message: str, code: CommandExit) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)


def wants_colour() -> bool:
    """Whether stdout is a terminal, whose user has not asked for plain text (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def terminal_width(out: TextIO | None = None) -> int | None:
    """Columns of the terminal that stdout is; None where it is none, and lines stay whole."""
    return shutil.get_terminal_size().columns if (out or sys.stdout).isatty() else None


def find_in_time(files: "PatientFiles", name: str, fileroot: Path) -> "TrialFacts":
    """The one trial that is meant.

    Raises:
        TimeoutError: if the file system that it is on does not answer.
        TrialNotFoundError, PlanDamagedError: see `find_trial`.
    """
    from corral.launcher.trial.find import find_trial

    if name.startswith(("/", ".", "~")):
        place = Path(name).expanduser().absolute()
    else:
        place = fileroot / name if "/" in name else fileroot / "*" / name
    return files.run(lambda: find_trial(name, fileroot), place)


@contextmanager
def leaving(message: str, *, out: TextIO | None = None) -> Iterator[None]:
    """Ctrl-C ends what waits in here, and nothing else: what goes on is said."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{message}", file=out or sys.stdout)
        raise typer.Exit(0) from None


def wait_for_trial(facts: "TrialFacts", name: str) -> None:
    from corral.launcher.status.progress import exit_code, wait_for_end

    with leaving(f"the trial keeps running; rl-stop {name} ends it, rl-status {name} -w shows it"):
        ended = wait_for_end(facts)
    code = exit_code(ended)
    print(f"{facts.name} {ended.state}" + (f": {ended.note}" if ended.note else ""))
    if facts.directory.page_path.exists():
        print(f"page       {facts.directory.page_path}")
    if code is CommandExit.FAILED:
        print(f"see        rl-logs {name} --errors", file=sys.stderr)
    if code:
        raise typer.Exit(code)
