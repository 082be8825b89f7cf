"""Which log files a trial has, and the last lines of each.

logs/attempt-N/{kind}-{index}.log, logs/slurm-JOB.log --LogFinder--> files --LinePrinter--> "rollout_worker/0 | line"
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from corral.experiments.exit_codes import CommandExit, UserError
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.files.file_thread import PatientFiles
from corral.launcher.logs.lines import EVERY_LINE, LineFilter, select_lines
from corral.launcher.trial.view import TrialView

_NAME = re.compile(r"(?P<kind>[a-z_]+?)-(?P<index>\d+)\.log")
OTHER_LOGS = ("redis", "supervisor")
"""Of no worker; shown to who asks for them."""


class NoLogsError(UserError):
    """Nothing matches what was asked for."""

    exit_code = CommandExit.NOT_FOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """One log and whose it is."""

    label: str
    path: Path


@dataclass(slots=True)
class LogFinder:
    """Finds the log files that are meant, again and again while a trial runs."""

    directory: TrialDirectory
    selectors: Sequence[str]
    """Kind, kind/index, `redis` or `supervisor` (on SLURM, what the batch step printed); none for every worker."""
    attempt: str | None = None
    """A number, `all`, or None for the last one."""
    _jobs: dict[int, str] = field(default_factory=dict)
    _journal_bytes: int = 0

    def find(self) -> list[LogFile]:
        """What there is now.

        Raises:
            NoLogsError: saying what there is.
        """
        attempts = _attempts(self.directory, self.attempt)
        files = [log for number in attempts for log in self._files_of(number, with_attempt=len(attempts) > 1)]
        if self.selectors:
            chosen = [log for log in files if any(_matches(log.label, selector) for selector in self.selectors)]
        else:
            # Where nothing came so far as to start a worker, the others are all there is to read.
            chosen = [log for log in files if not any(_matches(log.label, other) for other in OTHER_LOGS)] or files
        if not chosen:
            have = ", ".join(sorted({log.label for log in files})) or "none yet"
            wanted = ", ".join(self.selectors) or "any worker"
            raise NoLogsError(f"no log of {wanted} in {self.directory.logs_path}; there are: {have}")
        return chosen

    def _files_of(self, attempt: int, *, with_attempt: bool) -> Iterator[LogFile]:
        suffix = f"@{attempt}" if with_attempt else ""
        if job_id := self._job_of(attempt):
            path = self.directory.logs_path / f"slurm-{job_id}.log"
            if path.exists():
                yield LogFile(label=f"supervisor{suffix}", path=path)
        for path in sorted(self.directory.attempt_logs(attempt).glob("*.log"), key=_order):
            match = _NAME.fullmatch(path.name)
            label = f"{match['kind']}/{match['index']}" if match else path.stem
            yield LogFile(label=f"{label}{suffix}", path=path)

    def _job_of(self, attempt: int) -> str:
        """The job of an attempt; one that SLURM put back into the queue has several attempts, and one log."""
        path = self.directory.journal_path
        if (size := path.stat().st_size if path.exists() else 0) != self._journal_bytes:  # that of a long trial is long
            self._journal_bytes, self._jobs = size, TrialView.open(self.directory).job_by_attempt
        before = [number for number in self._jobs if number <= attempt]
        return self._jobs[max(before)] if before else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePrinter:
    """Prints the lines of logs that are meant."""

    files: PatientFiles = field(default_factory=PatientFiles)
    write: Callable[[str], None] = partial(print, flush=True)
    chosen: LineFilter = EVERY_LINE
    has_prefix: bool = True
    """Whether each line is shown with its worker."""

    def tails(self, logs: Sequence[LogFile], count: int | None, *, ends: Mapping[Path, int]) -> None:
        """The last lines of each log; None is all of them.

        Args:
            ends: how far a log is read; to its end unless given.
        """
        width = max(len(log.label) for log in logs)
        for log in logs:
            end = ends.get(log.path)
            for line in select_lines(log.path, files=self.files, count=count, chosen=self.chosen, end=end):
                self.show(line, label=log.label, width=width)

    def show(self, line: str, *, label: str, width: int) -> None:
        """One line, whatever is in it."""
        self.write(f"{label.ljust(width)} | {line}" if self.has_prefix else line)


def _attempts(directory: TrialDirectory, attempt: str | None) -> list[int]:
    numbers = sorted(
        int(path.name.removeprefix("attempt-"))
        for path in directory.logs_path.glob("attempt-*")
        if path.name.removeprefix("attempt-").isdecimal()
    )
    if attempt == "all" or not numbers:
        return numbers
    if attempt is None:
        return numbers[-1:]
    if not attempt.isdecimal() or int(attempt) not in numbers:
        have = ", ".join(map(str, numbers))
        raise NoLogsError(f"no attempt {attempt!r}; there are {have} (or write all)")
    return [int(attempt)]


def attempt_number(directory: TrialDirectory, attempt: str | None) -> int | None:
    """One attempt that there is; None where all are meant.

    Raises:
        NoLogsError: if there is no such attempt.
    """
    return None if attempt in (None, "all") else _attempts(directory, attempt)[0]


def _order(path: Path) -> tuple[str, int]:
    match = _NAME.fullmatch(path.name)
    return (match["kind"], int(match["index"])) if match else (path.stem, 0)


def _matches(label: str, selector: str) -> bool:
    name = label.partition("@")[0]
    return name == selector or name.partition("/")[0] == selector
