"""Timeline: when this worker did what, for people; see `corral.experiments.trial.spans` for the files.

    any thread --record--> deque --a thread, every second--> timeline/KIND-INDEX.jsonl --half of max_size--> ....1.jsonl
    presence --note_clock: its own clock beside the name service's--> a clock line before what follows

Nothing depends on it, and nobody waits for it: recording appends to a bounded deque, without a lock and without a look
at a file. A disk that hangs holds up the writing thread alone; one that refuses ends the recording, with one warning.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from corral.experiments.trial.spans import Clock, Span, spans_path
from corral.workers.streams.closing import Closing

logger = logging.getLogger(__name__)

_FLUSH_S: Final = 1.0
_MOST_WAITING: Final = 20_000  # spans, some megabytes; a disk that hangs for longer loses the oldest
_DRIFT: Final = 1e-4  # seconds a second, of a clock that is being slewed
_LEAVE_S: Final = 5.0
_MB: Final = 1 << 20

Record: TypeAlias = Callable[[Span], None]
"""Keeps one span; its times are those of `time.monotonic`."""


def unrecorded(span: Span) -> None:
    """A `Record` that keeps nothing."""


class Timeline(Closing):
    """The spans of one process of a worker.

    Example:
        with Timeline(trial.timeline_path, clock) as timeline:
            timeline.record(Span(lane="rewards", name="reward", start_s=started, end_s=time.monotonic()))
    """

    def __init__(self, folder: Path, clock: Clock, *, max_mb: int = 16) -> None:
        """
        Args:
            clock: who this is, with a first guess of its offset.
            max_mb: of both of the worker's files together.
        """
        self._folder, self._clock, self._max_bytes = folder, clock, max_mb * _MB // 2
        self._measured_s = 0.0
        self._written: Clock | None = None
        self._waiting: deque[Span] = deque(maxlen=_MOST_WAITING)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="timeline", daemon=True)
        self._thread.start()

    def record(self, span: Span) -> None:
        """See `Record`."""
        if not self._closed.is_set():
            self._waiting.append(span)

    def note_clock(self, *, asked_s: float, answered_s: float, clock_s: float) -> None:
        """The trial's clock has shown `clock_s` between two moments of `time.monotonic`.

        Of all answers the one holds that is least wrong now: an old one may have drifted. One that contradicts it does
        at once: the trial's clock was set, or is another machine's.
        """
        offset_s, error_s = clock_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2
        known_s = self._clock.error_s + _DRIFT * (answered_s - self._measured_s)
        if error_s <= known_s or abs(offset_s - self._clock.offset_s) > error_s + known_s:
            self._clock = msgspec.structs.replace(self._clock, offset_s=offset_s, error_s=error_s)
            self._measured_s = answered_s

    def close(self) -> None:
        """What was recorded is written, unless the disk does not answer."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_LEAVE_S)

    def _write_on(self) -> None:
        has_warned = False
        while True:
            is_last = self._closed.wait(_FLUSH_S)
            try:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                self._write()
            except (OSError, ValueError) as error:  # of a disk, or of a name that is no Unicode
                self._written = None
                if not has_warned:
                    logger.warning("the timeline of %s lacks spans from now on: %s", self._clock.worker, error)
                has_warned = True
            if is_last:
                return

    def _write(self) -> None:
        if not self._waiting:
            return
        path, clock = spans_path(self._folder, self._clock.worker), self._clock
        lines = [msgspec.json.encode(self._waiting.popleft()) for _ in range(len(self._waiting))]
        if path.exists() and path.stat().st_size > self._max_bytes:
            path.rename(spans_path(self._folder, clock.worker, is_old=True))
            self._written = None
        if clock != self._written:  # after an empty line: a process before may have died in the middle of one
            lines.insert(0, b"\n" + msgspec.json.encode(clock))
        with open(path, "ab", opener=partial(os.open, mode=0o600)) as file:
            file.write(b"\n".join([*lines, b""]))
        self._written = clock
