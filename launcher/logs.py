"""What workers print, found, prefixed and followed. Files are read by size, since inotify sees nothing on NFS.

logs/attempt-N/{kind}-{index}.log --read_new--> "rollout_worker/0 | line"
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.experiments.journal import read_journal
from corral.experiments.trial_directory import TrialDirectory
from corral.launcher.log_lines import LineFilter, select_lines

_POLL_INTERVAL_S = 0.3
_NAME = re.compile(r"(?P<kind>[a-z_]+?)-(?P<index>\d+)\.log")
_CHUNK_BYTES = 1 << 20
_EVERY_LINE = LineFilter()
OTHER_LOGS = ("redis", "supervisor")
"""Of no worker; shown to who asks for them."""


class NoLogsError(LookupError):
    """Nothing matches what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """One log and whose it is."""

    label: str
    path: Path


def find_logs(directory: TrialDirectory, selectors: Sequence[str], *, attempt: str | None = None) -> list[LogFile]:
    """The log files that are meant.

    Args:
        selectors: kind, kind/index, `redis` or `supervisor` (on SLURM, what the batch step printed); none for every
            worker.
        attempt: a number, `all`, or None for the last one.

    Raises:
        NoLogsError: saying what there is.
    """
    attempts = _attempts(directory, attempt)
    files = [log for number in attempts for log in _files_of(directory, number, with_attempt=len(attempts) > 1)]
    if selectors:
        chosen = [log for log in files if any(_matches(log.label, selector) for selector in selectors)]
    else:
        # Where nothing came so far as to start a worker, the others are all there is to read.
        chosen = [log for log in files if not any(_matches(log.label, other) for other in OTHER_LOGS)] or files
    if not chosen:
        have = ", ".join(sorted({log.label for log in files})) or "none yet"
        raise NoLogsError(
            f"no log of {', '.join(selectors) or 'any worker'} in {directory.logs_path}; there are: {have}"
        )
    return chosen


def print_tails(
    files: Sequence[LogFile],
    count: int | None,
    write: Callable[[str], None],
    *,
    chosen: LineFilter = _EVERY_LINE,
    prefix: bool = True,
) -> None:
    """The last lines of each file that are meant, each line with its worker."""
    width = max(len(file.label) for file in files)
    for file in files:
        for line in select_lines(file.path, count=count, chosen=chosen):
            write(f"{file.label.ljust(width)} | {line}" if prefix else line)


def follow(
    find: Callable[[], Sequence[LogFile]],
    write: Callable[[str], None],
    *,
    has_ended: Callable[[], bool],
    poll_interval_s: float = _POLL_INTERVAL_S,
    chosen: LineFilter = _EVERY_LINE,
    prefix: bool = True,
) -> None:
    """Prints what is appended to the files, and to those that appear, until the trial has ended and all is printed."""
    offsets = {file.path: _size(file.path) for file in find()}
    partial: dict[Path, bytes] = {}
    while True:
        is_over = has_ended()  # asked first: what was written before the end is still printed
        files = find()
        width = max((len(file.label) for file in files), default=0)
        for file in files:
            for line in _read_new(file.path, offsets, partial):
                if chosen.matches(line):
                    write(f"{file.label.ljust(width)} | {line}" if prefix else line)
        if is_over:
            return
        time.sleep(poll_interval_s)


def _attempts(directory: TrialDirectory, attempt: str | None) -> list[int]:
    numbers = sorted(
        int(path.name.removeprefix("attempt-"))
        for path in directory.logs_path.glob("attempt-*")
        if path.name.removeprefix("attempt-").isdigit()
    )
    if attempt == "all" or not numbers:
        return numbers
    if attempt is None:
        return numbers[-1:]
    if not attempt.isdigit() or int(attempt) not in numbers:
        have = ", ".join(map(str, numbers))
        raise NoLogsError(f"no attempt {attempt!r}; there are {have} (or write all)")
    return [int(attempt)]


def attempt_number(directory: TrialDirectory, attempt: str | None) -> int | None:
    """One attempt that there is; None where all are meant.

    Raises:
        NoLogsError: if there is no such attempt.
    """
    return None if attempt in (None, "all") else _attempts(directory, attempt)[0]


def _files_of(directory: TrialDirectory, attempt: int, *, with_attempt: bool) -> Iterator[LogFile]:
    suffix = f"@{attempt}" if with_attempt else ""
    for job_id in _jobs_of(directory, attempt):
        path = directory.logs_path / f"slurm-{job_id}.log"
        if path.exists():
            yield LogFile(label=f"supervisor{suffix}", path=path)
    for path in sorted(directory.attempt_logs(attempt).glob("*.log"), key=_order):
        match = _NAME.fullmatch(path.name)
        label = f"{match['kind']}/{match['index']}" if match else path.stem
        yield LogFile(label=f"{label}{suffix}", path=path)


def _jobs_of(directory: TrialDirectory, attempt: int) -> list[str]:
    """The jobs of an attempt; one that SLURM put back into the queue has several attempts, and one log."""
    jobs = {}
    for event in read_journal(directory.journal_path):
        if event["event"] == "submitted" and event.get("job_id"):
            jobs[event.get("attempt")] = str(event["job_id"])
    before = [job for number, job in jobs.items() if isinstance(number, int) and number <= attempt]
    return before[-1:]


def _order(path: Path) -> tuple[str, int]:
    match = _NAME.fullmatch(path.name)
    return (match["kind"], int(match["index"])) if match else (path.stem, 0)


def _matches(label: str, selector: str) -> bool:
    name = label.partition("@")[0]
    return name == selector or name.partition("/")[0] == selector


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read_new(path: Path, offsets: dict[Path, int], partial: dict[Path, bytes]) -> Iterator[str]:
    # Opened anew each time: over NFS that is what makes another node's writes visible.
    try:
        with path.open("rb") as file:
            file.seek(offsets.get(path, 0))
            data = file.read(_CHUNK_BYTES)
    except FileNotFoundError:
        return
    offsets[path] = offsets.get(path, 0) + len(data)
    *lines, partial[path] = (partial.get(path, b"") + data).split(b"\n")
    for line in lines:
        yield line.decode(errors="replace").rstrip("\r")
