"""The supervisor's program, in its two roles.

python -m corral.launcher.supervisor --trial DIR
      keeper (this process) --starts, again if it breaks--> the same with --kept --attempt N: Supervisor
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.log_state import CorruptLogError
from corral.launcher.files.file_thread import FileThread
from corral.launcher.supervisor.keeper import keep, record_failure
from corral.launcher.supervisor.parts import make_supervisor
from corral.launcher.supervisor.recorder import Recorder
from corral.launcher.supervisor.signs_of_life import EXIT_BROKEN, SupervisorExit
from corral.launcher.supervisor.supervisor import Supervisor
from corral.launcher.supervisor.unit_specs import WorkerCommand, worker_command
from corral.launcher.trial.lock import SupervisorRunsError

logger = logging.getLogger(__name__)

_MAX_SUPERVISOR_RESTARTS = 20  # in a row, each before it has run for supervision.healthy_after_s
_TOLD_TIMEOUT_S = 10.0


def main(
    arguments: Sequence[str],
    *,
    own_command: Sequence[str] = (sys.executable, "-m", "corral.launcher.supervisor"),
    worker_command: WorkerCommand = worker_command,
) -> int:
    """`python -m corral.launcher.supervisor --trial DIR`; the keeper adds --kept and the attempt for the real one."""
    parser = argparse.ArgumentParser(prog="corral.launcher.supervisor", description="Supervise one attempt of a trial.")
    parser.add_argument("--trial", type=Path, required=True, help="the trial directory")
    parser.add_argument("--attempt", type=int, default=-1, help="number of the attempt; the keeper finds it out")
    parser.add_argument("--kept", action="store_true", help="a keeper holds the lock and starts this again")
    parser.add_argument("--signalled", action="append", default=[], help="a signal that the one before did not hear")
    options = parser.parse_args(arguments)
    directory = TrialDirectory(options.trial.resolve())
    if not options.kept:
        return keep_supervisor(directory, command=[*own_command, "--trial", str(directory.path), "--kept"])
    signals = [signal.Signals[name] for name in options.signalled]
    recorder = Recorder(FileThread("records"), Journal(directory.journal_path), attempt=options.attempt)

    def make() -> Supervisor:
        return make_supervisor(directory, options.attempt, worker_command, recorder=recorder, signals=signals)

    return run_supervisor(directory, make, recorder)


def keep_supervisor(directory: TrialDirectory, *, command: Sequence[str]) -> int:
    """The keeper's exit code; a second supervisor of a trial is refused with exit 2."""
    try:
        return keep(directory, command=command, max_restarts=_MAX_SUPERVISOR_RESTARTS)
    except SupervisorRunsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_supervisor(directory: TrialDirectory, make: Callable[[], Supervisor], recorder: Recorder) -> int:
    """Runs a supervisor. What it cannot survive ends it and what it has started; then the keeper starts another one.

    What would end that one too ends the trial: a plan that cannot be carried out here, a damaged trial log.
    """
    try:
        try:
            supervisor = make()
        except ValueError as error:
            return _fail(directory, recorder, error)
        return supervisor.run()
    except CorruptLogError as error:
        return _fail(directory, recorder, error)
    except Exception as error:
        logger.error("the supervisor breaks; the keeper starts another one", exc_info=True)
        recorder.event("supervisor_failed", cause=f"{type(error).__name__}: {error}")
        recorder.close(timeout_s=_TOLD_TIMEOUT_S)
        return EXIT_BROKEN


def _fail(directory: TrialDirectory, recorder: Recorder, error: Exception) -> SupervisorExit:
    logger.error("the trial has failed", exc_info=True)
    record_failure(directory, recorder, f"supervisor: {error}")
    recorder.close(timeout_s=_TOLD_TIMEOUT_S)
    return SupervisorExit.FAILED


def leave(exit_code: int) -> NoReturn:
    """Ends this process with exactly this code, whatever threads wait for, and though the disk of its log is full."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
