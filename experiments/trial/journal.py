"""The journal: every state change of a trial as one line of `events.jsonl`, for people and for `rl-status`.

    {"time": 1700000000.5, "event": "worker_started", "worker": "rollout_worker/0", "attempt": 1, "pid": 4711}

The journal explains; it never decides. What decides is the trial log.
"""

import errno
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

logger = logging.getLogger(__name__)
T = TypeVar("T")

_RESERVED = ("time", "event")
_BEGINNING = b'{"time": '
_MOST_KEPT = 10_000


class Refusable(Generic[T]):
    """A queue of what is to be written, in order: what the file system refuses stays, and is tried before the next.

    Threads may add at once, and flush at once.
    """

    def __init__(self, write: Callable[[T], None]) -> None:
        self._write = write
        self.waiting: deque[T] = deque()
        self.num_dropped = 0
        """Refused here, because too many waited."""
        self.num_written = 0
        self._flushing = threading.Lock()

    def add(self, one: T) -> bool:
        """Whether there was room for it."""
        if len(self.waiting) >= _MOST_KEPT:
            self.num_dropped += 1
            return False
        self.waiting.append(one)
        return True

    def flush(self) -> OSError | None:
        """Writes what waits; why some of it still does, or None."""
        with self._flushing:
            while self.waiting:
                try:
                    self._write(self.waiting[0])
                except OSError as error:
                    return error
                self.waiting.popleft()
                self.num_written += 1
        return None


class Journal:
    """Appends events; several processes may append to one journal at the same time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines = Refusable[bytes](self.append_line)

    def append(self, event: str, **fields: Any) -> None:
        """Adds one line, see `event_line`.

        Raises:
            ValueError: as that does.
            OSError: if the file system refuses.
        """
        self.append_line(event_line(event, **fields))

    def tell(self, event: str, **fields: Any) -> None:
        """As `append`, but a refused event is kept, and written before the next one. Threads may call it at once."""
        self.lines.add(line := event_line(event, **fields))
        if refused := self.lines.flush():
            logger.warning("not in the journal yet: %s: %s", line.decode(), refused)

    def append_line(self, line: bytes) -> None:
        """Adds a line that `event_line` has made.

        Raises:
            OSError: if the file system refuses; nothing of the line counts then, so it may be added again.
        """
        line += b"\n"
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # A writer that died within a line must cost that line only, so its successor starts on a fresh one.
            if _ends_within_a_line(descriptor):
                line = b"\n" + line
            written = os.write(descriptor, line)
            if written != len(line):
                os.write(descriptor, b"\n")
                raise OSError(
                    errno.ENOSPC,
                    f"only {written} of {len(line)} bytes of an event fit into {self._path}; is the disk full?",
                )
        finally:
            os.close(descriptor)


def event_line(event: str, **fields: Any) -> bytes:
    """An event that happens now, as a line of the journal.

    Args:
        event: what happens, e.g. `worker_exited`.
        fields: whatever explains it (worker, attempt, pid, node, cause, ...); must be JSON.

    Raises:
        ValueError: if a field is named `time`, or its value is not JSON.
    """
    if "time" in fields:
        raise ValueError(f"journal field 'time' of event {event!r} is set by the journal; use another name")
    try:
        text = json.dumps({"time": time.time(), "event": event, **fields}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"event {event!r} has a field that is not JSON ({error}); convert it first") from error
    return text.encode("ascii")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole events, oldest first; an empty list if there is no journal yet."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        event = _parse(line)
        if event is not None:
            events.append(event)
        elif number < len(lines):
            # A line that was cut short is ignored by every reader; its writer got an error.
            level = logging.INFO if line.startswith(_BEGINNING) and not line.endswith(b"}") else logging.WARNING
            logger.log(level, "%s line %d is not a journal event, skipped: %r", path, number, line[:80])
    return events


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = msgspec.json.decode(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not all(key in event for key in _RESERVED):
        return None
    return event


def _ends_within_a_line(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) not in (b"\n", b"")
