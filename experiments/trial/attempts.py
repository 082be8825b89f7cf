"""Attempts: each start of a trial leaves one record in control/, belongs to the one job that claimed it, and ends once.

control/attempt-0.json  {"attempt": 0, "resume": false, "mode": "slurm", "start_slot": 1, ...}     never changes
control/claim-0.json    {"job_id": "4711", "restart_count": 0, "nodes": ["n1", "n2"]}              never changes
control/end-0.json      {"attempt": 0, "state": "TIMED_OUT", "cause": "...", "then": "successor", ...}

The end is the only record of how an attempt ended: the supervisor or the keeper that decides writes it, and a later
word replaces an earlier one. Next attempts, rl-status, rl-logs, rl-stop and the page read it. It is a file of its own
because the journal is appended to from several nodes, and an append over NFS may lose a line.

    rl-submit --record_attempt--> attempt 0, unclaimed --begin_attempt of job 4711--> claimed
    job 4711 starts again (requeued), or its successor does --begin_attempt--> attempt 1, made and claimed by itself,
                                                                              unless the trial is over

A record that a crash or a full disk has cut keeps its number: nobody runs that attempt again, and the next one goes on.
"""

import contextlib
import re
import time
from collections.abc import Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec

from corral.experiments.trial.directory import TrialDirectory, atomic_write, list_names, read_record, write_if_absent
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import LogState

_FILE_NAME = re.compile(r"(?:attempt|claim)-(\d+)\.json")
_END_NAME = re.compile(r"end-(\d+)\.json")
_RECORD_NAME = re.compile(r"attempt-(\d+)\.json")
_WAY_OUT = "this attempt cannot go on; rl-stop what still runs of it, then rl-submit --resume starts the next one"


_MOST_OF_ITS_OWN = 2
_MOST_AT_ALL = 10  # in a row, of any cause: each has waited in the queue, so a human has had the time to look


class EndState(StrEnum):
    """How an attempt ends, as rl-status says it."""

    COMPLETE = "COMPLETE"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    OOM = "OOM"
    """The attempt failed because a worker needed more memory than its group asks for."""
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAILED = "NODE_FAILED"
    REQUEUED = "REQUEUED"
    LOST = "LOST"
    """Its supervisor recorded no end, and no failed node explains that."""
    UNKNOWN = "UNKNOWN"

    @property
    def may_go_on(self) -> bool:
        """Whether a next attempt may follow without a human; if nothing is known, SLURM's requeue says so."""
        return self in (*ENDED_BY_CLUSTER, EndState.TIMED_OUT)

    @property
    def is_failure(self) -> bool:
        """Whether a worker, Redis or the supervisor has ended it."""
        return self in (EndState.FAILED, EndState.OOM)


ENDED_BY_CLUSTER = (EndState.PREEMPTED, EndState.NODE_FAILED, EndState.REQUEUED, EndState.UNKNOWN)
Follows = Literal["", "requeue", "successor"]
"""What goes on after an attempt: SLURM starts its job again, another job does, or, with "", nothing without a human."""


class AttemptEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one attempt."""

    attempt: int
    state: EndState
    cause: str
    """For people."""
    then: Follows
    caused_by: str = ""
    """Which task failed, if the attempt failed: a worker as kind/index, redis, or supervisor."""
    ended_at: float = msgspec.field(default_factory=time.time)
    """Unix time."""

    @property
    def is_final(self) -> bool:
        """Whether it is the end of the trial, too."""
        return not self.then


class WhyNot(StrEnum):
    """Why no further attempt begins by itself."""

    COMPLETE = "complete"
    STOPPED = "stopped"
    NO_PROGRESS = "no progress"
    """Two attempts that could have committed did not, or too many in a row that could not."""


class AttemptRefusedError(RuntimeError):
    """No further attempt may begin without a human; its text is for people."""

    def __init__(self, reason: WhyNot, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts of one attempt for all parts of a trial."""

    attempt: int
    resume: bool
    """Whether the master may claim a trial that was stopped."""
    mode: str
    """local or slurm."""
    start_slot: int
    """First slot of the trial log that belongs to this attempt: an older Stop does not stop it."""
    submitted_at: float
    """Unix time, for people."""
    is_automatic: bool = False
    """Whether it followed the attempt before it without a human."""
    damage: str = ""
    """The damage of the file, and the remedy; the other fields are then no more than a guess."""


