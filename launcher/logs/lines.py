"""Lines of log files: the last ones, those since a moment, those that match. Pure, but for reading.

the end of a file --_backwards--> as many as are wanted, whatever its length --_since--> those from a moment on

Workers begin a line with local time, `2026-11-21 08:14:02,123`; a line without one (a traceback, a print) belongs to
the time of the line before it.
"""

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from corral.launcher.files.file_thread import PatientFiles
from corral.launcher.terminal import printable

_STAMP = re.compile(r"(\d{4}-\d{2}-\d{2})[ T](\d{2}:\d{2}:\d{2})")
_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d")
_TIMES_OF_DAY = ("%H:%M:%S", "%H:%M")
_CHUNK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
"""Of a longer line the end is shown."""


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


def stamp_of(line: str) -> str | None:
    """The local time that a line begins with, after at most a few words; later ones sort after it."""
    match = _STAMP.search(line[:64])
    return f"{match[1]} {match[2]}" if match else None


def text_of(raw: bytes) -> str:
    """A line as people see it: of a bar that redraws itself its last state, and nothing that a terminal obeys."""
    return printable(raw.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2])


def select_lines(
    path: Path, *, files: PatientFiles, count: int | None, chosen: LineFilter, end: int | None = None
) -> list[str]:
    """The last `count` lines of a file that are meant; None is all of them. A file that is not there has none.

    Args:
        end: of the part that is looked at, in bytes; all of the file unless given.
    """
    try:
        lines: Iterator[str] = map(text_of, _backwards(_blocks(path, files, end)))
        if chosen.since is not None:
            if files.run(path.stat, path).st_mtime < chosen.since:
                return []
            lines = _since(lines, chosen.since)
        return list(islice(filter(chosen.matches, lines), count))[::-1]
    except FileNotFoundError:
        return []


def end_of_lines(path: Path, *, files: PatientFiles) -> int:
    """Where the last whole line of a file ends: what comes after it is not written to its end yet."""
    try:
        newlines = ((start, block.rfind(b"\n")) for start, block in _blocks(path, files))
        return next((start + place + 1 for start, place in newlines if place >= 0), 0)
    except FileNotFoundError:
        return 0


def _blocks(path: Path, files: PatientFiles, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """What is before a place, or the end, the last block first, each with where it begins."""
    end = files.size(path) if end is None else end
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        yield start, files.read(path, start, end - start)
        end = start


def _backwards(blocks: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """The lines of blocks, the last one first, as the blocks are."""
    later = b""  # of a line whose beginning has not been read
    is_last, is_there = True, False
    for _, block in blocks:
        first, *others = block.split(b"\n")
        for piece in reversed(others):
            line = _shown_part(piece + later)
            later = b""
            if line or not is_last:  # after the last newline there is no line
                yield line
            is_last = False
        later, is_there = _shown_part(first + later), True
    if is_there and (later or not is_last):
        yield later


def _shown_part(line: bytes) -> bytes:
    """What is shown of the end of a line, whatever came before it: of a bar its last state, and never too much."""
    state = line.rstrip(b"\r")
    start = state.rfind(b"\r")  # with it, so that what comes before is not taken for a part of the state
    return line[max(start, len(line) - MAX_LINE_BYTES, 0) :]


def _since(lines: Iterable[str], since: float) -> Iterator[str]:
    """Of lines from the last one on those of that time and later."""
    moment = time.strftime(_FORMATS[0], time.localtime(since))
    unstamped: list[str] = []  # of the line before them, which is still to come
    has_stamps = False
    for line in lines:
        unstamped.append(line)
        if (stamp := stamp_of(line)) is None:
            continue
        has_stamps = True
        if stamp < moment:
            return
        yield from unstamped
        unstamped.clear()
    # A program that prints no times: the file was written to since, and nobody can say which part.
    if not has_stamps:
        yield from unstamped
