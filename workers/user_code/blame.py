"""Finds the user's line: an exception, or a frame that hangs -> type, message, file and line of the user's code."""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# Not resolved: frames name their files as they were imported.
_OURS = {Path(__file__).parents[2] / folder for folder in ("experiments", "name_resolve", "scheduling", "workers")}
_OURS.add(Path(os.__file__).parent / "asyncio")  # it runs what is async, and is not what was written
# Characters: user code may say and raise a text of any size.
LONGEST_CAUSE, LONGEST_NAME, _LONGEST_TRACEBACK = 2000, 200, 8000


def describe_error(error: BaseException) -> str:
    """One line for ledgers and logs: "KeyError: 'answer' (my_rewards.py:12)"."""
    try:
        text = str(error)
    except Exception:  # the error is the user's code, too
        text = "an error whose text cannot be shown"
    what = f"{type(error).__name__}: {text[:LONGEST_CAUSE]}" if text else type(error).__name__
    location = location_of(error)
    return printable(f"{what} ({location})" if location else what)


def printable(text: str) -> str:
    """A text of the user's code without halves of surrogate pairs, which no file and no connection takes."""
    return text.encode(errors="replace").decode()


def location_of(error: BaseException) -> str:
    """Where in the user's file it was: "my_rewards.py:12"; "" if it came through none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_path(error.filename)}:{error.lineno}"
    return _outermost(traceback.extract_tb(error.__traceback__))


def standing_in(frame: FrameType | None) -> str:
    """Where somebody stands who does not come back: ", in my_rewards.py:12"; "" if nobody knows."""
    location = _outermost(traceback.extract_stack(frame)) if frame is not None else ""
    return f", in {location}" if location else ""


@contextmanager
def watched(timeout_s: float, tell: Callable[[str], None]) -> Iterator[None]:
    """If the time is up, a thread tells where the main thread stands, as `standing_in` says it: it can end no other."""
    main_thread = threading.main_thread().ident
    timer = threading.Timer(timeout_s, lambda: tell(standing_in(sys._current_frames().get(main_thread or 0))))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def users_traceback(error: BaseException) -> str:
    """As Python prints it, from the user's first line on, if it came through any; the end of what is long."""
    trace = error.__traceback__
    while trace is not None and not _is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
    return printable("".join(line[:LONGEST_CAUSE] for line in lines)[-_LONGEST_TRACEBACK:])


def short_path(file: str) -> str:
    return Path(file).name


def _outermost(frames: traceback.StackSummary) -> str:
    """The first line of the user's: below it may be any library; "" if there is none."""
    return next((f"{short_path(frame.filename)}:{frame.lineno}" for frame in frames if _is_users(frame.filename)), "")


def _is_users(file: str) -> bool:
    path = Path(file)
    return not (file.startswith("<") or "importlib" in path.parts or _OURS & set(path.parents))
