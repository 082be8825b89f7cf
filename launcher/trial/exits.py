"""Exit records: one small file per ended worker, with the verdict of the supervisor's unit machine on that end.

exits/{attempt}.{kind}-{index}.{n}.json   worker, attempt, returncode, time, node, pid, how, is_consequence, last_lines
"""

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.directory import TrialDirectory, atomic_write, read_tail


class ExitKind(StrEnum):
    """Why a task ended, or did not start."""

    OWN = "own"
    """It did so by itself; its return code says how."""
    NODE_LOST = "node_lost"
    SLURM_AWAY = "slurm_away"
    """SLURM's controller did not answer when the task was to be started."""
    FILES_AWAY = "files_away"
    """The file system refused what a start needs, as a full or a lost one does for a while."""
    JOB_GONE = "job_gone"
    """The job that it was to run in has ended."""
    NOTICED = "noticed"
    """SLURM's SIGTERM, notice that the job is about to end, reached it before it could listen."""


_MEANING_BY_KIND = {
    ExitKind.NODE_LOST: "lost its node",
    ExitKind.SLURM_AWAY: "could not be started: SLURM did not answer",
    ExitKind.FILES_AWAY: "could not be started: the file system refused",
    ExitKind.JOB_GONE: "could not be started: its job has ended",
    ExitKind.NOTICED: "ended by SLURM's notice of the job's end (SIGTERM), which came before it could listen",
}
_MEANING_BY_CODE = {
    0: "before the trial was done",
    WorkerExit.BAD_CONFIGURATION: "(it refused its configuration)",
    WorkerExit.NOT_FINITE: "(loss or gradient stays not finite)",
    WorkerExit.CANNOT_CONTINUE: "(it cannot go on, and a restart would not help: its log says why)",
    WorkerExit.SUPERSEDED: "(superseded)",
    WorkerExit.GANG_BROKEN: "(its peers failed)",
    WorkerExit.WRONG_DEVICES: "(it sees other GPUs than the plan gives it: look at its node)",
    WorkerExit.USER_CODE: "(your code fails on everything: its log says with what)",
    WorkerExit.OUT_OF_MEMORY: "(out of memory: raise `mem` of its group)",
    WorkerExit.NO_ROOM: "(a disk is full; it goes on when there is room)",
}
_TAIL_BYTES = 16384
_TAIL_LINES = 20
_MEMORY_EXITS = (-9, 137, 253)
# slurmstepd's own line, which stands beside any exit code, where the guard was killed, too, or could not write.
_SLURMS_OWN_LINE = re.compile(r"slurmstepd: error: .*\bdetected \d+ oom[-_ ]kill event", re.IGNORECASE)
_MEMORY_WORDS = ("memory limit", "oom-kill", "oom_kill", "out of memory: killed", "out-of-memory")


@dataclass(frozen=True, slots=True)
class TaskExit:
    """The end of one task; a negative return code is a signal, as `subprocess` reports it."""

    task: str
    returncode: int
    kind: ExitKind = ExitKind.OWN
    pid: int = 0
    """0 if it was not started."""
    node: str = ""
    ended_at: float = 0.0
    """Unix time."""
    said: str = ""
    """What the task itself put down about its end."""
    silent_s: float = 0.0
    """How long it had given no sign of life when it was killed for that."""
    because: str = ""
    """Why the supervisor ended it, or its nodes were gone; "" if it ended by itself or for its silence."""

    @property
    def is_consequence(self) -> bool:
        """Whether something else explains this end."""
        return not self.silent_s and (bool(self.because) or self.returncode == WorkerExit.GANG_BROKEN)

    @property
    def is_charged(self) -> bool:
        """Whether it counts as a crash of the task."""
        return self.kind is ExitKind.OWN and self.returncode not in (WorkerExit.SUPERSEDED, WorkerExit.NO_ROOM)

    @property
    def how(self) -> str:
        """The end in words, without the name of the task."""
        if self.silent_s:
            return f"gave no sign of life for {self.silent_s:.0f} s, and was killed"
        if self.kind is not ExitKind.OWN:
            return _MEANING_BY_KIND[self.kind] + (f" ({self.said})" if self.said else "")
        meaning = f"({self.said})" if self.said else _MEANING_BY_CODE.get(self.returncode, "")
        if self.because:
            meaning = f"(ended by the supervisor: {self.because}" + (f"; {self.said})" if self.said else ")")
        return f"{exit_text(self.returncode)} {meaning}".rstrip()

    def __str__(self) -> str:
        return f"{self.task} {self.how}"


def record_exit(directory: TrialDirectory, attempt: int, ended: TaskExit) -> None:
    """Writes down how a worker ended and what it said last.

    Raises:
        OSError: if the file system refuses; it may be written down again.
    """
    kind, _, index = ended.task.partition("/")
    content = {
        "worker": ended.task,
        "attempt": attempt,
        "returncode": ended.returncode,
        "time": ended.ended_at,
        "node": ended.node,
        "pid": ended.pid,
        "how": ended.how,
        "is_consequence": ended.is_consequence
        or ended.kind is not ExitKind.OWN
        or ended.returncode == WorkerExit.SUPERSEDED,
        "last_lines": tail_lines(directory.worker_log(attempt, kind, int(index)), _TAIL_LINES),
    }
    # Earlier exits of the worker have their numbers, also those that another supervisor of the attempt has recorded.
    paths = (directory.exits_path / f"{attempt}.{kind}-{index}.{number}.json" for number in count())
    atomic_write(next(path for path in paths if not path.exists()), json.dumps(content).encode())


def read_exits(directory: TrialDirectory) -> list[dict[str, Any]]:
    """All exit records, the earliest first; what is not a record is skipped."""
    records = []
    for path in directory.exits_path.glob("*.json"):
        try:
            content = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):
            continue
        if isinstance(content, dict) and {"worker", "returncode", "time"} <= content.keys():
            records.append(content)
    return sorted(records, key=lambda record: float(record["time"]))


def find_failure(exits: Sequence[Mapping[str, Any]], *, attempt: int, failed: str) -> Mapping[str, Any] | None:
    """The exit that ended an attempt: the last one of the task that failed, or the last that nothing else explains."""
    own = [one for one in exits if one.get("attempt") == attempt and one["returncode"]]
    chosen = [one for one in own if one["worker"] == failed] or [one for one in own if not one.get("is_consequence")]
    return chosen[-1] if chosen else None


def is_out_of_memory(record: Mapping[str, Any]) -> bool:
    """Whether this was the memory limit's doing: its guard knows, or SLURM says so in what the worker printed last."""
    if record.get("returncode") == WorkerExit.OUT_OF_MEMORY:
        return True
    lines = [str(line) for line in record.get("last_lines") or ()]
    if record.get("returncode") and any(map(_SLURMS_OWN_LINE.match, lines)):
        return True
    said = " ".join(lines).lower()
    return record.get("returncode") in _MEMORY_EXITS and any(words in said for words in _MEMORY_WORDS)


def exit_text(returncode: int) -> str:
    """SIGKILL, signal 64, or exit 3."""
    if returncode >= 0:
        return f"exit {returncode}"
    return next((number.name for number in signal.Signals if number == -returncode), f"signal {-returncode}")


def tail_lines(path: Path, most: int) -> list[str]:
    """The last lines of a text file; an empty list if there is none."""
    lines = read_tail(path, _TAIL_BYTES).decode(errors="replace").splitlines()
    return lines[-most:] if most else []
