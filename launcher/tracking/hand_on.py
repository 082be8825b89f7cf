"""A trial's lines ──► a tracker: all there are, then what comes, until it has ended or nobody wants to go on.

new lines? ──► add ──► flush ──► wait ──► new lines? ...      taken back? ──► another tracker, from the first line on
"""

from collections.abc import Callable

from corral.launcher.files.patient_files import PatientFiles
from corral.launcher.tracking.lines import CommittedLines
from corral.launcher.tracking.tracker import TrackedTrial
from corral.launcher.tracking.trackers import tracker_named

LOOK_S = 2.0


def hand_on(trial: TrackedTrial, to: str, *, wait: Callable[[float], bool], files: PatientFiles) -> int:
    """Hands numbers on; how many lines there were.

    Args:
        to: name or import path of the tracker.
        wait: waits for so many seconds, less once it is time to end; whether to go on after one more look. What was
            written before it said no is told.

    Raises:
        ConfigError: if there is no such tracker.
        TimeoutError, OSError: if the trial's files cannot be read.
    """
    make, lines = tracker_named(to), CommittedLines(trial.directory)
    folder = trial.directory.path / "tracking" / to.replace(":", ".")
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    tracker, num_lines, goes_on = make(folder, trial), 0, True
    while True:
        new = files.run(lambda: list(lines.new()), trial.directory.path)
        if lines.begins_anew:
            tracker.close()
            tracker, num_lines = make(folder, trial), 0
        for line in new:
            tracker.add(int(line["step"]), float(line["time"]), _numbers(line))
        num_lines += len(new)
        if new:
            continue
        tracker.flush()
        if lines.is_done or not goes_on:
            tracker.close()
            return num_lines
        goes_on = wait(LOOK_S)


def _numbers(line: dict[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in line.items()
        if name not in ("step", "time") and isinstance(value, int | float)
    }
