"""Which process is which: a process id alone may be used again, so every check also compares the start time.

Processes of a trial carry its uuid in the environment variable CORRAL_TRIAL_UUID. That is how what a killed supervisor
left behind is found: by ownership, never by name.
"""

import os
import pwd
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from corral.experiments.trial.leftovers import records_folder, take

TRIAL_UUID_VARIABLE = "CORRAL_TRIAL_UUID"


def process_start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None if there is no such process (or only its zombie)."""
    fields = _stat_of(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def _process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _stat_of(pid: int) -> list[str] | None:
    """The fields of a process's stat from the state on; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()  # the command name may hold spaces and brackets


def describe_this_process() -> dict[str, str | int]:
    """The identity of this process for others, as JSON values."""
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
    for pid in _process_ids():
        if pid not in spare and _carries(trial_uuid, pid) and process_start_ticks(pid) is not None:
            yield pid


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """The processes found of a trial, and their ends."""

    killed: tuple[int, ...]
    left: tuple[int, ...]
    """Killed, and not gone in time: a process that waits for a dead disk or GPU dies when that answers."""


def kill_trial_processes(
    trial_uuid: str, *, spare: Collection[int] = (), timeout_s: float = 5.0, grace_s: float = 0.0
) -> Leftovers:
    """Ends what runs of a trial on this host, and waits for its end.

    Args:
        grace_s: for guards whose supervisor has died: they end their workers, and remove what these leave.
    """
    killed: set[int] = set()
    given = time.monotonic() + grace_s
    while time.monotonic() < given and any(trial_processes(trial_uuid, spare=spare)):
        time.sleep(0.02)
    deadline = time.monotonic() + timeout_s
    while (left := tuple(trial_processes(trial_uuid, spare=spare))) and time.monotonic() < deadline:
        killed.update(pid for pid in left if _kill_process_of(trial_uuid, pid))
        time.sleep(0.02)
    return Leftovers(killed=tuple(sorted(killed)), left=left)


def _kill_process_of(trial_uuid: str, pid: int) -> bool:
    """SIGKILL to a process of the trial, and to no other one that got its id in the meantime."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel before 5.3: the moment between look and kill is as short as it can be
        return _carries(trial_uuid, pid) and _kill(lambda: os.kill(pid, signal.SIGKILL))
    try:
        # The descriptor is of one process for good, so what is seen of the id now is seen of it, or it is gone.
        return _carries(trial_uuid, pid) and _kill(lambda: signal.pidfd_send_signal(descriptor, signal.SIGKILL))
    finally:
        os.close(descriptor)


def _kill(send: Callable[[], None]) -> bool:
    try:
        send()
    except ProcessLookupError:
        return False
    return True


def _carries(trial_uuid: str, pid: int, *, or_has_a_title: bool = False) -> bool:
    """Whether a process is the trial's; or has overwritten its environment, as one does that gives itself a title."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # another user's process, or it has just ended
        return False
    is_hidden = or_has_a_title and b"PATH=" not in environment
    return is_hidden or f"{TRIAL_UUID_VARIABLE}={trial_uuid}".encode() in environment.split(b"\0")


def children_of(parent: int) -> list[int]:
    """Process ids of those that a process has started, or adopted; zombies among them."""
    return [pid for pid, fields in _all_stats() if int(fields[1]) == parent]


def descendants_of(ancestor: int) -> list[int]:
    """Process ids of all that come from a process and have not ended."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid, fields in _all_stats():
        children[int(fields[1])].append(pid)
    found = [ancestor]
    for parent in found:  # which grows on the way
        found += children[parent]
    return found[1:]


def kill_session(leader: int, *, start_ticks: int | None = None, trial_uuid: str = "") -> list[int]:
    """Ends what is left of a session of this user's whose leader has ended, whatever became of its environment.

    Args:
        start_ticks: of the leader, where nobody holds its id any more: a session of that id that is older, or whose
            leader lives and is another process, is not meant.
        trial_uuid: is compared then, too: a process that tells its environment tells whose it is.
    """
    if start_ticks is not None and process_start_ticks(leader) not in (None, start_ticks):
        return []
    killed = []
    for pid, fields in _all_stats():
        if int(fields[3]) != leader or fields[0] in "ZX" or pid == os.getpid():
            continue
        if start_ticks is not None and (
            int(fields[19]) < start_ticks or not _carries(trial_uuid, pid, or_has_a_title=True)
        ):
            continue
        if _kill(partial(os.kill, pid, signal.SIGKILL)):
            killed.append(pid)
    return killed


def _all_stats() -> Iterator[tuple[int, list[str]]]:
    """Of every process: its id, and the fields of its stat from the state on."""
    for pid in _process_ids():
        if (fields := _stat_of(pid)) is not None:
            yield pid, fields


def user_name() -> str:
    """This user as the system knows it: by the process's id, whatever $USER says; by number where it has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def sweep() -> list[str]:
    """Ends the processes of dead owners, of whatever trial of this user's, and removes what these have noted.

    Returns:
        The trials, by their ids. Sweeping only gives space back, so that nothing of it is an error.
    """
    swept = []
    for path in _records():
        record = take(path)
        if record is None:
            continue
        if record.head.session:
            kill_session(record.head.session, start_ticks=record.head.start_ticks, trial_uuid=record.head.trial)
        record.remove()
        swept.append(record.head.trial)
    return swept


def _records() -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(records_folder())]
    except OSError:
        return []
