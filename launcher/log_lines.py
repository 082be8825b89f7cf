"""Lines of log files: the last ones, those since a moment, those that match. Pure, but for reading.

Workers begin a line with local time, `2026-11-21 08:14:02,123`; a line without one (a traceback, a print) belongs to
the time of the line before it.
"""

import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

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


def parse_since(text: str, *, now: float) -> float:
    """`10m`, `1.5h`, `08:14`, `2026-11-21`, `2026-11-21 08:14:02` as Unix time; a time of day is the last such moment.

    Raises:
        ValueError: saying what can be written.
    """
    if match := _AGO.fullmatch(text.strip()):
        return now - float(match[1]) * _SECONDS[match[2]]
    cleaned = text.strip().replace("T", " ")
    for form in _FORMATS:
        try:
            return time.mktime(time.strptime(cleaned, form))
        except ValueError:
            continue
    for form in _TIMES_OF_DAY:
        try:
            clock = time.strptime(cleaned, form)
        except ValueError:
            continue
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


def select_lines(path: Path, *, count: int | None, chosen: LineFilter) -> list[str]:
    """The last `count` lines of a file that are meant; None is all of them. A file that is not there has none."""
    lines: Iterable[str] = (line for line in _lines_since(path, chosen.since) if chosen.matches(line))
    if count is None:
        return list(lines)
    return list(deque(lines, maxlen=count)) if count else []


def _lines_since(path: Path, since: float | None) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            if since is not None:
                if path.stat().st_mtime < since:
                    return
                file.seek(_offset_before(path, since))
            is_late = since is None
            has_stamps = False
            early: list[str] = []
            for raw in file:
                line = raw.decode(errors="replace").rstrip("\r\n")
                if not is_late and since is not None:
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
    except FileNotFoundError:
        return


def _offset_before(path: Path, since: float) -> int:
    """A place in the file before the first line of that time, found from the end: logs are long."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        size = _CHUNK_BYTES
        while size < end:
            file.seek(end - size)
            lines = file.read(min(size, _MAX_LINE_BYTES)).decode(errors="replace").split("\n")[1:]
            stamp = next((stamp for line in lines if (stamp := stamp_of(line)) is not None), None)
            if stamp is not None and stamp < since:
                return end - size
            size *= 2
    return 0
