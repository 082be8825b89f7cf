"""The supervisor's program, in its two roles.

python -m corral.launcher.supervisor --trial DIR
      keeper (this process) --starts, again if it breaks--> the same with --kept --attempt N: supervisor.py

The keeper loads no schema of plans: it starts in half the time and memory, and there is less that it could die of.
"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from corral.experiments.own_python import own_python
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.login_shell import leave_login_shell
from corral.launcher.files.file_thread import FileThread
from corral.launcher.supervisor.keeper import keep
from corral.launcher.supervisor.recorder import Recorder
from corral.launcher.trial.lock import SupervisorRunsError

if TYPE_CHECKING:
    from corral.launcher.supervisor.units import WorkerCommand

_MAX_SUPERVISOR_RESTARTS = 20  # in a row, each before it has run for supervision.healthy_after_s


def main(
    arguments: Sequence[str],
    *,
    own_command: Sequence[str] = tuple(own_python("-m", "corral.launcher.supervisor")),
    worker_command: "WorkerCommand | None" = None,
) -> int:
    """`python -m corral.launcher.supervisor --trial DIR`; the keeper adds --kept and the attempt for the real one.

    A second supervisor of a trial is refused with exit 2.
    """
    parser = argparse.ArgumentParser(prog="corral.launcher.supervisor", description="Supervise one attempt of a trial.")
    parser.add_argument("--trial", type=Path, required=True, help="the trial directory")
    parser.add_argument("--attempt", type=int, default=-1, help="number of the attempt; the keeper finds it out")
    parser.add_argument("--kept", action="store_true", help="a keeper holds the lock and starts this again")
    parser.add_argument("--signalled", action="append", default=[], help="a signal that the one before did not hear")
    options = parser.parse_args(arguments)
    leave_login_shell()
    directory = TrialDirectory(options.trial.resolve())
    if not options.kept:
        try:
            command = [*own_command, "--trial", str(directory.path), "--kept"]
            return keep(directory, command=command, max_restarts=_MAX_SUPERVISOR_RESTARTS)
        except SupervisorRunsError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    from corral.launcher.supervisor.supervisor import run_supervisor
    from corral.launcher.supervisor.units import worker_command as real_command

    signals = [signal.Signals[name] for name in options.signalled]
    recorder = Recorder(FileThread("records"), Journal(directory.journal_path), attempt=options.attempt)
    return run_supervisor(directory, worker_command or real_command, recorder, signals)


def leave(exit_code: int) -> NoReturn:
    """Ends this process with exactly this code, whatever threads wait for, and though the disk of its log is full."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
