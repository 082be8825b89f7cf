"""What people are shown in a terminal: durations in words, some of many, others' text without what it obeys. Pure."""

import re
import time
from collections.abc import Sequence


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
