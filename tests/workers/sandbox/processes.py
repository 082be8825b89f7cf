"""What is left on this host of what a test has started, by a word that only its command lines hold."""

import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 60.0


def processes_with(word: str) -> dict[int, str]:
    """Command lines by process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if word.encode() in line:
            found[int(path.parent.name)] = line.decode(errors="replace")
    return found


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """AssertionError with these words if it never is."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
