"""What workers print while they print it. Files are read by size, since inotify sees nothing on NFS.

every 0.3 s: files that are there --read to their end--> whole lines --> "rollout_worker/0 | line"
has the trial ended? asked before a look, so that what was written before its end is still printed
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.files.patient_files import PatientFiles
from corral.launcher.logs.files import LinePrinter, LogFile, LogFinder, NoLogsError
from corral.launcher.logs.lines import MAX_LINE_BYTES, text_of
from corral.launcher.status.reader import polite_reader
from corral.launcher.trial.find import TrialFacts

_POLL_INTERVAL_S = 0.3
_END_INTERVAL_S = 2.0
_CHUNK_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class _Reading:
    """One file, and how far it was read."""

    label: str
    path: Path
    offset: int
    partial: bytes = b""

    def new_lines(self, files: PatientFiles, *, is_over: bool) -> Iterator[bytes]:
        """The whole lines up to what is its end now; where nothing more will come, what has no newline, too."""
        is_more = True
        while is_more:
            try:
                data = files.read(self.path, self.offset, _CHUNK_BYTES)
            except FileNotFoundError:
                return
            self.offset += len(data)
            is_more = len(data) == _CHUNK_BYTES
            *lines, rest = (self.partial + data).split(b"\n")
            self.partial = rest[-MAX_LINE_BYTES:]
            yield from lines
        if is_over and self.partial:
            yield self.partial


def follow(
    find: Callable[[], Sequence[LogFile]],
    printer: LinePrinter,
    *,
    has_ended: Callable[[], bool],
    read_before: Mapping[Path, int],
    poll_interval_s: float = _POLL_INTERVAL_S,
) -> None:
    """Prints the files, and those that appear, until the trial has ended and all is printed.

    Args:
        find: the files that are there; those of an earlier call stay.
        read_before: bytes at the beginning of files that are not printed.
    """
    readings: dict[Path, _Reading] = {}
    while True:
        is_over = has_ended()  # asked first: what was written before the end is still printed
        for file in find():
            offset = read_before.get(file.path, 0)
            readings.setdefault(file.path, _Reading(label=file.label, path=file.path, offset=offset))
        width = max((len(reading.label) for reading in readings.values()), default=0)
        for reading in readings.values():
            for raw in reading.new_lines(printer.files, is_over=is_over):
                if printer.chosen.matches(line := text_of(raw)):
                    printer.show(line, label=reading.label, width=width)
        if is_over:
            return
        time.sleep(poll_interval_s)


def follow_trial(
    facts: TrialFacts, finder: LogFinder, printer: LinePrinter, *, read_before: Mapping[Path, int]
) -> None:
    """Prints what the workers of a trial print until it has ended. Ctrl-C raises KeyboardInterrupt, no more.

    Raises:
        TimeoutError: if the file system of the trial does not answer any more.
    """
    reader, looked_at, is_over = polite_reader(), float("-inf"), False

    def has_ended() -> bool:
        nonlocal looked_at, is_over
        if time.monotonic() - looked_at > _END_INTERVAL_S:
            looked_at, is_over = time.monotonic(), reader.read([facts])[0].is_final
        return is_over

    def find() -> Sequence[LogFile]:
        try:
            return printer.files.run(finder.find, facts.directory.path)
        except NoLogsError:  # of a new attempt there are none yet
            return []

    follow(find, printer, has_ended=has_ended, read_before=read_before)


def logs_before(directory: TrialDirectory, attempt: int) -> dict[Path, int]:
    """What `follow` need not print where an attempt begins: the logs of those before it, with their sizes."""
    own = directory.attempt_logs(attempt)
    return {path: path.stat().st_size for path in directory.logs_path.rglob("*.log") if path.parent != own}
