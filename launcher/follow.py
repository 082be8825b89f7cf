"""Follows the output of workers. Files are read by size, since inotify sees nothing on NFS.

every 0.3 s: files that are there --read to their end--> whole lines --> "rollout_worker/0 | line"
has the trial ended? asked before a look, so that what was written before its end is still printed

rl-submit --wait: one line that says how training goes, live on a terminal, every few seconds elsewhere.

step 12/40  accuracy 0.81  1.3 s/step  2,300 tokens/s  about 36s to go  answers by step 11  RUNNING  age 1m20s
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.experiments.exit_codes import CommandExit
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.mode import has_jobs
from corral.launcher.files.file_thread import PatientFiles
from corral.launcher.files.patience import wait_until
from corral.launcher.logs.files import LinePrinter, LogFile, LogFinder, NoLogsError
from corral.launcher.logs.lines import MAX_LINE_BYTES, text_of
from corral.launcher.status.judge import TrialStatus
from corral.launcher.status.reader import StatusReader, polite_reader
from corral.launcher.terminal import format_duration, printable
from corral.launcher.trial.lock import LEAVING_TIMEOUT_S, is_locked
from corral.launcher.trial.view import TrialFacts
from corral.launcher.trial.words import TrialState
from corral.scheduling.policy_version import PolicyVersion

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


_EXIT_BY_STATE = {
    TrialState.COMPLETE: CommandExit.DONE,
    TrialState.STOPPED: CommandExit.STOPPED,
    TrialState.CANCELLED: CommandExit.STOPPED,
}
_LOOK_INTERVAL_S = 0.5
_CLUSTER_LOOK_INTERVAL_S = 1.0  # of files and Redis; the queue itself is asked less often, see slurm/job_queue.py
_PLAIN_INTERVAL_S = 5.0
_BAR_WIDTH = 24
_MIN_BAR_WIDTH = 8


_FIRST_TO_GO = ("version", "age", "speed")
"""What of the line may be left out."""


def progress_line(status: TrialStatus, *, without: Collection[str] = ()) -> str:
    """The line, without a bar."""
    servers = (row for row in status.workers if row.worker.startswith("generation_server/"))
    version = next((row.version for row in servers if row.version), "")
    parts = {
        "step": f"step {status.step or 0}" + (f"/{status.total_steps}" if status.total_steps else ""),
        "numbers": status.numbers,
        "speed": status.speed,
        # By the step alone: of "1.100" nobody would think that it comes after "1.98".
        "version": f"answers by step {PolicyVersion.parse(version).step}" if version else "",
        "state": status.state,
        "age": f"age {format_duration(status.age_s)}",
        "note": status.note,
    }
    return "  ".join(part for name, part in parts.items() if part and name not in without)


def live_line(status: TrialStatus, *, width: int) -> str:
    """The line with its bar; in a narrow terminal the bar stays and words go."""
    for num_left_out in range(len(_FIRST_TO_GO) + 1):
        line = progress_line(status, without=_FIRST_TO_GO[:num_left_out])
        if bar := progress_bar(status, room=width - len(line)):
            return bar + line
    return progress_line(status)


def progress_bar(status: TrialStatus, *, room: int) -> str:
    """`[=====    ] ` in at most so many columns; nothing if there are too few, or the number of steps is unknown."""
    width = min(_BAR_WIDTH, room - len("[] "))
    if not status.total_steps or width < _MIN_BAR_WIDTH:
        return ""
    filled = min(width, int(width * (status.step or 0) / status.total_steps))
    return f"[{'=' * filled}{' ' * (width - filled)}] "


def wait_for_end(facts: TrialFacts) -> TrialStatus:
    """Shows progress until the trial has ended; returns its last status. Ctrl-C raises KeyboardInterrupt, no more."""
    ended = _show_until_end(facts)
    wait_until(lambda: not is_locked(facts.directory), timeout_s=LEAVING_TIMEOUT_S)  # the page is drawn meanwhile
    return ended


def _show_until_end(facts: TrialFacts) -> TrialStatus:
    reader = polite_reader()
    interval_s = _CLUSTER_LOOK_INTERVAL_S if has_jobs(facts.mode) else _LOOK_INTERVAL_S
    if sys.stdout.isatty():
        return _wait_on_terminal(facts, reader, interval_s)
    printed_at, printed_step = float("-inf"), None
    while True:
        (status,) = reader.read([facts])
        moved = status.step != printed_step and time.monotonic() - printed_at >= _PLAIN_INTERVAL_S
        if status.is_final or moved or time.monotonic() - printed_at >= 6 * _PLAIN_INTERVAL_S:
            print(printable(progress_line(status)), flush=True)
            printed_at, printed_step = time.monotonic(), status.step
        if status.is_final:
            return status
        time.sleep(interval_s)


def _wait_on_terminal(facts: TrialFacts, reader: StatusReader, interval_s: float) -> TrialStatus:
    # Not at the top: rich is only needed where someone watches.
    from rich.live import Live
    from rich.text import Text

    with Live(Text(""), refresh_per_second=4, transient=False) as live:
        while True:
            (status,) = reader.read([facts])
            line = printable(live_line(status, width=live.console.width))
            live.update(Text(line, overflow="ellipsis", no_wrap=True))
            if status.is_final:
                return status
            time.sleep(interval_s)


def exit_code(status: TrialStatus) -> CommandExit:
    """The exit code of --wait."""
    return _EXIT_BY_STATE.get(status.state, CommandExit.FAILED)
