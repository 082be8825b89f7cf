"""What user code raised, in one line: an exception -> its type, its message, and where in the user's file it was."""

import traceback
from pathlib import Path

_OURS = Path(__file__).parents[1]  # not resolved: frames name their files as they were imported


def describe_error(error: BaseException) -> str:
    """One line for ledgers and logs: "KeyError: 'answer' (my_rewards.py:12)"."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    place = place_of(error)
    return f"{what} ({place})" if place else what


def place_of(error: BaseException) -> str:
    """Where in the user's file it was: "my_rewards.py:12"; "" if it came through none."""
    for frame in traceback.extract_tb(error.__traceback__):
        if _OURS not in Path(frame.filename).parents:  # the user's own function comes first; below may be any library
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""