class AttemptClaim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The job that runs an attempt; `scontrol requeue` keeps the job id and counts up."""

    job_id: str
    """"" if the file cannot be read: somebody's, who never asks again."""
    restart_count: int
    nodes: tuple[str, ...] = ()
    """Names of those of the job."""

    def is_of(self, job_id: str, restart_count: int) -> bool:
        """Whether it is of this start of a job."""
        return (self.job_id, self.restart_count) == (job_id, restart_count)


def record_attempt(directory: TrialDirectory, *, attempt: int, resume: bool, mode: str) -> AttemptRecord:
    """Writes the record of an attempt that a human asks for."""
    # A claim without a record was left by a start that was killed between the two; nobody runs that attempt.
    _claim_path(directory, attempt).unlink(missing_ok=True)
    slot = TrialLog(directory.log_path).read().next_slot
    record = AttemptRecord(attempt=attempt, resume=resume, mode=mode, start_slot=slot, submitted_at=time.time())
    return _write_record(directory, record)


def begin_attempt(
    directory: TrialDirectory, *, job_id: str, restart_count: int, mode: str, nodes: Sequence[str] = ()
) -> AttemptRecord:
    """The attempt that this start of a job runs; the same one if the job asks again.

    Args:
        job_id: job, or what else tells one start from another (a local trial has no job).
        restart_count: how often SLURM has requeued the job before this start.
        mode: local or slurm.
        nodes: names of those of the job.

    Raises:
        AttemptRefusedError: nobody recorded an attempt for this start, and the trial may not go on by itself.
    """
    claim = AttemptClaim(job_id=job_id, restart_count=restart_count, nodes=tuple(nodes))
    while True:
        numbers = _numbers(directory, _FILE_NAME)
        own = _claimed_by(directory, numbers, claim)
        if own is not None and (record := _read_with_damage(directory, own)) is not None and not record.damage:
            return record
        newest = numbers[-1] if numbers else -1
        if own is None and newest >= 0 and read_claim(directory, newest) is None:
            write_if_absent(_claim_path(directory, newest), msgspec.json.encode(claim))
            continue  # the winner's record is read now
        # One look at the log for both: a stop that arrives later is at or after start_slot, so it stops the attempt.
        state = TrialLog(directory.log_path).read()
        attempts = read_attempts(directory)
        refusal = why_not_another(attempts, state, taken_away(directory, attempts))
        if refusal is not None:
            raise refusal
        # Our own claim without a whole record: we were killed between the two, or a full disk has cut it.
        number = newest + 1 if own is None else own
        if own is not None or write_if_absent(_claim_path(directory, number), msgspec.json.encode(claim)):
            record = AttemptRecord(
                attempt=number,
                resume=True,
                mode=mode,
                start_slot=state.next_slot,
                submitted_at=time.time(),
                is_automatic=True,
            )
            return _write_record(directory, record)


def why_not_another(
    attempts: Sequence[AttemptRecord], state: LogState, taken: Collection[int] = ()
) -> AttemptRefusedError | None:
    """Why no further attempt may begin without a human; None if one may. Pure.

    What bounds a chain is progress: it may be as long as it likes while one of its last two attempts has committed. An
    attempt whose nodes were taken away before its first commit has not shown that it cannot make one; many of those in
    a row are a sign all the same that this trial does not get far where it runs.

    Args:
        attempts: so far, the oldest first.
        state: of the trial log.
        taken: numbers of those that the cluster has ended.
    """
    if state.is_done:
        return AttemptRefusedError(WhyNot.COMPLETE, "the trial is complete")
    if state.stop is not None and not state.is_handed_over:
        return AttemptRefusedError(WhyNot.STOPPED, f"{state.stop.by} stopped the trial")
    idle = [record.attempt for record in chain_of(attempts) if record.start_slot > state.commit_slot]
    own = [attempt for attempt in idle if attempt not in taken]
    if len(own) >= _MOST_OF_ITS_OWN:
        return AttemptRefusedError(
            WhyNot.NO_PROGRESS, f"attempts {own[-2]} and {own[-1]} both ended before their first commit"
        )
    if len(idle) >= _MOST_AT_ALL:
        return AttemptRefusedError(
            WhyNot.NO_PROGRESS,
            f"the cluster has ended most of the last {len(idle)} attempts, and none of them came to a commit",
        )
    return None


