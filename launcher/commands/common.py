"""What all commands share: exit codes, options, files that they write, and errors as one message for a user.

Each command imports what it needs when it runs, so that it answers at once.

What a shell offers after TAB: names of trials, and of their workers. Reads folder names, imports nothing heavy.

rl-status --install-completion      once; then  rl-logs gsm8k<TAB> gen<TAB>
"""

import errno
import io
import os
import re
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
    from corral.launcher.files.file_thread import PatientFiles
    from corral.launcher.trial.view import TrialFacts


Output = Literal["table", "json"]
"""Forms of what a command prints, of those that know two."""

FILEROOT_HELP = "Folder of the trials; default $CORRAL_FILEROOT, else ~/corral."
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
_INTERRUPTED = 130  # Ctrl-C, as shells say it
TRIAL_HELP = "A trial's name, experiment/trial, or the path of its directory."
Fileroot = Annotated[Path | None, typer.Option(metavar="DIR", help=FILEROOT_HELP)]


def run(command: Callable[..., None], arguments: Sequence[str] | None = None) -> NoReturn:
    """A program that is one command; `arguments` are those of the process unless given."""
    # Plain help, and usage errors in the form of all others: what a frame wraps cannot be searched or copied.
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(user_errors()(command))
    sys.stdout = sys.stdout or open(os.devnull, "w")  # the caller has closed it
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name may be no text
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        for argument in given:
            _check_argument(argument)
        code = app(args=given, standalone_mode=False)
    except TyperException as error:
        program = os.path.basename(sys.argv[0])
        near = " or ".join(getattr(error, "possibilities", None) or ())  # of an option that there is not
        hint = f"did you mean {near}?" if near else f"{program} --help shows what there is"
        print(f"error: {_usage_message(error)}\n  hint: {hint}", file=sys.stderr)
        sys.exit(CommandExit.BAD_CONFIGURATION)
    except typer.Abort:
        sys.exit(_INTERRUPTED)
    sys.exit(code or 0)


def _check_argument(argument: str) -> None:
    """Refuses what is no text, and an empty one, which is a variable of a shell that is not set."""
    option, _, _ = argument.partition("=")
    if not argument or re.fullmatch(r"--[a-z-]+=", argument):
        raise typer.BadParameter(f"{option or 'an argument'} is empty; leave it out, or set the variable behind it")
    try:
        is_text = "\0" not in argument and bool(argument.encode())
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise typer.BadParameter(
            f"{argument!r} has characters that are no UTF-8 text; rename the file, or type it anew"
        )


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
        _drop_stdout()
        raise typer.Exit(0) from None  # `rl-status | head -1` has seen enough
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except UserError as error:
        fail(str(error), error.exit_code)
    except TimeoutError as error:
        fail(str(error), CommandExit.ERROR)
    except OSError as error:
        if error.filename is None and error.errno in _OUTPUT_ERRORS:
            _drop_stdout()
            fail(f"the output cannot be written: {error.strerror}", CommandExit.ERROR)
        fail(_file_message(error), CommandExit.BAD_CONFIGURATION)


def _drop_stdout() -> None:
    """What is still buffered must not raise at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _file_message(error: OSError) -> str:
    """Which file the file system refuses, and why."""
    try:
        os.getcwd()
    except OSError:
        return "the current folder is not there any more; cd to a folder that exists, and try again"
    reason = (error.strerror or str(error)).lower()
    return f"{error.filename}: {reason}; name another path, or mend this one" if error.filename else reason


def write_output(option: str, path: Path, data: bytes) -> None:
    """Writes the file that an option of the command line names, whole or not at all.

    Raises:
        ConfigError: if there can be no file.
    """
    from corral.experiments.errors import ConfigError
    from corral.experiments.trial.directory import atomic_write

    reason = ""
    try:
        if os.path.lexists(path) and not path.is_file():
            reason = "it is a folder" if path.is_dir() else "it is there, and is no regular file"
        else:
            atomic_write(path, data)
    except OSError as error:
        missing = path.parent if not path.parent.exists() else None
        reason = f"there is no folder {missing}" if missing else (error.strerror or str(error)).lower()
    if reason:
        raise ConfigError.of(f"{option} {path} cannot be written: {reason}", hint="name a file in a folder that exists")


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
    from corral.launcher.trial.view import find_trial

    if name.startswith(("/", ".", "~")):
        place = Path(os.path.expanduser(name)).absolute()
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
    from corral.launcher.follow import exit_code, wait_for_end

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


_EXTRA_LOGS = ("redis", "supervisor")


def complete_trial(ctx: typer.Context, incomplete: str) -> list[str]:
    """Trial names that are unique, and experiment/trial for all, that begin like this."""
    paths = [plan.parent for plan in _fileroot(ctx).glob("*/*/plan.json")]
    names = [path.name for path in paths]
    candidates = [name for name in names if names.count(name) == 1]
    candidates += [f"{path.parent.name}/{path.name}" for path in paths]
    return sorted(name for name in candidates if name.startswith(incomplete))


def complete_worker(ctx: typer.Context, incomplete: str) -> list[str]:
    """Kinds and workers of the trial that was named before."""
    workers = _workers(ctx)
    kinds = dict.fromkeys(worker.partition("/")[0] for worker in workers)
    return [name for name in (*kinds, *workers, *_EXTRA_LOGS) if name.startswith(incomplete)]


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    """Kinds of worker that rl-stop may keep down."""
    return [kind for kind in ("generation_server", "rollout_worker") if kind.startswith(incomplete)]


def _fileroot(ctx: typer.Context) -> Path:
    from corral.launcher.trial.view import default_fileroot

    given = ctx.params.get("fileroot")
    return Path(os.path.expanduser(str(given))) if given else default_fileroot()


def _workers(ctx: typer.Context) -> tuple[str, ...]:
    from corral.launcher.trial.view import find_trial

    try:
        return find_trial(str(ctx.params.get("trial") or ""), _fileroot(ctx)).workers
    except UserError:
        return ()
