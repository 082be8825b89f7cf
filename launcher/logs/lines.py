"""Lines of log files: the last ones, those since a moment, those that match. Pure, but for reading.

the end of a file --last_lines--> as many as are wanted, whatever its length
a moment --_offset_before, from the end--> the lines from there on

Workers begin a line with local time, `2026-11-21 08:14:02,123`; a line without one (a traceback, a print) belongs to
the time of the line before it.
"""

import os
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from corral.launcher.files.patient_files import DIRECT, Files
from corral.launcher.terminal import printable

_STAMP = re.compile(r"(\d{4}-\d{2}-\d{2})[ T](\d{2}:\d{2}:\d{2})")
_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d")
_TIMES_OF_DAY = ("%H:%M:%S", "%H:%M")
_CHUNK_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFilter:
    """Which lines are shown."""

    since: float | None = None
    """Unix time."""
    pattern: re.Pattern[str] | None = None

    def matches(self, line: str) -> bool:
        """Whether the pattern, if there is one, is found in the line."""
        return self.pattern is None or self.pattern.search(line) is not None


EVERY_LINE = LineFilter()


def parse_since(text: str, *, now: float) -> float:
    """`10m`, `1.5h`, `08:14`, `2026-11-21`, `2026-11-21 08:14:02` as Unix time; a time of day is the last such moment.

    Raises:
        ValueError: saying what can be written.
    """
    if match := _AGO.fullmatch(text.strip()):
        return now - float(match[1]) * _SECONDS[match[2]]
    cleaned = text.strip().replace("T", " ")
    for form in (*_FORMATS, *_TIMES_OF_DAY):
        try:
            clock = time.strptime(cleaned, form)
        except ValueError:
            continue
        if form in _FORMATS:
            return time.mktime(clock)
        today = time.localtime(now)
        moment = time.mktime((*today[:3], *clock[3:6], *today[6:8], -1))
        return moment if moment <= now else moment - 86400.0
    raise ValueError(f"--since {text!r} is no time; write 30s, 10m, 2h, 1d, 08:14, or '2026-11-21 08:14:02'")


def stamp_of(line: str) -> float | None:
    """The time that a line begins with, after at most a few words."""
    match = _STAMP.search(line[:64])
    if match is None:
        return None
    try:
        return time.mktime(time.strptime(f"{match[1]} {match[2]}", _FORMATS[0]))
    except (ValueError, OverflowError):
        return None


def text_of(raw: bytes) -> str:
    """A line as people see it: of a bar that redraws itself its last state, and nothing that a terminal obeys."""
    return printable(raw.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2])


def select_lines(
    path: Path, *, count: int | None, chosen: LineFilter, end: int | None = None, files: Files = DIRECT
) -> list[str]:
    """The last `count` lines of a file that are meant; None is all of them. A file that is not there has none.

    Args:
        end: of the part that is looked at, in bytes; all of the file unless given.
    """
    try:
        with files.open(path) as file:
            end = file.seek(0, 2) if end is None else end
            if chosen.since is not None:
                if files.run(lambda: os.fstat(file.fileno()).st_mtime, path) < chosen.since:
                    return []
                lines = (line for line in _lines_since(file, end, chosen.since) if chosen.matches(line))
                return list(lines if count is None else deque(lines, maxlen=count))
            lines = (line for raw in _backwards(file, end) if chosen.matches(line := text_of(raw)))
            return list(islice(lines, count))[::-1]
    except FileNotFoundError:
        return []


def end_of_lines(path: Path, *, files: Files = DIRECT) -> int:
    """Where the last whole line of a file ends: what comes after it is not written to its end yet."""
    try:
        with files.open(path) as file:
            newlines = ((start, block.rfind(b"\n")) for start, block in _blocks(file, file.seek(0, 2)))
            return next((start + place + 1 for start, place in newlines if place >= 0), 0)
    except FileNotFoundError:
        return 0


def _blocks(file: BinaryIO, end: int) -> Iterator[tuple[int, bytes]]:
    """What is before a place, the last block first, each with where it begins."""
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        file.seek(start)
        yield start, file.read(end - start)
        end = start


def _backwards(file: BinaryIO, end: int) -> Iterator[bytes]:
    """The lines before a place, the last one first."""
    later: list[bytes] = []  # pieces of a line whose beginning has not been read, the last one first
    is_last = True
    for _, block in _blocks(file, end):
        first, *others = block.split(b"\n")
        for piece in reversed(others):
            line = piece + b"".join(reversed(later))
            later.clear()
            if line or not is_last:  # after the last newline there is no line
                yield line
            is_last = False
        later.append(first)
    if later and (not is_last or any(later)):
        yield b"".join(reversed(later))


def _lines_since(file: BinaryIO, end: int, since: float) -> Iterator[str]:
    file.seek(_offset_before(file, end, since))
    is_late = has_stamps = False
    early: list[str] = []
    while (place := file.tell()) < end and (raw := file.readline(end - place)):
        line = text_of(raw)
        if not is_late:
            stamp = stamp_of(line)
            has_stamps = has_stamps or stamp is not None
            is_late = stamp is not None and stamp >= since
        if is_late:
            yield line
        elif not has_stamps:
            early.append(line)
    # A program that prints no times: the file was written to since, and nobody can say which part.
    if not is_late and not has_stamps:
        yield from early


def _offset_before(file: BinaryIO, end: int, since: float) -> int:
    """A place in the file before the first line of that time, found from the end: logs are long."""
    size = _CHUNK_BYTES
    while size < end:
        file.seek(end - size)
        lines = file.read(min(size, _MAX_LINE_BYTES)).decode(errors="replace").split("\n")[1:]
        stamp = next((stamp for line in lines if (stamp := stamp_of(line)) is not None), None)
        if stamp is not None and stamp < since:
            return end - size
        size *= 2
    return 0
