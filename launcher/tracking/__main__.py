"""The process of one tracker of a trial, which the supervisor starts.

python -m corral.launcher.tracking TRIAL_DIRECTORY NAME tracker/0       SIGTERM: one last look, and it ends

So one that hangs, or has no key, costs the others nothing, and a tracker of the user's own meets no key of another. A
tracker that fails leaves its error, with file and line of the user's code, as its last word.
"""

import signal
import sys
import traceback
from pathlib import Path
from threading import Event

from corral.experiments.errors import ConfigError
from corral.experiments.trial.directory import TrialDirectory


def _main(trial: str, to: str, task: str) -> int:
    """Hands the trial's numbers on until a signal ends it, or the trial is over."""
    is_over = Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())  # before what takes seconds to be imported
    from corral.launcher.files.file_thread import PatientFiles
    from corral.launcher.tracking.tracker import TrackedTrial
    from corral.launcher.tracking.trackers import hand_on

    directory = TrialDirectory(Path(trial))
    sys.path.insert(0, str(directory.code_path))  # a tracker of the user's own is the one that the trial keeps
    try:
        tracked = TrackedTrial.of(directory)
        hand_on(tracked, to, wait=lambda timeout_s: not is_over.wait(timeout_s), files=PatientFiles())
    except Exception as error:
        reason = str(error)
        if not isinstance(error, ConfigError):
            traceback.print_exc()
            reason = f"{type(error).__name__}: {reason}{_place(error, directory.code_path)}"
        print(reason, file=sys.stderr)
        directory.leave_word(task, reason)
        return 1
    return 0


def _place(error: Exception, code: Path) -> str:
    """Where in the trial's code it was: " (my_tracker.py:12)"; "" if it came through none of its files."""
    paths = ((Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__))
    return next((f" ({path.name}:{line})" for path, line in paths if path.is_relative_to(code)), "")


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
