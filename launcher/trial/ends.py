"""The end of a task (worker, tracker, Redis, supervisor): its observed exit, and the record that all readers use.

guard, srun, SLURM's line in the log, last word --AttemptTasks.collect--> TaskExit --UnitMachine: why--> End
                                            End --event task_ended of events.jsonl--> rl-status, rl-logs, the page
"""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.directory import TrialDirectory, read_tail

TASK_ENDED = "task_ended"
"""The event of the journal that holds an `End`."""


class ExitKind(StrEnum):
    """Why a task ended, or did not start."""

    OWN = "own"
    """The task ended by itself; its return code says how."""
    SLURM_AWAY = "slurm_away"
    """SLURM's controller did not answer when the task was to be started."""
    FILES_AWAY = "files_away"
    """The file system refused what a start needs, as a full or a lost one does for a while."""
    JOB_GONE = "job_gone"
    """The job that it was to run in has ended."""
    NOTICED = "noticed"
    """SLURM's SIGTERM, notice that the job is about to end, reached it before it could listen."""


_MEANING_BY_KIND = {
    ExitKind.SLURM_AWAY: "could not be started: SLURM did not answer",
    ExitKind.FILES_AWAY: "could not be started: the file system refused",
    ExitKind.JOB_GONE: "could not be started: its job has ended",
    ExitKind.NOTICED: "ended by SLURM's notice of the job's end (SIGTERM), which came before it could listen",
}
_CAUSE_BY_KIND = {
    ExitKind.JOB_GONE: "its job has ended",
    ExitKind.NOTICED: "SLURM ends its job",
}
_CAUSE_BY_CODE: dict[int, str] = {
    WorkerExit.PEERS_FAILED: "its peers failed",
    WorkerExit.SUPERSEDED: "another process has its place",
}
_MEANING_BY_CODE = {
    0: "before the trial was done",
    WorkerExit.BAD_CONFIGURATION: "(it refused its configuration)",
    WorkerExit.NOT_FINITE: "(loss or gradient stays not finite)",
    WorkerExit.CANNOT_CONTINUE: "(it cannot go on, and a restart would not help: its log says why)",
    WorkerExit.SUPERSEDED: "(superseded)",
    WorkerExit.PEERS_FAILED: "(its peers failed)",
    WorkerExit.WRONG_DEVICES: "(it sees other GPUs than the plan gives it: look at its node)",
    WorkerExit.USER_CODE: "(your code fails on everything: its log says with what)",
    WorkerExit.NO_ROOM: "(a disk is full; it goes on when there is room)",
}
_TAIL_BYTES = 16384
MEMORY_LINES = 20
"""The last lines of a log in which SLURM says so, if a memory limit ended the task."""
_MEMORY_EXITS = (-9, 137, 253)
# slurmstepd's own line, which stands beside any exit code, where the guard was killed, too, or could not write.
_SLURMS_OWN_LINE = re.compile(r"slurmstepd: error: .*\bdetected \d+ oom[-_ ]kill event", re.IGNORECASE)
_MEMORY_WORDS = ("memory limit", "oom-kill", "oom_kill", "out of memory: killed", "out-of-memory")


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How a task ended and why, as the supervisor's unit machine, or the keeper, has decided. Readers judge no more."""

    time: float
    """Unix time."""
    attempt: int
    who: str
    """Worker as kind/index, tracker/N, redis or supervisor."""
    code: int
    """Exit code; a negative one is a signal."""
    why: str
    """The end in words, without the name of the task."""
    caused_by: str = ""
    """What else explains the end; "" if it is the task's own failure, or no failure at all."""
    charged: bool = False
    """Whether the task ended by itself and so that a restart budget is charged for it."""
    pid: int = 0
    """0 if the task could not be started."""
    node: str = ""
    log_bytes: int | None = None
    """Size of the task's log at its end: its last lines are before it; None if it is not known."""

    def last_lines(self, directory: TrialDirectory, most: int) -> list[str]:
        """The last lines that the task printed, while its log is there."""
        kind, slash, index = self.who.partition("/")
        if not slash or self.log_bytes is None:
            return []
        return tail_lines(directory.worker_log(self.attempt, kind, int(index)), most, end=self.log_bytes)


def ends_of(events: Sequence[Mapping[str, Any]]) -> list[End]:
    """The ends in a journal, in its order."""
    return [msgspec.convert(event, End, strict=False) for event in events if event["event"] == TASK_ENDED]


@dataclass(frozen=True, slots=True)
class TaskExit:
    """The observed end of one task; a negative return code is a signal, as `subprocess` reports it."""

    task: str
    returncode: int
    kind: ExitKind = ExitKind.OWN
    pid: int = 0
    """0 if it was not started."""
    node: str = ""
    message: str = ""
    """The task's own message about its end."""
    log_bytes: int | None = None
    silent_s: float = 0.0
    """How long it had given no sign of life when it was killed for that."""
    because: str = ""
    """Why the supervisor ended it, or its nodes were gone; "" if it ended by itself or for its silence."""

    @property
    def is_of_its_unit(self) -> bool:
        """Whether it may be what ended its unit: the supervisor did not end the task, nor did its peers."""
        return bool(self.silent_s) or not (self.because or self.returncode == WorkerExit.PEERS_FAILED)

    @property
    def is_charged(self) -> bool:
        """Whether it is charged to the budget of its unit, if it ended the unit."""
        return self.kind is ExitKind.OWN and self.returncode not in (WorkerExit.SUPERSEDED, WorkerExit.NO_ROOM)

    @property
    def caused_by(self) -> str:
        """What else explains the end; "" if nothing does."""
        if self.silent_s:
            return ""
        return self.because or _CAUSE_BY_KIND.get(self.kind) or _CAUSE_BY_CODE.get(self.returncode, "")

    @property
    def why(self) -> str:
        """The end in words, without the name of the task."""
        if self.silent_s:
            return f"gave no sign of life for {self.silent_s:.0f} s, and was killed"
        if self.kind is not ExitKind.OWN:
            return _MEANING_BY_KIND[self.kind] + (f" ({self.message})" if self.message else "")
        if self.returncode == WorkerExit.OUT_OF_MEMORY:
            setting = f"groups.{self.task.partition('/')[0]}.scheduling.mem"
            return f"needed more memory than its group asks for; raise {setting}"
        meaning = f"({self.message})" if self.message else _MEANING_BY_CODE.get(self.returncode, "")
        if self.because:
            meaning = f"(ended by the supervisor: {self.because}" + (f"; {self.message})" if self.message else ")")
        return f"{exit_text(self.returncode)} {meaning}".rstrip()

    def __str__(self) -> str:
        return f"{self.task} {self.why}"


def says_out_of_memory(returncode: int, last_lines: Sequence[str]) -> bool:
    """Whether the last lines of a task that ended so say that its memory limit ended it, as SLURM prints it there."""
    if returncode and any(map(_SLURMS_OWN_LINE.match, last_lines)):
        return True
    message = " ".join(last_lines).lower()
    return returncode in _MEMORY_EXITS and any(words in message for words in _MEMORY_WORDS)


def exit_text(returncode: int) -> str:
    """SIGKILL, signal 64, or exit 3."""
    if returncode >= 0:
        return f"exit {returncode}"
    return next((number.name for number in signal.Signals if number == -returncode), f"signal {-returncode}")


def tail_lines(path: Path, most: int, *, end: int | None = None) -> list[str]:
    """The last lines of a text file, or of its first `end` bytes; an empty list if there is none."""
    lines = read_tail(path, _TAIL_BYTES, end=end).decode(errors="replace").splitlines()
    return lines[-most:] if most else []
