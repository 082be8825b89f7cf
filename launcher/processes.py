"""Which process is which: a process id alone may be used again, so every check also compares the start time.

Processes of a trial carry its uuid in the environment variable CORRAL_TRIAL_UUID. That is how what a killed supervisor
left behind is found: by ownership, never by name.
"""

import os
import signal
import socket
import time
from collections.abc import Collection, Iterator
from pathlib import Path

TRIAL_UUID_VARIABLE = "CORRAL_TRIAL_UUID"


def process_start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None if there is no such process (or only its zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the command name may hold spaces and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def describe_this_process() -> dict[str, str | int]:
    """What identifies this process to others, as JSON values."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "start_ticks": process_start_ticks(pid) or 0}


def is_process_alive(description: dict[str, object]) -> bool | None:
    """Whether a described process still runs; None if it ran on another host and cannot be seen from here."""
    if description.get("host") != socket.gethostname():
        return None
    pid = description.get("pid")
    return isinstance(pid, int) and process_start_ticks(pid) == description.get("start_ticks")


def trial_processes(trial_uuid: str, *, spare: Collection[int] = ()) -> Iterator[int]:
    """Process ids on this host that carry the trial's uuid."""
    wanted = f"{TRIAL_UUID_VARIABLE}={trial_uuid}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in spare:
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # another user's process, or it has just ended
            continue
        if wanted in environment.split(b"\0") and process_start_ticks(int(entry.name)) is not None:
            yield int(entry.name)


def kill_trial_processes(trial_uuid: str, *, spare: Collection[int] = (), timeout_s: float = 5.0) -> list[int]:
    """End what an earlier supervisor of the trial left on this host; returns the ids that were killed."""
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while left := list(trial_processes(trial_uuid, spare=spare)):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"processes {left} of trial {trial_uuid} did not die within {timeout_s:.0f} s of SIGKILL"
            )
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.add(pid)
        time.sleep(0.02)
    return sorted(killed)
