"""Attempts: each start of a trial leaves one record in control/, written before anything runs.

control/attempt-0.json  {"attempt": 0, "resume": false, "mode": "local", "start_slot": 1, ...}
"""

import os
import re
import time

import msgspec

from corral.experiments.trial_directory import TrialDirectory, atomic_write
from corral.experiments.trial_log import Stop, TrialLog

_RECORD_NAME = re.compile(r"attempt-(\d+)\.json")


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


def record_attempt(directory: TrialDirectory, *, attempt: int, resume: bool, mode: str) -> AttemptRecord:
    """Writes the record of an attempt that is about to start."""
    record = AttemptRecord(
        attempt=attempt,
        resume=resume,
        mode=mode,
        start_slot=TrialLog(directory.log_path).read().next_slot,
        submitted_at=time.time(),
        submit_host=os.uname().nodename,
    )
    atomic_write(directory.control_path / f"attempt-{attempt}.json", msgspec.json.encode(record))
    return record


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


def last_attempt(directory: TrialDirectory) -> AttemptRecord | None:
    """The newest attempt, or None before the first."""
    try:
        names = os.listdir(directory.control_path)
    except FileNotFoundError:
        return None
    numbers = [int(match[1]) for match in map(_RECORD_NAME.fullmatch, names) if match]
    return read_attempt(directory, max(numbers)) if numbers else None


def may_resume(directory: TrialDirectory, attempt: int, log: TrialLog) -> bool:
    """Whether this attempt was submitted to continue a stopped trial, and was not itself stopped since."""
    record = read_attempt(directory, attempt)
    stopped_since = any(isinstance(entry, Stop) for _, entry in log.read_from(record.start_slot))
    return record.resume and not stopped_since
