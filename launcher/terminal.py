"""Text for terminals: durations, the first of many items, harmless text of others, folded lines. Pure."""

import re
import textwrap
import time
from collections.abc import Sequence

_FIRST_COLUMN = re.compile(r"\s*\S+\s{2,}")


def format_duration(seconds: float | None) -> str:
    """12s, 5m10s, 3h12m, 2d4h."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def format_moment(seconds: float) -> str:
    """Local time of a Unix time: 2026-11-21 08:14:02."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def first_few(names: Sequence[str], *, most: int, separator: str = ",", rest: str = "more") -> str:
    """The first few of some names, and how many others there are."""
    others = len(names) - most
    return separator.join(names[:most]) + (f" and {others} {rest}" if others > 0 else "")


# Colours and the like are taken out; whatever else is not printable is shown as what it is.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")


def printable(text: str) -> str:
    """One line of text: no escape sequences, other white space as spaces, other control characters as their codes."""
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in _SEQUENCE.sub("", text).expandtabs())


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    if character.isspace():
        return " "
    return character.encode("unicode_escape").decode()


def fold(text: str, width: int | None) -> str:
    """Breaks long lines between words, and goes on below the second column, so that columns stay columns."""
    folded = list[str]()
    for line in text.split("\n"):
        if width is None or len(line) <= width:
            folded.append(line)
            continue
        column = _FIRST_COLUMN.match(line)
        indent = " " * (column.end() if column and column.end() <= width // 2 else 2)
        broken = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        folded += broken or [line]
    return "\n".join(folded)
