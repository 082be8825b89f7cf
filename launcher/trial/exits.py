"""Exit records: one small file per ended worker, so that the first failure can be told from those that followed it.

exits/{attempt}.{kind}-{index}.{n}.json   worker, attempt, returncode, kind, signal, time, node, pid, last_lines
"""

import json
import re
import signal
from collections.abc import Mapping
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
_CONSEQUENCES = (-signal.SIGTERM, WorkerExit.SUPERSEDED, WorkerExit.GANG_BROKEN)
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
    killed_by_us: bool = False
    said: str = ""
    """What the task itself put down about its end."""
    silent_s: float = 0.0
    """How long it had given no sign of life when it was killed for that."""

    @property
    def is_consequence(self) -> bool:
        """Whether another task's end explains this one."""
        return not self.silent_s and (self.killed_by_us or self.returncode == WorkerExit.GANG_BROKEN)

    @property
    def is_charged(self) -> bool:
        """Whether it counts as a crash of the task."""
        return self.kind is ExitKind.OWN and self.returncode not in (WorkerExit.SUPERSEDED, WorkerExit.NO_ROOM)

    def __str__(self) -> str:
        if self.silent_s:
            return f"{self.task} gave no sign of life for {self.silent_s:.0f} s, and was killed"
        if self.kind is not ExitKind.OWN:
            return f"{self.task} {_MEANING_BY_KIND[self.kind]}"
        meaning = f"({self.said})" if self.said else _MEANING_BY_CODE.get(self.returncode, "")
        return f"{self.task} {exit_text(self.returncode)} {meaning}".rstrip()


def record_exit(
    directory: TrialDirectory, attempt: int, ended: TaskExit, *, pid: int, node: str, ended_at: float
) -> None:
    """Writes down how a worker ended and what it said last.

    Raises:
        OSError: if the file system refuses; it may be written down again.
    """
    kind, _, index = ended.task.partition("/")
    content = {
        "worker": ended.task,
        "attempt": attempt,
        "returncode": ended.returncode,
        "kind": ended.kind,
        "signal": signal_name(ended.returncode),
        "time": ended_at,
        "node": node,
        "pid": pid,
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


def is_consequence(record: Mapping[str, Any]) -> bool:
    """Whether another end explains this one: ended by us, or fenced, or a rank whose peer had died."""
    return record["returncode"] in _CONSEQUENCES or record.get("kind", ExitKind.OWN) != ExitKind.OWN


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
    """signal 9, or exit 3."""
    return f"signal {-returncode}" if returncode < 0 else f"exit {returncode}"


def signal_name(returncode: int) -> str | None:
    """SIGKILL for -9, None for a plain exit."""
    if returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return exit_text(returncode)


def tail_lines(path: Path, most: int) -> list[str]:
    """The last lines of a text file; an empty list if there is none."""
    lines = read_tail(path, _TAIL_BYTES).decode(errors="replace").splitlines()
    return lines[-most:] if most else []
