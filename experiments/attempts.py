"""Attempts: each start of a trial leaves one record in control/, and belongs to the one job that claimed it.

control/attempt-0.json  {"attempt": 0, "resume": false, "mode": "slurm", "start_slot": 1, ...}     never changes
control/claim-0.json    {"job_id": "4711", "restart_count": 0}

    rl-submit --record_attempt--> attempt 0, unclaimed --begin_attempt of job 4711--> claimed
    job 4711 starts again (requeued), or its successor does --begin_attempt--> attempt 1, made and claimed by itself,
                                                                              unless the trial is over
"""

import os
import re
import secrets as random_tokens
import time
from collections.abc import Sequence

import msgspec

from corral.experiments.trial_directory import TrialDirectory, atomic_write, fsync_directory, write_new_file
from corral.experiments.trial_log import LogState, Stop, TrialLog

_FILE_NAME = re.compile(r"(?:attempt|claim)-(\d+)\.json")
_RECORD_NAME = re.compile(r"attempt-(\d+)\.json")


class AttemptRefusedError(RuntimeError):
    """No further attempt may begin by itself; the text says why."""


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts of a trial need to know about one attempt."""

    attempt: int
    resume: bool
    """Whether the master may claim a trial that was stopped."""
    mode: str
    """local or slurm."""
    start_slot: int
    """First slot of the trial log that belongs to this attempt: an older Stop does not stop it."""
    submitted_at: float
    """Unix time, for people."""
    submit_host: str
    is_automatic: bool = False
    """Whether it followed the attempt before it without a human."""


class AttemptClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs an attempt; `scontrol requeue` keeps the job id and counts up."""

    job_id: str
    restart_count: int


def record_attempt(directory: TrialDirectory, *, attempt: int, resume: bool, mode: str) -> AttemptRecord:
    """Writes the record of an attempt that a human asks for."""
    # A claim without a record was left by a start that was killed between the two; nobody runs that attempt.
    (directory.control_path / f"claim-{attempt}.json").unlink(missing_ok=True)
    start_slot = TrialLog(directory.log_path).read().next_slot
    return _write_record(directory, attempt=attempt, resume=resume, mode=mode, start_slot=start_slot)


def begin_attempt(
    directory: TrialDirectory, *, job_id: str, restart_count: int, mode: str, max_attempts: int
) -> AttemptRecord:
    """The attempt that this start of a job runs; the same one if the job asks again.

    Args:
        job_id: job, or what else tells one start from another (a local trial has no job).
        restart_count: how often SLURM has requeued the job before this start.
        max_attempts: attempts that may follow each other without a human.

    Raises:
        AttemptRefusedError: nobody recorded an attempt for this start, and the trial may not go on by itself.
    """
    claim = AttemptClaim(job_id=job_id, restart_count=restart_count)
    while True:
        numbers = _numbers(directory, _FILE_NAME)
        own = next((number for number in reversed(numbers) if read_claim(directory, number) == claim), None)
        if own is not None and own in _numbers(directory, _RECORD_NAME):
            return read_attempt(directory, own)
        newest = numbers[-1] if numbers else -1
        if own is None and newest >= 0 and read_claim(directory, newest) is None:
            _try_to_claim(directory, newest, claim)
            continue  # whoever won it is found now
        # One look at the log for both: a stop that arrives later is at or after start_slot, so it stops the attempt.
        state = TrialLog(directory.log_path).read()
        why_not = why_not_another(read_attempts(directory), state, max_attempts=max_attempts)
        if why_not:
            raise AttemptRefusedError(why_not)
        number = newest + 1 if own is None else own  # our own claim without a record: we were killed between the two
        if own is not None or _try_to_claim(directory, number, claim):
            return _write_record(
                directory, attempt=number, resume=True, mode=mode, start_slot=state.next_slot, is_automatic=True
            )


def why_not_another(attempts: Sequence[AttemptRecord], state: LogState, *, max_attempts: int) -> str:
    """Why no further attempt may begin without a human; "" if one may. Pure.

    Args:
        attempts: so far, the oldest first.
        state: of the trial log.
        max_attempts: attempts that may follow each other without a human.
    """
    if state.is_done:
        return "the trial is complete"
    if state.stop is not None and not state.is_handed_over:
        return f"{state.stop.by} stopped the trial"
    chain = chain_of(attempts)
    if len(chain) >= max_attempts:
        return f"launch.max_attempts = {max_attempts} attempts have followed each other"
    if len(chain) >= 2 and not any(logged.slot >= chain[-2].start_slot for logged in state.commits):
        last = " and ".join(str(record.attempt) for record in chain[-2:])
        return f"attempts {last} both ended before their first commit"
    return ""


def chain_of(attempts: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """The last attempt that a human asked for, and those that followed it by themselves."""
    first = max((place for place, record in enumerate(attempts) if not record.is_automatic), default=0)
    return list(attempts[first:])


def read_attempt(directory: TrialDirectory, attempt: int) -> AttemptRecord:
    """The record of one attempt.

    Raises:
        FileNotFoundError: if there is no such attempt.
        ValueError: if the file is no attempt record.
    """
    path = directory.control_path / f"attempt-{attempt}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=AttemptRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not an attempt record ({error}); resume the trial with rl-submit --resume"
        ) from error


def read_claim(directory: TrialDirectory, attempt: int) -> AttemptClaim | None:
    """Who runs or ran an attempt; None while it waits for its job to start."""
    path = directory.control_path / f"claim-{attempt}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=AttemptClaim)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a claim ({error}); delete it if that attempt does not run") from error


def read_attempts(directory: TrialDirectory) -> list[AttemptRecord]:
    """All attempts, the oldest first."""
    return [read_attempt(directory, number) for number in _numbers(directory, _RECORD_NAME)]


def last_attempt(directory: TrialDirectory) -> AttemptRecord | None:
    """The newest attempt, or None before the first."""
    numbers = _numbers(directory, _RECORD_NAME)
    return read_attempt(directory, numbers[-1]) if numbers else None


def may_resume(directory: TrialDirectory, attempt: int, log: TrialLog) -> bool:
    """Whether this attempt was submitted to continue a stopped trial, and was not itself stopped since."""
    record = read_attempt(directory, attempt)
    stopped_since = any(isinstance(entry, Stop) for _, entry in log.read_from(record.start_slot))
    return record.resume and not stopped_since


def _numbers(directory: TrialDirectory, pattern: re.Pattern[str]) -> list[int]:
    try:
        names = os.listdir(directory.control_path)
    except FileNotFoundError:
        return []
    return sorted({int(match[1]) for match in map(pattern.fullmatch, names) if match})


def _write_record(
    directory: TrialDirectory, *, attempt: int, resume: bool, mode: str, start_slot: int, is_automatic: bool = False
) -> AttemptRecord:
    record = AttemptRecord(
        attempt=attempt,
        resume=resume,
        mode=mode,
        start_slot=start_slot,
        submitted_at=time.time(),
        submit_host=os.uname().nodename,
        is_automatic=is_automatic,
    )
    atomic_write(directory.control_path / f"attempt-{attempt}.json", msgspec.json.encode(record))
    return record


def _try_to_claim(directory: TrialDirectory, attempt: int, claim: AttemptClaim) -> bool:
    """Puts the claim where none is; of two that try, one gets True. link(2) is atomic on network file systems too."""
    path = directory.control_path / f"claim-{attempt}.json"
    temporary = path.with_name(f".{path.name}.{random_tokens.token_hex(4)}.tmp")
    write_new_file(temporary, msgspec.json.encode(claim))
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    fsync_directory(directory.control_path)
    return True