def taken_away(directory: TrialDirectory, attempts: Sequence[AttemptRecord]) -> set[int]:
    """Numbers of the attempts whose job or node the cluster took: preempted, requeued, lost.

    A time limit is the user's, and is not among them. Where nobody could put an end down, the node was lost with the
    keeper: a job that ends otherwise is not started again.
    """
    ends = {record.attempt: read_end(directory, record.attempt) for record in attempts}
    return {attempt for attempt, end in ends.items() if end is None or end.state in ENDED_BY_CLUSTER}


def chain_of(attempts: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """The last attempt that a human asked for, and those that followed it by themselves."""
    first = max((place for place, record in enumerate(attempts) if not record.is_automatic), default=0)
    return list(attempts[first:])


def read_attempt(directory: TrialDirectory, attempt: int) -> AttemptRecord:
    """The record of one attempt.

    Raises:
        ValueError: if there is no such attempt, or the file is no attempt record.
    """
    path = _record_path(directory, attempt)
    if (record := read_record(path, AttemptRecord, way_out=_WAY_OUT)) is None:
        raise ValueError(f"there is no {path}; {_WAY_OUT}")
    return record


def read_claim(directory: TrialDirectory, attempt: int) -> AttemptClaim | None:
    """The job that runs or ran an attempt; None while the attempt waits for its job to start."""
    try:
        return read_record(_claim_path(directory, attempt), AttemptClaim, way_out="")
    except ValueError:
        return AttemptClaim(job_id="", restart_count=0)


def write_end(directory: TrialDirectory, end: AttemptEnd) -> None:
    """Records how an attempt ended; a later word replaces an earlier one."""
    atomic_write(directory.control_path / f"end-{end.attempt}.json", msgspec.json.encode(end))


def read_end(directory: TrialDirectory, attempt: int) -> AttemptEnd | None:
    """How an attempt ended; None if it goes on, or nobody could say so, or what was said cannot be read."""
    with contextlib.suppress(ValueError):
        return read_record(directory.control_path / f"end-{attempt}.json", AttemptEnd, way_out="")
    return None


def read_ends(directory: TrialDirectory) -> dict[int, AttemptEnd]:
    """How attempts ended so far, by their numbers."""
    ends = {number: read_end(directory, number) for number in _numbers(directory, _END_NAME)}
    return {number: end for number, end in ends.items() if end is not None}


def read_attempts(directory: TrialDirectory) -> list[AttemptRecord]:
    """All attempts whose records can be read, the oldest first."""
    records = (_read_with_damage(directory, number) for number in _numbers(directory, _RECORD_NAME))
    return [record for record in records if record is not None and not record.damage]


def last_attempt(directory: TrialDirectory) -> AttemptRecord | None:
    """The newest attempt, with its `damage` if its record cannot be read; None before the first."""
    numbers = _numbers(directory, _RECORD_NAME)
    return _read_with_damage(directory, numbers[-1]) if numbers else None


def may_resume(directory: TrialDirectory, attempt: int, log: TrialLog) -> bool:
    """Whether this attempt was submitted to continue a stopped trial, and was not itself stopped since."""
    record = read_attempt(directory, attempt)
    return record.resume and log.read().stop_slot < record.start_slot


def _record_path(directory: TrialDirectory, attempt: int) -> Path:
    return directory.control_path / f"attempt-{attempt}.json"


def _claim_path(directory: TrialDirectory, attempt: int) -> Path:
    return directory.control_path / f"claim-{attempt}.json"


def _claimed_by(directory: TrialDirectory, numbers: Sequence[int], claim: AttemptClaim) -> int | None:
    """The newest attempt of a start of a job."""
    for number in reversed(numbers):
        found = read_claim(directory, number)
        if found is not None and found.is_of(claim.job_id, claim.restart_count):
            return number
    return None


def _read_with_damage(directory: TrialDirectory, attempt: int) -> AttemptRecord | None:
    """A record, with its damage if it has any; None if there is none."""
    path = _record_path(directory, attempt)
    try:
        return read_record(path, AttemptRecord, way_out=_WAY_OUT)
    except ValueError as error:
        written_at = path.stat().st_mtime
        return AttemptRecord(
            attempt=attempt,
            resume=False,
            mode="",
            start_slot=1,
            submitted_at=written_at,
            damage=str(error),
        )


def _numbers(directory: TrialDirectory, pattern: re.Pattern[str]) -> list[int]:
    names = list_names(directory.control_path)
    return sorted({int(match[1]) for match in map(pattern.fullmatch, names) if match})


def _write_record(directory: TrialDirectory, record: AttemptRecord) -> AttemptRecord:
    atomic_write(_record_path(directory, record.attempt), msgspec.json.encode(record))
    return record
