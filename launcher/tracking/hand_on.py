"""A trial's lines ──► a tracker: all there are, then what comes, until it has ended or nobody wants to go on.

new lines? ──► add ──► flush ──► wait ──► new lines? ...      taken back? ──► another tracker, from the first line on
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import LogState
from corral.launcher.files.patient_files import PatientFiles
from corral.launcher.tracking.tracker import TrackedTrial
from corral.launcher.tracking.trackers import tracker_named

LOOK_S = 2.0


Line = dict[str, Any]
_CHUNK_BYTES = 8 << 20  # of a long trial, memory for some lines at a time


class CommittedLines:
    """The lines of metrics.jsonl that stay, since a commit covers them: each once, in the order of writing.

    metrics.jsonl   ████████████████░░░░      what a failure may still take back is not read
                                    ▲ bytes that the newest commit's manifest says; all of them once the trial is done
    """

    def __init__(self, directory: TrialDirectory) -> None:
        self._directory = directory
        self._log = TrialLog(directory.log_path)
        self._read_bytes = self._slot = 0
        self.begins_anew = False
        """Whether the last call began with the first line again, as the trial has fallen back behind what was told."""

    @property
    def is_done(self) -> bool:
        """Whether the trial had been trained to its end when lines were last read."""
        return self._log.state.is_done

    def new(self) -> Iterator[Line]:
        """Those since the last call, or the first ones of many; none once all were given.

        Raises:
            OSError: if a file cannot be read; no line is lost by it.
        """
        state = self._log.read()
        self.begins_anew = self._is_taken_back(state)
        if self.begins_anew:
            self._read_bytes = 0
        end = self._committed_bytes(state)
        if end is not None and end <= self._read_bytes:
            return
        try:
            with self._directory.metrics_path.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read(_CHUNK_BYTES if end is None else min(_CHUNK_BYTES, end - self._read_bytes))
        except FileNotFoundError:
            return
        data = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(data)
        yield from map(json.loads, data.splitlines())

    def _is_taken_back(self, state: LogState) -> bool:
        """Guarantee: what was told up to a commit stays as long as that is in the lineage. One that is not, since its
        checkpoint was damaged or it is too old to be remembered, has all be told again."""
        before, self._slot = self._slot, state.head
        return before != 0 and all(logged.slot != before for logged in state.lineage)

    def _committed_bytes(self, state: LogState) -> int | None:
        """None: all."""
        if state.is_done:
            return None
        if (commit := state.last_commit) is None:
            return 0
        manifest = self._directory.inside(commit.directory) / "manifest.json"
        try:
            return int(json.loads(manifest.read_bytes())["extra"]["lines"]["metrics"])
        except FileNotFoundError:  # a newer commit has just taken its place
            return self._read_bytes


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
