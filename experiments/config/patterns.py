"""Regular expressions in a configuration, and what they find."""

import re
from typing import Annotated

from pydantic import AfterValidator


def check_pattern(pattern: str) -> str:
    """The pattern; ValueError if it is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from error
    return pattern


def _with_group(pattern: str) -> str:
    if re.compile(check_pattern(pattern)).groups < 1:
        raise ValueError(f"{pattern!r} has no group; put parentheses around what is looked for")
    return pattern


Pattern = Annotated[str, AfterValidator(check_pattern)]
"""A regular expression of Python's `re`."""

FindingPattern = Annotated[str, AfterValidator(_with_group)]
"""One whose first group is what is looked for."""


def last_found(pattern: str, text: str) -> str | None:
    """What the first group of the last match is; None without a match, or where the group has no part in it."""
    return next(reversed([match[1] for match in re.finditer(pattern, text)]), None)
